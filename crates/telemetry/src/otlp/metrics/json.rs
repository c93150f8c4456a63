//! Walker over OTLP/JSON metrics. Exemplars are skipped.

use super::{Buckets, Form, Metric, Number, Point, Sink};
use crate::decode::{Context, too_many};
use crate::otlp::json::walker::{self, Items, Stop, Walked, Walker};
use crate::otlp::scan::{Kind, Scanner};
use crate::otlp::value::Attribute;
use flywheel_types::Error;

/// Visits every data point of an export request.
pub(super) fn walk<'a>(ctx: &Context<'_>, body: &'a [u8], sink: &mut dyn Sink<'a>) -> Result<(), Error> {
    walker::walk(ctx, Metrics { sink }, body)
}

/// Data points on their way to the mapper.
struct Metrics<'c, 'a> {
    sink: &'c mut dyn Sink<'a>,
}

impl<'a> Items<'a> for Metrics<'_, 'a> {
    fn names(&self) -> [&'static str; 3] {
        ["resourceMetrics", "scopeMetrics", "metrics"]
    }

    fn item(w: &mut Walker<'_, Self>, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()> {
        w.room()?;
        let mut metric = Metric::default();
        let broken = w.watched(|w| w.metric(s, resource, &mut metric))?;
        w.to.sink.end(metric, broken);
        Ok(())
    }
}

impl<'a> Walker<'_, Metrics<'_, 'a>> {
    fn room(&self) -> Walked<()> {
        let (seen, limit) = (self.to.sink.seen(), self.ctx.limits.records);
        if seen < limit { Ok(()) } else { Err(Stop::Refused(too_many(seen + 1, limit))) }
    }

    /// `Metric`.
    fn metric(&mut self, s: &mut Scanner<'a>, resource: &[Attribute<'a>], metric: &mut Metric<'a>) -> Walked<()> {
        self.fields(s, |w, s, key| {
            match key {
                "name" => metric.name = w.text(s)?.unwrap_or_default(),
                "description" => metric.description = w.text(s)?.unwrap_or_default(),
                "unit" => metric.unit = w.text(s)?.unwrap_or_default(),
                _ => match Form::FIELDS.iter().find(|(_, name, _)| *name == key) {
                    Some((_, _, form)) => w.data(s, *form, resource, metric)?,
                    None => s.skip()?,
                },
            }
            Ok(())
        })
    }

    /// `Gauge`, `Sum`, `Histogram`, `ExponentialHistogram` or `Summary`. Null is an absent one.
    fn data(
        &mut self,
        s: &mut Scanner<'a>,
        form: Form,
        resource: &[Attribute<'a>],
        metric: &mut Metric<'a>,
    ) -> Walked<()> {
        if s.kind()? == Kind::Null {
            return Ok(s.skip()?);
        }
        if let Err(detail) = metric.set_form(form) {
            self.note("bad_record", || detail);
        }
        self.fields(s, |w, s, key| {
            match key {
                "dataPoints" => w.each(s, |w, s| w.point(s, form, resource))?,
                "aggregationTemporality" => {
                    metric.temporality = w.parsed(s, key, "the number of an enum")?.unwrap_or(0);
                }
                "isMonotonic" => metric.is_monotonic = w.boolean(s)?.unwrap_or(false),
                _ => s.skip()?,
            }
            Ok(())
        })
    }

    fn point(&mut self, s: &mut Scanner<'a>, form: Form, resource: &[Attribute<'a>]) -> Walked<()> {
        self.room()?;
        let mut point = Point::new(form);
        let broken = self.watched(|w| {
            w.fields(s, |w, s, key| match w.common(s, key, &mut point)? {
                true => Ok(()),
                false => w.own(s, form, key, &mut point),
            })
        })?;
        match broken {
            None => self.to.sink.point(resource, form, point),
            Some((reason, detail)) => self.to.sink.broken(reason, detail),
        }
        Ok(())
    }

    /// A field that the points of every form have.
    fn common(&mut self, s: &mut Scanner<'a>, key: &str, p: &mut Point<'a>) -> Walked<bool> {
        match key {
            "attributes" => self.attributes(s, &mut p.attributes)?,
            "startTimeUnixNano" => p.start_ns = self.nanos(s)?,
            "timeUnixNano" => p.time_ns = self.nanos(s)?,
            "flags" => p.flags = self.parsed(s, key, "a 32-bit number")?.unwrap_or(0),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A field of one form. `f64` parsing knows NaN, Infinity and turns 1e999 into infinity: all become NULL in the mapper.
    fn own(&mut self, s: &mut Scanner<'a>, form: Form, key: &str, p: &mut Point<'a>) -> Walked<()> {
        let (whole, number) = ("a 64-bit number from 0", "a number");
        match (form, key) {
            (Form::Gauge | Form::Sum, "asDouble") => {
                p.value = self.parsed(s, key, number)?.map(Number::Double).or(p.value);
            }
            (Form::Gauge | Form::Sum, "asInt") => {
                p.value = self.parsed(s, key, "a 64-bit integer")?.map(Number::Int).or(p.value);
            }
            (Form::Gauge | Form::Sum, _) => s.skip()?,
            (_, "count") => p.count = self.parsed(s, key, whole)?.unwrap_or(0),
            (_, "sum") => p.sum = self.parsed(s, key, number)?,
            (Form::Summary, "quantileValues") => self.quantiles(s, p)?,
            (Form::Summary, _) => s.skip()?,
            (_, "min") => p.min = self.parsed(s, key, number)?,
            (_, "max") => p.max = self.parsed(s, key, number)?,
            (Form::Histogram, "explicitBounds") => self.numbers(s, key, number, &mut p.bounds)?,
            (Form::Histogram, "bucketCounts") => self.numbers(s, key, whole, &mut p.counts)?,
            (Form::Exponential, "scale") => p.scale = self.parsed(s, key, "a 32-bit integer")?.unwrap_or(0),
            (Form::Exponential, "zeroCount") => p.zero_count = self.parsed(s, key, whole)?.unwrap_or(0),
            (Form::Exponential, "zeroThreshold") => p.zero_threshold = self.parsed(s, key, number)?.unwrap_or(0.0),
            (Form::Exponential, "positive") => self.buckets(s, &mut p.positive)?,
            (Form::Exponential, "negative") => self.buckets(s, &mut p.negative)?,
            (Form::Histogram | Form::Exponential, _) => s.skip()?,
        }
        Ok(())
    }

    /// `ExponentialHistogramDataPoint.Buckets`.
    fn buckets(&mut self, s: &mut Scanner<'a>, into: &mut Buckets) -> Walked<()> {
        self.fields(s, |w, s, key| match key {
            "offset" => {
                into.offset = w.parsed(s, key, "a 32-bit integer")?.unwrap_or(0);
                Ok(())
            }
            "bucketCounts" => w.numbers(s, key, "a 64-bit number from 0", &mut into.counts),
            _ => Ok(s.skip()?),
        })
    }

    /// `ValueAtQuantile` list.
    fn quantiles(&mut self, s: &mut Scanner<'a>, p: &mut Point<'a>) -> Walked<()> {
        self.each(s, |w, s| {
            let mut pair = (0.0, 0.0);
            w.fields(s, |w, s, key| {
                match key {
                    "quantile" => pair.0 = w.parsed(s, key, "a number")?.unwrap_or(0.0),
                    // what has no number is NaN to many writers of JSON, and null
                    "value" => pair.1 = w.parsed(s, key, "a number")?.unwrap_or(f64::NAN),
                    _ => s.skip()?,
                }
                Ok(())
            })?;
            w.add(pair, &mut p.quantiles);
            Ok(())
        })
    }

    /// A list of numbers, none of which may be missing.
    fn numbers<N: std::str::FromStr>(
        &mut self,
        s: &mut Scanner<'a>,
        name: &str,
        what: &str,
        into: &mut Vec<N>,
    ) -> Walked<()> {
        self.each(s, |w, s| {
            match w.parsed(s, name, what)? {
                Some(n) => w.add(n, into),
                None => w.note("bad_value", || format!("{name} holds null")),
            }
            Ok(())
        })
    }

    fn add<N>(&mut self, item: N, into: &mut Vec<N>) {
        let limit = self.ctx.limits.buckets;
        if into.len() < limit {
            into.push(item);
        } else {
            self.note("too_many_buckets", || format!("more than {limit} buckets or quantiles"));
        }
    }
}
