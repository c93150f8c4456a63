//! OTLP metrics. The two walkers give data points to the mapper as they meet them and name the metric when it ends, because
//! name, unit and temporality may come after the points. What is wrong inside one point costs that point; what is wrong with
//! a metric costs its points.

mod json;
mod map;
mod proto;

use super::Encoding;
use super::value::Attribute;
use crate::column::Text;
use crate::decode::{Context, Decoded};
use flywheel_types::Error;

/// Decodes an `ExportMetricsServiceRequest`.
///
/// # Errors
/// `undecodable_body` for a broken envelope, `too_many_records` past the limit.
pub fn decode<'a>(ctx: &Context<'a>, encoding: Encoding, body: &'a [u8]) -> Result<Decoded<'a>, Error> {
    let mut mapper = map::Mapper::new(ctx);
    match encoding {
        Encoding::Protobuf => proto::walk(ctx, body, &mut mapper)?,
        Encoding::Json => json::walk(ctx, body, &mut mapper)?,
    }
    Ok(mapper.finish())
}

/// Which of the five forms a metric has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Gauge,
    Sum,
    Histogram,
    Exponential,
    Summary,
}

impl Form {
    /// Field of `Metric` in protobuf and in JSON.
    const FIELDS: [(u32, &'static str, Self); 5] = [
        (5, "gauge", Self::Gauge),
        (7, "sum", Self::Sum),
        (9, "histogram", Self::Histogram),
        (10, "exponentialHistogram", Self::Exponential),
        (11, "summary", Self::Summary),
    ];

    /// The word in the column `kind`.
    fn as_str(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Sum => "sum",
            Self::Histogram => "histogram",
            Self::Exponential => "exponential_histogram",
            Self::Summary => "summary",
        }
    }
}

/// What all points of a metric share.
#[derive(Debug, Default)]
struct Metric<'a> {
    name: Text<'a>,
    unit: Text<'a>,
    description: Text<'a>,
    form: Option<Form>,
    /// 1 delta, 2 cumulative.
    temporality: i64,
    is_monotonic: bool,
}

impl Metric<'_> {
    /// Notes the form; a second, different one is refused.
    fn set_form(&mut self, form: Form) -> Result<(), String> {
        match self.form.replace(form) {
            Some(other) if other != form => Err(format!("a metric is {} and {}", other.as_str(), form.as_str())),
            _ => Ok(()),
        }
    }
}

/// Value of a gauge or a sum.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Number {
    Int(i64),
    Double(f64),
}

/// One data point of any form; what the form does not have stays empty.
#[derive(Debug, Default)]
struct Point<'a> {
    attributes: Vec<Attribute<'a>>,
    start_ns: u64,
    time_ns: u64,
    flags: u32,
    value: Option<Number>,
    count: u64,
    sum: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    bounds: Vec<f64>,
    counts: Vec<u64>,
    scale: i32,
    zero_count: u64,
    zero_threshold: f64,
    positive: Buckets,
    negative: Buckets,
    /// Quantile and value.
    quantiles: Vec<(f64, f64)>,
}

impl Point<'_> {
    /// Nothing read yet. The sum of a summary is 0 where it is not written, that of a histogram is not there.
    fn new(form: Form) -> Self {
        Self { sum: (form == Form::Summary).then_some(0.0), ..Self::default() }
    }
}

/// One side of an exponential histogram.
#[derive(Debug, Default)]
struct Buckets {
    offset: i32,
    counts: Vec<u64>,
}

/// Receives what a walker finds.
trait Sink<'a> {
    /// A data point of the metric at hand, with the attributes of its resource.
    fn point(&mut self, resource: &[Attribute<'a>], form: Form, point: Point<'a>);
    /// A data point that could not be read.
    fn broken(&mut self, reason: &'static str, detail: String);
    /// The metric at hand is over; `broken` says what is wrong with it.
    fn end(&mut self, metric: Metric<'a>, broken: Option<(&'static str, String)>);
    /// Data points seen so far, kept or not.
    fn seen(&self) -> usize;
}

#[cfg(test)]
mod tests;
