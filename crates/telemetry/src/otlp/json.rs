//! Walker over OTLP/JSON bodies, in one pass and without an object tree. As the specification asks: unknown fields are
//! ignored, 64-bit integers may be numbers or strings, ids are hex of either case. `"NaN"`, `"Infinity"` and numbers out of
//! range are values that become NULL later, not errors. What is wrong inside one record is noted and costs that record; only
//! text that is no JSON refuses the request.

use super::scan::{Kind, Scanner, Syntax};
use super::value::{Attribute, Record, Sink, Value};
use crate::column::Text;
use crate::decode::{Context, too_many, undecodable};
use flywheel_types::Error;
use std::borrow::Cow;

/// Visits every record of an export request.
///
/// # Errors
/// For a body that is not JSON, and past the record limit.
pub fn walk<'a>(ctx: &Context<'_>, traces: bool, body: &'a [u8], sink: &mut dyn Sink<'a>) -> Result<(), Error> {
    let (groups, scopes, records) =
        if traces { ("resourceSpans", "scopeSpans", "spans") } else { ("resourceLogs", "scopeLogs", "logRecords") };
    let mut walker = Walker { ctx, traces, scopes, records, sink, scratch: Record::default(), broken: None };
    let mut s = Scanner::new(body);
    if s.kind().map_err(undecodable)? != Kind::Object {
        return Err(undecodable("the body is not a JSON object"));
    }
    walker.fields(&mut s, |w, s, key| if key == groups { w.each(s, Walker::group) } else { Ok(s.skip()?) })?;
    s.end().map_err(undecodable)
}

/// Why a walk ended early.
enum Stop {
    Syntax(Syntax),
    Refused(Error),
}

impl From<Syntax> for Stop {
    fn from(e: Syntax) -> Self {
        Self::Syntax(e)
    }
}

impl From<Stop> for Error {
    fn from(e: Stop) -> Self {
        match e {
            Stop::Syntax(e) => undecodable(e),
            Stop::Refused(e) => e,
        }
    }
}

type Walked<T> = Result<T, Stop>;
type Broken = (&'static str, String);

struct Walker<'c, 'a> {
    ctx: &'c Context<'c>,
    traces: bool,
    scopes: &'static str,
    records: &'static str,
    sink: &'c mut dyn Sink<'a>,
    scratch: Record<'a>,
    /// The first thing wrong with the record at hand.
    broken: Option<Broken>,
}

impl<'a> Walker<'_, 'a> {
    /// Every field of the object that begins here, if it is one; `f` takes the value.
    fn fields(
        &mut self,
        s: &mut Scanner<'a>,
        mut f: impl FnMut(&mut Self, &mut Scanner<'a>, &str) -> Walked<()>,
    ) -> Walked<()> {
        if !self.is(s, Kind::Object, "an object")? {
            return Ok(());
        }
        let mut first = true;
        while let Some(key) = s.key(first)? {
            first = false;
            f(self, s, &key)?;
        }
        Ok(())
    }

    /// Every element of the array that begins here, if it is one.
    fn each(
        &mut self,
        s: &mut Scanner<'a>,
        mut f: impl FnMut(&mut Self, &mut Scanner<'a>) -> Walked<()>,
    ) -> Walked<()> {
        if !self.is(s, Kind::Array, "an array")? {
            return Ok(());
        }
        let mut first = true;
        while s.element(first)? {
            first = false;
            f(self, s)?;
        }
        Ok(())
    }

    /// Steps into a value of the wanted kind. Null is an absent value; any other kind is skipped and noted.
    fn is(&mut self, s: &mut Scanner<'a>, wanted: Kind, name: &str) -> Walked<bool> {
        let kind = s.kind()?;
        if kind == wanted {
            s.enter();
            return Ok(true);
        }
        s.skip()?;
        if kind != Kind::Null {
            self.note("bad_record", || format!("{name} is expected, {kind:?} was found"));
        }
        Ok(false)
    }

    fn note(&mut self, reason: &'static str, detail: impl FnOnce() -> String) {
        self.broken.get_or_insert_with(|| (reason, detail()));
    }

    /// `ResourceSpans` or `ResourceLogs`. Scopes that come before their resource wait for it.
    fn group(&mut self, s: &mut Scanner<'a>) -> Walked<()> {
        let (mut resource, mut early) = (None, Vec::new());
        self.fields(s, |w, s, key| {
            if key == "resource" {
                resource = Some(w.resource(s)?);
            } else if key == w.scopes {
                match &resource {
                    Some(resource) => w.each(s, |w, s| w.scope(s, resource))?,
                    None => {
                        s.kind()?;
                        early.push(s.at());
                        s.skip()?;
                    }
                }
            } else {
                s.skip()?;
            }
            Ok(())
        })?;
        let resource = resource.unwrap_or_default();
        for at in early {
            self.each(&mut s.back_at(at), |w, s| w.scope(s, &resource))?;
        }
        // a group that is no object has no record to blame
        self.broken = None;
        Ok(())
    }

    /// A resource that cannot be read leaves its records without one.
    fn resource(&mut self, s: &mut Scanner<'a>) -> Walked<Vec<Attribute<'a>>> {
        let mut out = Vec::new();
        self.fields(s, |w, s, key| if key == "attributes" { w.attributes(s, &mut out) } else { Ok(s.skip()?) })?;
        if self.broken.take().is_some() {
            out.clear();
        }
        Ok(out)
    }

    fn scope(&mut self, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()> {
        self.fields(
            s,
            |w, s, key| {
                if key == w.records { w.each(s, |w, s| w.record(s, resource)) } else { Ok(s.skip()?) }
            },
        )
    }

    fn record(&mut self, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()> {
        let limit = self.ctx.limits.records;
        if self.sink.seen() >= limit {
            return Err(Stop::Refused(too_many(self.sink.seen() + 1, limit)));
        }
        self.broken = None;
        let mut record = std::mem::take(&mut self.scratch);
        record.clear();
        self.one(s, &mut record, self.traces)?;
        match self.broken.take() {
            None => self.sink.record(resource, &record),
            Some((reason, detail)) => self.sink.broken(reason, detail),
        }
        self.scratch = record;
        Ok(())
    }

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

    /// `KeyValue` list.
    fn attributes(&mut self, s: &mut Scanner<'a>, into: &mut Vec<Attribute<'a>>) -> Walked<()> {
        let limit = self.ctx.limits.attributes;
        self.each(s, |w, s| {
            let (mut key, mut value) = (Text::default(), Value::Null);
            w.fields(s, |w, s, name| {
                match name {
                    "key" => key = w.text(s)?.unwrap_or_default(),
                    "value" => value = w.any_value(s, w.ctx.limits.depth)?,
                    _ => s.skip()?,
                }
                Ok(())
            })?;
            if into.len() < limit {
                into.push((key, value));
            } else {
                w.note("too_many_attributes", || format!("more than {limit} attributes"));
            }
            Ok(())
        })
    }

    /// `AnyValue`, at most `depth` levels deep.
    fn any_value(&mut self, s: &mut Scanner<'a>, depth: usize) -> Walked<Value<'a>> {
        let Some(depth) = depth.checked_sub(1) else {
            self.note("too_deep", || "attribute values are nested too deeply".to_owned());
            s.skip()?;
            return Ok(Value::Null);
        };
        let mut out = Value::Null;
        self.fields(s, |w, s, key| {
            let found = match key {
                "stringValue" => w.text(s)?.map(Value::Text),
                "boolValue" => w.boolean(s)?.map(Value::Bool),
                "intValue" => w.parsed(s, "intValue", "a 64-bit integer")?.map(Value::Int),
                // `f64` parsing knows NaN, Infinity and turns 1e999 into infinity: all become NULL in the mapper.
                "doubleValue" => w.parsed(s, "doubleValue", "a number")?.map(Value::Double),
                "arrayValue" => Some(w.array(s, depth)?),
                "kvlistValue" => {
                    s.kind()?;
                    let start = s.at();
                    s.skip()?;
                    Some(Value::Map(s.raw(start).to_owned()))
                }
                "bytesValue" => w.text(s)?.map(|b| Value::Bytes(b.into_owned())),
                _ => {
                    s.skip()?;
                    None
                }
            };
            if let Some(found) = found {
                out = found;
            }
            Ok(())
        })?;
        Ok(out)
    }

    fn array(&mut self, s: &mut Scanner<'a>, depth: usize) -> Walked<Value<'a>> {
        let mut items = Vec::new();
        self.fields(s, |w, s, key| {
            if key != "values" {
                return Ok(s.skip()?);
            }
            w.each(s, |w, s| {
                items.push(w.any_value(s, depth)?);
                Ok(())
            })
        })?;
        Ok(Value::List(items))
    }

    fn text(&mut self, s: &mut Scanner<'a>) -> Walked<Option<Text<'a>>> {
        match s.kind()? {
            Kind::String => Ok(Some(s.string()?)),
            kind => {
                s.skip()?;
                if kind != Kind::Null {
                    self.note("bad_record", || format!("text is expected, {kind:?} was found"));
                }
                Ok(None)
            }
        }
    }

    fn boolean(&mut self, s: &mut Scanner<'a>) -> Walked<Option<bool>> {
        match s.kind()? {
            Kind::Bool | Kind::Null => Ok(s.word()?),
            kind => {
                s.skip()?;
                self.note("bad_value", || format!("boolValue is expected, {kind:?} was found"));
                Ok(None)
            }
        }
    }

    /// A number, as such or as text.
    fn parsed<T: std::str::FromStr>(&mut self, s: &mut Scanner<'a>, name: &str, what: &str) -> Walked<Option<T>> {
        let shown = match s.kind()? {
            Kind::String => s.string()?,
            Kind::Number => Cow::Borrowed(s.number()?),
            Kind::Null => {
                s.skip()?;
                return Ok(None);
            }
            kind => {
                s.skip()?;
                Cow::Owned(format!("{kind:?}"))
            }
        };
        let parsed = shown.parse().ok();
        if parsed.is_none() {
            self.note("bad_value", || format!("{name} `{}` is not {what}", short(&shown)));
        }
        Ok(parsed)
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

    /// A 64-bit time, as a number or as a string.
    fn nanos(&mut self, s: &mut Scanner<'a>) -> Walked<u64> {
        let text = match s.kind()? {
            Kind::String => s.string()?,
            Kind::Number => Cow::Borrowed(s.number()?),
            kind => {
                s.skip()?;
                if kind == Kind::Null { Cow::Borrowed("") } else { Cow::Owned(format!("{kind:?}")) }
            }
        };
        if text.is_empty() {
            return Ok(0);
        }
        let parsed = text.parse().ok();
        if parsed.is_none() {
            self.note("bad_time", || format!("`{}` is not a time in nanoseconds from 0 to {}", short(&text), u64::MAX));
        }
        Ok(parsed.unwrap_or(0))
    }
}

fn short(text: &str) -> String {
    text.chars().take(32).collect()
}
