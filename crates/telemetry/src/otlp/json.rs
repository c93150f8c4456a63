//! Walker over OTLP/JSON bodies. The envelope is parsed with the records left as raw text, then each record alone.
//! As the specification asks: unknown fields are ignored, 64-bit integers may be numbers or strings, ids are hex of
//! either case. `"NaN"`, `"Infinity"` and numbers out of range are values that become NULL later, not errors.

use super::value::{Attribute, Record, Sink, Value};
use crate::decode::{Context, too_many, undecodable};
use flywheel_types::Error;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Export<'a> {
    #[serde(borrow, default)]
    resource_spans: Option<Vec<Group<'a>>>,
    #[serde(borrow, default)]
    resource_logs: Option<Vec<Group<'a>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Group<'a> {
    #[serde(borrow, default)]
    resource: Option<&'a RawValue>,
    #[serde(borrow, default)]
    scope_spans: Option<Vec<Scope<'a>>>,
    #[serde(borrow, default)]
    scope_logs: Option<Vec<Scope<'a>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Scope<'a> {
    #[serde(borrow, default)]
    spans: Option<Vec<&'a RawValue>>,
    #[serde(borrow, default)]
    log_records: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
struct Resource<'a> {
    #[serde(borrow, default)]
    attributes: Option<Vec<Pair<'a>>>,
}

#[derive(Deserialize)]
struct Pair<'a> {
    #[serde(borrow, default)]
    key: Cow<'a, str>,
    #[serde(borrow, default)]
    value: Option<Any<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Any<'a> {
    #[serde(borrow, default)]
    string_value: Option<Cow<'a, str>>,
    #[serde(default)]
    bool_value: Option<bool>,
    #[serde(borrow, default)]
    int_value: Option<&'a RawValue>,
    #[serde(borrow, default)]
    double_value: Option<&'a RawValue>,
    #[serde(borrow, default)]
    array_value: Option<Items<'a>>,
    #[serde(borrow, default)]
    kvlist_value: Option<&'a RawValue>,
    #[serde(borrow, default)]
    bytes_value: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Items<'a> {
    #[serde(borrow, default)]
    values: Option<Vec<Any<'a>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct One<'a> {
    #[serde(borrow, default)]
    name: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    event_name: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    trace_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    span_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    start_time_unix_nano: Option<&'a RawValue>,
    #[serde(borrow, default)]
    end_time_unix_nano: Option<&'a RawValue>,
    #[serde(borrow, default)]
    time_unix_nano: Option<&'a RawValue>,
    #[serde(borrow, default)]
    observed_time_unix_nano: Option<&'a RawValue>,
    #[serde(borrow, default)]
    attributes: Option<Vec<Pair<'a>>>,
    #[serde(borrow, default)]
    events: Option<Vec<One<'a>>>,
}

/// Visits every record of an export request.
///
/// # Errors
/// For an envelope that is not OTLP/JSON, and past the record limit.
pub fn walk(ctx: &Context<'_>, traces: bool, body: &[u8], sink: &mut dyn Sink) -> Result<(), Error> {
    let export: Export<'_> = serde_json::from_slice(body).map_err(undecodable)?;
    let groups = if traces { export.resource_spans } else { export.resource_logs };
    for group in groups.unwrap_or_default() {
        let resource = group
            .resource
            .and_then(|r| serde_json::from_str::<Resource<'_>>(r.get()).ok())
            .and_then(|r| pairs(ctx, r.attributes).ok())
            .unwrap_or_default();
        let scopes = if traces { group.scope_spans } else { group.scope_logs };
        for scope in scopes.unwrap_or_default() {
            let records = if traces { scope.spans } else { scope.log_records };
            for raw in records.unwrap_or_default() {
                if sink.seen() >= ctx.limits.records {
                    return Err(too_many(sink.seen() + 1, ctx.limits.records));
                }
                match record(ctx, traces, raw.get()) {
                    Ok(r) => sink.record(&resource, r),
                    Err((reason, detail)) => sink.broken(reason, detail),
                }
            }
        }
    }
    Ok(())
}

type Broken = (&'static str, String);

fn record<'a>(ctx: &Context<'_>, traces: bool, raw: &'a str) -> Result<Record<'a>, Broken> {
    let one: One<'a> = serde_json::from_str(raw).map_err(|e| ("bad_record", e.to_string()))?;
    convert(ctx, traces, one)
}

fn convert<'a>(ctx: &Context<'_>, is_span: bool, one: One<'a>) -> Result<Record<'a>, Broken> {
    let (first, second) = if is_span {
        (one.start_time_unix_nano, one.end_time_unix_nano)
    } else {
        (one.time_unix_nano, one.observed_time_unix_nano)
    };
    let (mut time_ns, end_ns) = (nanos(first)?, nanos(second)?);
    if !is_span && time_ns == 0 {
        time_ns = end_ns;
    }
    let inner = one.events.unwrap_or_default();
    if inner.len() > ctx.limits.attributes {
        return Err(("too_many_attributes", format!("more than {} events", ctx.limits.attributes)));
    }
    let events = inner.into_iter().map(|e| convert(ctx, false, e)).collect::<Result<_, _>>()?;
    Ok(Record {
        name: one.event_name.or(one.name).unwrap_or_default(),
        is_span,
        time_ns,
        end_ns,
        trace_id: id(one.trace_id.as_deref())?,
        span_id: id(one.span_id.as_deref())?,
        attributes: pairs(ctx, one.attributes)?,
        events,
        repaired: 0,
    })
}

fn id(text: Option<&str>) -> Result<Vec<u8>, Broken> {
    hex::decode(text.unwrap_or_default()).map_err(|e| ("bad_id", format!("trace or span id: {e}")))
}

/// A 64-bit time, as a number or as a string.
fn nanos(raw: Option<&RawValue>) -> Result<u64, Broken> {
    match raw.map(|r| r.get().trim_matches('"')) {
        None | Some("null" | "") => Ok(0),
        Some(text) => text.parse().map_err(|_| {
            let shown: String = text.chars().take(32).collect();
            ("bad_time", format!("`{shown}` is not a time in nanoseconds from 0 to {}", u64::MAX))
        }),
    }
}

fn pairs<'a>(ctx: &Context<'_>, from: Option<Vec<Pair<'a>>>) -> Result<Vec<Attribute<'a>>, Broken> {
    let from = from.unwrap_or_default();
    if from.len() > ctx.limits.attributes {
        return Err(("too_many_attributes", format!("more than {} attributes", ctx.limits.attributes)));
    }
    from.into_iter().map(|p| Ok((p.key, p.value.map_or(Ok(Value::Null), |v| value(v, ctx.limits.depth))?))).collect()
}

fn value<'a>(v: Any<'a>, depth: usize) -> Result<Value<'a>, Broken> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(("too_deep", "attribute values are nested too deeply".to_owned()));
    };
    if let Some(s) = v.string_value {
        return Ok(Value::Text(s));
    }
    if let Some(b) = v.bool_value {
        return Ok(Value::Bool(b));
    }
    if let Some(raw) = v.int_value {
        let text = raw.get().trim_matches('"');
        return match text.parse() {
            Ok(i) => Ok(Value::Int(i)),
            Err(_) => Err(("bad_value", format!("intValue `{}` is not a 64-bit integer", short(text)))),
        };
    }
    if let Some(raw) = v.double_value {
        let text = raw.get().trim_matches('"');
        // `f64` parsing knows NaN, Infinity and turns 1e999 into infinity: all become NULL in the mapper.
        return match text.parse() {
            Ok(d) => Ok(Value::Double(d)),
            Err(_) => Err(("bad_value", format!("doubleValue `{}` is not a number", short(text)))),
        };
    }
    if let Some(items) = v.array_value {
        let items = items.values.unwrap_or_default();
        return Ok(Value::List(items.into_iter().map(|i| value(i, depth)).collect::<Result<_, _>>()?));
    }
    if let Some(raw) = v.kvlist_value {
        return Ok(Value::Map(raw.get().to_owned()));
    }
    Ok(v.bytes_value.map_or(Value::Null, |b| Value::Bytes(b.into_owned())))
}

fn short(text: &str) -> String {
    text.chars().take(32).collect()
}
