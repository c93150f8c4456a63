//! Walker over OTLP protobuf metrics. Field numbers are those of opentelemetry-proto v1 (metrics); unknown fields and exemplars
//! are skipped.

use super::{Buckets, Form, Metric, Number, Point, Sink};
use crate::decode::{Context, too_many};
use crate::otlp::proto::{attribute, items};
use crate::otlp::value::{Attribute, text};
use crate::otlp::wire::{Field, Fields, WireError};
use flywheel_types::Error;

/// Visits every data point of an export request.
pub(super) fn walk<'a>(ctx: &Context<'_>, body: &'a [u8], sink: &mut dyn Sink<'a>) -> Result<(), Error> {
    items(ctx, body, &mut |resource, bytes| {
        let mut metric = Metric::default();
        let broken = match fields(ctx, bytes, resource, &mut metric, sink) {
            Ok(()) => None,
            Err(Stop::Wire(e)) => Some((e.reason(), e.to_string())),
            Err(Stop::Forms(detail)) => Some(("bad_record", detail)),
            Err(Stop::Full) => return Err(too_many(sink.seen() + 1, ctx.limits.records)),
        };
        sink.end(metric, broken);
        Ok(())
    })
}

/// Why a metric ends early.
enum Stop {
    Wire(WireError),
    Forms(String),
    /// One data point more than a request may have.
    Full,
}

impl From<WireError> for Stop {
    fn from(e: WireError) -> Self {
        Self::Wire(e)
    }
}

/// `Metric`.
fn fields<'a>(
    ctx: &Context<'_>,
    bytes: &'a [u8],
    resource: &[Attribute<'a>],
    metric: &mut Metric<'a>,
    sink: &mut dyn Sink<'a>,
) -> Result<(), Stop> {
    if sink.seen() >= ctx.limits.records {
        return Err(Stop::Full);
    }
    // nobody stores how many strings were repaired
    let repaired = &mut 0;
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => metric.name = text(value.bytes(1)?, repaired),
            2 => metric.description = text(value.bytes(2)?, repaired),
            3 => metric.unit = text(value.bytes(3)?, repaired),
            _ => {
                if let Some((_, _, form)) = Form::FIELDS.iter().find(|(n, ..)| *n == number) {
                    metric.set_form(*form).map_err(Stop::Forms)?;
                    data(ctx, *form, value.bytes(number)?, resource, metric, sink)?;
                }
            }
        }
    }
    Ok(())
}

/// `Gauge`, `Sum`, `Histogram`, `ExponentialHistogram`, `Summary`: 1 points, 2 temporality, 3 monotonic.
fn data<'a>(
    ctx: &Context<'_>,
    form: Form,
    bytes: &'a [u8],
    resource: &[Attribute<'a>],
    metric: &mut Metric<'a>,
    sink: &mut dyn Sink<'a>,
) -> Result<(), Stop> {
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => {
                let bytes = value.bytes(1)?;
                if sink.seen() >= ctx.limits.records {
                    return Err(Stop::Full);
                }
                match point(ctx, form, bytes) {
                    Ok(point) => sink.point(resource, form, point),
                    Err(e) => sink.broken(e.reason(), e.to_string()),
                }
            }
            // an enum is an int32 in its two's complement
            2 => metric.temporality = i64::from(value.varint(2)? as i32),
            3 => metric.is_monotonic = value.varint(3)? != 0,
            _ => {}
        }
    }
    Ok(())
}

/// A data point of any form. 2 and 3 are the times everywhere, 5 the sum of all that have one.
fn point<'a>(ctx: &Context<'_>, form: Form, bytes: &'a [u8]) -> Result<Point<'a>, WireError> {
    let mut p = Point::new(form);
    for field in Fields(bytes) {
        let (number, value) = field?;
        match (form, number) {
            (_, 2) => p.start_ns = value.fixed64(2)?,
            (_, 3) => p.time_ns = value.fixed64(3)?,
            (Form::Gauge | Form::Sum, _) => number_point(ctx, number, value, &mut p)?,
            (Form::Histogram, _) => histogram_point(ctx, number, value, &mut p)?,
            (Form::Exponential, _) => exponential_point(ctx, number, value, &mut p)?,
            (Form::Summary, _) => summary_point(ctx, number, value, &mut p)?,
        }
    }
    Ok(p)
}

/// `NumberDataPoint`.
fn number_point<'a>(ctx: &Context<'_>, number: u32, value: Field<'a>, p: &mut Point<'a>) -> Result<(), WireError> {
    match number {
        4 => p.value = Some(Number::Double(double(value, 4)?)),
        // sfixed64
        6 => p.value = Some(Number::Int(value.fixed64(6)? as i64)),
        7 => attribute(ctx, value.bytes(7)?, &mut p.attributes, &mut 0)?,
        8 => p.flags = value.varint(8)? as u32,
        _ => {}
    }
    Ok(())
}

/// `HistogramDataPoint`.
fn histogram_point<'a>(ctx: &Context<'_>, number: u32, value: Field<'a>, p: &mut Point<'a>) -> Result<(), WireError> {
    match number {
        4 => p.count = value.fixed64(4)?,
        5 => p.sum = Some(double(value, 5)?),
        6 => value.fixed64s(6, &mut p.counts, ctx.limits.buckets)?,
        7 => {
            let mut bits = Vec::new();
            value.fixed64s(7, &mut bits, ctx.limits.buckets - p.bounds.len())?;
            p.bounds.extend(bits.into_iter().map(f64::from_bits));
        }
        9 => attribute(ctx, value.bytes(9)?, &mut p.attributes, &mut 0)?,
        10 => p.flags = value.varint(10)? as u32,
        11 => p.min = Some(double(value, 11)?),
        12 => p.max = Some(double(value, 12)?),
        _ => {}
    }
    Ok(())
}

/// `ExponentialHistogramDataPoint`.
fn exponential_point<'a>(ctx: &Context<'_>, number: u32, value: Field<'a>, p: &mut Point<'a>) -> Result<(), WireError> {
    match number {
        1 => attribute(ctx, value.bytes(1)?, &mut p.attributes, &mut 0)?,
        4 => p.count = value.fixed64(4)?,
        5 => p.sum = Some(double(value, 5)?),
        6 => p.scale = value.sint32(6)?,
        7 => p.zero_count = value.fixed64(7)?,
        8 => buckets(ctx, value.bytes(8)?, &mut p.positive)?,
        9 => buckets(ctx, value.bytes(9)?, &mut p.negative)?,
        10 => p.flags = value.varint(10)? as u32,
        12 => p.min = Some(double(value, 12)?),
        13 => p.max = Some(double(value, 13)?),
        14 => p.zero_threshold = double(value, 14)?,
        _ => {}
    }
    Ok(())
}

/// `ExponentialHistogramDataPoint.Buckets`.
fn buckets(ctx: &Context<'_>, bytes: &[u8], into: &mut Buckets) -> Result<(), WireError> {
    for field in Fields(bytes) {
        let (number, value) = field?;
        match number {
            1 => into.offset = value.sint32(1)?,
            2 => value.varints(2, &mut into.counts, ctx.limits.buckets)?,
            _ => {}
        }
    }
    Ok(())
}

/// `SummaryDataPoint`.
fn summary_point<'a>(ctx: &Context<'_>, number: u32, value: Field<'a>, p: &mut Point<'a>) -> Result<(), WireError> {
    match number {
        4 => p.count = value.fixed64(4)?,
        5 => p.sum = Some(double(value, 5)?),
        6 => {
            if p.quantiles.len() >= ctx.limits.buckets {
                return Err(WireError::Buckets(ctx.limits.buckets));
            }
            let mut pair = (0.0, 0.0);
            for field in Fields(value.bytes(6)?) {
                match field? {
                    (1, quantile) => pair.0 = double(quantile, 1)?,
                    (2, value) => pair.1 = double(value, 2)?,
                    _ => {}
                }
            }
            p.quantiles.push(pair);
        }
        7 => attribute(ctx, value.bytes(7)?, &mut p.attributes, &mut 0)?,
        8 => p.flags = value.varint(8)? as u32,
        _ => {}
    }
    Ok(())
}

fn double(value: Field<'_>, number: u32) -> Result<f64, WireError> {
    value.fixed64(number).map(f64::from_bits)
}
