//! Walker over OTLP protobuf bodies. Field numbers are those of opentelemetry-proto v1 (trace, logs, common,
//! resource); unknown fields are skipped.

use super::value::{Attribute, Record, Sink, Value, text};
use super::wire::{Fields, WireError};
use crate::decode::{Context, too_many, undecodable};
use flywheel_types::Error;

/// Visits every record of an export request.
///
/// # Errors
/// For an envelope that is not protobuf, and past the record limit.
pub fn walk<'a>(ctx: &Context<'_>, traces: bool, body: &'a [u8], sink: &mut dyn Sink<'a>) -> Result<(), Error> {
    let mut scratch = Record::default();
    items(ctx, body, &mut |resource, bytes| {
        if sink.seen() >= ctx.limits.records {
            return Err(too_many(sink.seen() + 1, ctx.limits.records));
        }
        scratch.clear();
        match if traces { span(ctx, bytes, &mut scratch) } else { log(ctx, bytes, &mut scratch) } {
            Ok(()) => sink.record(resource, &scratch),
            Err(e) => sink.broken(e.reason(), e.to_string()),
        }
        Ok(())
    })
}

/// Gives `each` the bytes of every span, log record or metric of a request with the attributes of its resource.
pub(super) fn items<'a>(
    ctx: &Context<'_>,
    body: &'a [u8],
    each: &mut impl FnMut(&[Attribute<'a>], &'a [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    for field in Fields(body) {
        let (number, value) = field.map_err(undecodable)?;
        if number == 1 {
            resource_group(ctx, value.bytes(1).map_err(undecodable)?, each)?;
        }
    }
    Ok(())
}

/// `ResourceSpans` and its like: 1 resource, 2 scopes. The resource may come after the scopes, so it is looked for first.
fn resource_group<'a>(
    ctx: &Context<'_>,
    bytes: &'a [u8],
    each: &mut impl FnMut(&[Attribute<'a>], &'a [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut resource = Vec::new();
    let mut repaired = 0;
    for field in Fields(bytes) {
        let (number, value) = field.map_err(undecodable)?;
        if number == 1 {
            let inner = value.bytes(1).map_err(undecodable)?;
            // A resource that cannot be read leaves its records without one; they say so themselves.
            if attributes(ctx, inner, 1, &mut resource, &mut repaired).is_err() {
                resource.clear();
            }
        }
    }
    for field in Fields(bytes) {
        let (number, value) = field.map_err(undecodable)?;
        if number == 2 {
            scope(value.bytes(2).map_err(undecodable)?, &resource, each)?;
        }
    }
    Ok(())
}

/// `ScopeSpans` and its like: 2 items.
fn scope<'a>(
    bytes: &'a [u8],
    resource: &[Attribute<'a>],
    each: &mut impl FnMut(&[Attribute<'a>], &'a [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    for field in Fields(bytes) {
        let (number, value) = field.map_err(undecodable)?;
        if number == 2 {
            each(resource, value.bytes(2).map_err(undecodable)?)?;
        }
    }
    Ok(())
}

/// `Span`.
fn span<'a>(ctx: &Context<'_>, bytes: &'a [u8], r: &mut Record<'a>) -> Result<(), WireError> {
    r.is_span = true;
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => r.trace_id = value.bytes(1)?.into(),
            2 => r.span_id = value.bytes(2)?.into(),
            5 => r.name = text(value.bytes(5)?, &mut r.repaired),
            7 => r.time_ns = value.fixed64(7)?,
            8 => r.end_ns = value.fixed64(8)?,
            9 => attribute(ctx, value.bytes(9)?, &mut r.attributes, &mut r.repaired)?,
            11 => {
                if r.events.len() >= ctx.limits.attributes {
                    return Err(WireError::Attributes(ctx.limits.attributes));
                }
                r.events.push(span_event(ctx, value.bytes(11)?)?);
            }
            _ => {}
        }
    }
    Ok(())
}

/// `Span.Event`.
fn span_event<'a>(ctx: &Context<'_>, bytes: &'a [u8]) -> Result<Record<'a>, WireError> {
    let mut r = Record::default();
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => r.time_ns = value.fixed64(1)?,
            2 => r.name = text(value.bytes(2)?, &mut r.repaired),
            3 => attribute(ctx, value.bytes(3)?, &mut r.attributes, &mut r.repaired)?,
            _ => {}
        }
    }
    Ok(r)
}

/// `LogRecord`.
fn log<'a>(ctx: &Context<'_>, bytes: &'a [u8], r: &mut Record<'a>) -> Result<(), WireError> {
    let mut observed = 0;
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => r.time_ns = value.fixed64(1)?,
            6 => attribute(ctx, value.bytes(6)?, &mut r.attributes, &mut r.repaired)?,
            9 => r.trace_id = value.bytes(9)?.into(),
            10 => r.span_id = value.bytes(10)?.into(),
            11 => observed = value.fixed64(11)?,
            12 => r.name = text(value.bytes(12)?, &mut r.repaired),
            _ => {}
        }
    }
    if r.time_ns == 0 {
        r.time_ns = observed;
    }
    Ok(())
}

/// All attributes of a message that keeps them in field `number`.
fn attributes<'a>(
    ctx: &Context<'_>,
    bytes: &'a [u8],
    number: u32,
    into: &mut Vec<Attribute<'a>>,
    repaired: &mut u32,
) -> Result<(), WireError> {
    for field in Fields(bytes) {
        let (n, value) = field?;
        if n == number {
            attribute(ctx, value.bytes(n)?, into, repaired)?;
        }
    }
    Ok(())
}

/// `KeyValue`: 1 key, 2 value.
pub(super) fn attribute<'a>(
    ctx: &Context<'_>,
    bytes: &'a [u8],
    into: &mut Vec<Attribute<'a>>,
    repaired: &mut u32,
) -> Result<(), WireError> {
    if into.len() >= ctx.limits.attributes {
        return Err(WireError::Attributes(ctx.limits.attributes));
    }
    let mut pair: Attribute<'a> = (std::borrow::Cow::Borrowed(""), Value::Null);
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => pair.0 = text(value.bytes(1)?, repaired),
            2 => pair.1 = any_value(ctx, value.bytes(2)?, ctx.limits.depth, repaired)?,
            _ => {}
        }
    }
    into.push(pair);
    Ok(())
}

/// `AnyValue`, at most `depth` levels deep.
fn any_value<'a>(ctx: &Context<'_>, bytes: &'a [u8], depth: usize, repaired: &mut u32) -> Result<Value<'a>, WireError> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(WireError::Depth(ctx.limits.depth));
    };
    let mut out = Value::Null;
    for field in Fields(bytes) {
        let (number, value) = field?;
        out = match number {
            1 => Value::Text(text(value.bytes(1)?, repaired)),
            2 => Value::Bool(value.varint(2)? != 0),
            // int64 travels as its two's complement.
            3 => Value::Int(value.varint(3)? as i64),
            4 => Value::Double(f64::from_bits(value.fixed64(4)?)),
            5 => {
                let mut items = Vec::new();
                for item in Fields(value.bytes(5)?) {
                    let (n, v) = item?;
                    if n == 1 {
                        items.push(any_value(ctx, v.bytes(1)?, depth, repaired)?);
                    }
                }
                Value::List(items)
            }
            6 => {
                let mut pairs = Vec::new();
                for item in Fields(value.bytes(6)?) {
                    let (n, v) = item?;
                    if n == 1 {
                        pairs.push(key_text(ctx, v.bytes(1)?, depth, repaired)?);
                    }
                }
                Value::Map(format!("{{{}}}", pairs.join(",")))
            }
            7 => Value::Bytes(hex::encode(value.bytes(7)?)),
            _ => out,
        };
    }
    Ok(out)
}

/// One pair of a nested map as JSON text.
fn key_text(ctx: &Context<'_>, bytes: &[u8], depth: usize, repaired: &mut u32) -> Result<String, WireError> {
    let (mut key, mut val) = (String::new(), Value::Null);
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => key = text(value.bytes(1)?, repaired).into_owned(),
            2 => val = any_value(ctx, value.bytes(2)?, depth, repaired)?,
            _ => {}
        }
    }
    let shown = val.to_json().unwrap_or_else(|| "null".to_owned());
    Ok(format!("{}:{shown}", serde_json::Value::from(key)))
}
