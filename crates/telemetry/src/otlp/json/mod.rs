//! Walker over OTLP/JSON traces and logs, in one pass and without an object tree. What is wrong inside one record is noted and
//! costs that record; only text that is no JSON refuses the request.

pub(crate) mod walker;

use super::scan::Scanner;
use super::value::{Attribute, Record, Sink};
use crate::decode::{Context, too_many};
use flywheel_types::Error;
use std::borrow::Cow;
use walker::{Items, Stop, Walked, Walker};

/// Visits every record of an export request.
///
/// # Errors
/// For a body that is not JSON, and past the record limit.
pub fn walk<'a>(ctx: &Context<'_>, traces: bool, body: &'a [u8], sink: &mut dyn Sink<'a>) -> Result<(), Error> {
    walker::walk(ctx, Records { traces, sink, scratch: Record::default() }, body)
}

/// Spans or log records on their way to the mapper.
struct Records<'c, 'a> {
    traces: bool,
    sink: &'c mut dyn Sink<'a>,
    scratch: Record<'a>,
}

impl<'a> Items<'a> for Records<'_, 'a> {
    fn names(&self) -> [&'static str; 3] {
        if self.traces { ["resourceSpans", "scopeSpans", "spans"] } else { ["resourceLogs", "scopeLogs", "logRecords"] }
    }

    fn item(w: &mut Walker<'_, Self>, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()> {
        let limit = w.ctx.limits.records;
        if w.to.sink.seen() >= limit {
            return Err(Stop::Refused(too_many(w.to.sink.seen() + 1, limit)));
        }
        let mut record = std::mem::take(&mut w.to.scratch);
        record.clear();
        let traces = w.to.traces;
        let broken = w.watched(|w| w.one(s, &mut record, traces))?;
        match broken {
            None => w.to.sink.record(resource, &record),
            Some((reason, detail)) => w.to.sink.broken(reason, detail),
        }
        w.to.scratch = record;
        Ok(())
    }
}

impl<'a> Walker<'_, Records<'_, 'a>> {
    /// `Span`, `Span.Event` or `LogRecord`.
    fn one(&mut self, s: &mut Scanner<'a>, r: &mut Record<'a>, is_span: bool) -> Walked<()> {
        r.is_span = is_span;
        let (mut event_name, mut observed) = (None, 0);
        self.fields(s, |w, s, key| {
            match key {
                "name" => r.name = w.text(s)?.unwrap_or_default(),
                "eventName" => event_name = w.text(s)?,
                "traceId" => r.trace_id = w.id(s)?,
                "spanId" => r.span_id = w.id(s)?,
                "startTimeUnixNano" if is_span => r.time_ns = w.nanos(s)?,
                "endTimeUnixNano" if is_span => r.end_ns = w.nanos(s)?,
                "timeUnixNano" if !is_span => r.time_ns = w.nanos(s)?,
                "observedTimeUnixNano" if !is_span => observed = w.nanos(s)?,
                "attributes" => w.attributes(s, &mut r.attributes)?,
                "events" if is_span => w.each(s, |w, s| {
                    let mut event = Record::default();
                    w.one(s, &mut event, false)?;
                    if r.events.len() < w.ctx.limits.attributes {
                        r.events.push(event);
                    } else {
                        let limit = w.ctx.limits.attributes;
                        w.note("too_many_attributes", || format!("more than {limit} events"));
                    }
                    Ok(())
                })?,
                _ => s.skip()?,
            }
            Ok(())
        })?;
        if let Some(name) = event_name {
            r.name = name;
        }
        if r.time_ns == 0 {
            r.time_ns = observed;
        }
        Ok(())
    }

    fn id(&mut self, s: &mut Scanner<'a>) -> Walked<Cow<'a, [u8]>> {
        let text = self.text(s)?.unwrap_or_default();
        match hex::decode(text.as_bytes()) {
            Ok(bytes) => Ok(Cow::Owned(bytes)),
            Err(e) => {
                self.note("bad_id", || format!("trace or span id: {e}"));
                Ok(Cow::default())
            }
        }
    }
}
