//! From data points to rows of `metrics`.

use super::{Form, Metric, Number, Point, Sink};
use crate::decode::{Context, Decoded, bounded, short};
use crate::disposition::Kind;
use crate::otlp::draft::{Draft, micros, word};
use crate::otlp::names::Names;
use crate::otlp::value::Attribute;
use crate::rows::{InteractionRow, MetricRow};
use std::borrow::Cow;

/// Bytes of a metric's name, as OpenTelemetry bounds it.
const NAME: usize = 255;
/// Bytes of a description.
const DESCRIPTION: usize = 512;

/// Attributes that fill a column here. Any other one stays in `attrs`, also where `interactions` have a column for it.
const COLUMNS: &[&str] = &[
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.system",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.prompt.name",
    "gen_ai.prompt.version",
    "fleet.bundle.digest",
    "fleet.bundle.id",
    "fleet.template.id",
    "fleet.adapter.id",
    "fleet.model.quantization",
    "fleet.rollout.id",
    "fleet.rollout.phase",
    "fleet.rollout.arm",
    "feature_flag.result.variant",
    "fleet.device.class",
    "fleet.device.soc",
    "fleet.device.ram_bytes",
    "fleet.locale",
    "fleet.runtime.name",
    "fleet.batch.id",
    "app.installation.id",
    "session.id",
    "service.name",
    "service.version",
    "device.model.identifier",
    "device.model.name",
    "os.name",
    "os.version",
    "telemetry.sdk.name",
    "telemetry.sdk.version",
];

/// Turns data points into rows.
pub(super) struct Mapper<'c, 'a> {
    ctx: &'c Context<'a>,
    out: Decoded<'a>,
    seen: usize,
    names: Names,
    /// Rows and points before the metric at hand.
    begin: (usize, usize),
}

impl<'c, 'a> Mapper<'c, 'a> {
    pub fn new(ctx: &'c Context<'a>) -> Self {
        Self { ctx, out: Decoded::default(), seen: 0, names: Names::default(), begin: (0, 0) }
    }

    pub fn finish(self) -> Decoded<'a> {
        self.out
    }

    /// The row of a point, without what its metric says.
    fn row(&mut self, resource: &[Attribute<'a>], form: Form, point: Point<'a>) -> Result<MetricRow<'a>, String> {
        let mut d = Draft::default();
        let (mut token_type, mut error_type) = (None, None);
        for (place, (key, value)) in resource.iter().chain(&point.attributes).enumerate() {
            match self.names.find(place, key) {
                Some(field) if COLUMNS.contains(&&**key) => d.put(field, value),
                _ if key == "gen_ai.token.type" => token_type = word(value),
                _ if key == "error.type" => error_type = word(value),
                _ => d.extra(self.ctx, key, value),
            }
        }
        d.common(self.ctx, point.time_ns);
        if let Some(id) = d.batch_id.take() {
            self.out.batch_id = Some(id.into_owned());
        }
        let mut row = facts(d.row);
        (row.token_type, row.error_type) = (token_type, error_type);
        row.start_at = micros(point.start_ns);
        row.flags = i64::from(point.flags);
        row.kind = form.as_str().into();
        values(&mut row, form, point)?;
        Ok(row)
    }

    /// Gives the points of the metric at hand up.
    fn refuse(&mut self, reason: &'static str, detail: &str) {
        let (rows, seen) = self.begin;
        let points = self.out.metrics.len() - rows;
        self.out.metrics.truncate(rows);
        // a metric without any point is an item of its own
        let alone = self.seen == seen;
        self.seen += usize::from(alone);
        for _ in 0..points + usize::from(alone) {
            self.out.quarantine(Kind::Metric, reason, detail);
        }
    }
}

impl<'a> Sink<'a> for Mapper<'_, 'a> {
    fn point(&mut self, resource: &[Attribute<'a>], form: Form, point: Point<'a>) {
        self.seen += 1;
        match self.row(resource, form, point) {
            Ok(row) => self.out.metrics.push(row),
            Err(detail) => self.out.quarantine(Kind::Metric, "bad_value", detail),
        }
    }

    fn broken(&mut self, reason: &'static str, detail: String) {
        self.seen += 1;
        self.out.quarantine(Kind::Metric, reason, detail);
    }

    fn end(&mut self, metric: Metric<'a>, broken: Option<(&'static str, String)>) {
        let bytes = metric.name.len();
        let name = bounded(metric.name, NAME).filter(|_| bytes <= NAME);
        match (broken, name, metric.form) {
            (Some((reason, detail)), ..) => self.refuse(reason, &detail),
            (None, None, _) => {
                self.refuse("bad_metric_name", &format!("a name of {bytes} bytes; 1 to {NAME} are allowed"));
            }
            (None, Some(name), None) => {
                self.refuse("unsupported_record", &format!("metric `{name}` has none of the five kinds of data"));
            }
            (None, Some(name), Some(form)) => {
                let (unit, description) = (short(metric.unit), bounded(metric.description, DESCRIPTION));
                let has_temporality = !matches!(form, Form::Gauge | Form::Summary);
                let temporality = match metric.temporality {
                    1 if has_temporality => Some("delta"),
                    2 if has_temporality => Some("cumulative"),
                    _ => None,
                };
                for row in self.out.metrics.iter_mut().skip(self.begin.0) {
                    row.name.clone_from(&name);
                    row.unit.clone_from(&unit);
                    row.description.clone_from(&description);
                    row.temporality = temporality.map(Cow::Borrowed);
                    row.is_monotonic = (form == Form::Sum).then_some(metric.is_monotonic);
                }
            }
        }
        self.begin = (self.out.metrics.len(), self.seen);
    }

    fn seen(&self) -> usize {
        self.seen
    }
}

/// What point and resource say about phone, model and release.
fn facts(row: InteractionRow<'_>) -> MetricRow<'_> {
    MetricRow {
        app: row.app,
        received_date: row.received_date,
        received_at: row.received_at,
        event_at: row.event_at,
        occurred_at: row.occurred_at,
        source: row.source,
        trust: row.trust,
        install_id: row.install_id,
        user_key: row.user_key,
        operation: row.operation,
        provider: row.provider,
        request_model: row.request_model,
        response_model: row.response_model,
        template_id: row.template_id,
        bundle: row.bundle,
        rollout_id: row.rollout_id,
        phase: row.phase,
        arm: row.arm,
        adapter: row.adapter,
        quantization: row.quantization,
        session_id: row.session_id,
        device_class: row.device_class,
        device_model: row.device_model,
        soc: row.soc,
        ram_bytes: row.ram_bytes,
        os: row.os,
        locale: row.locale,
        app_version: row.app_version,
        runtime: row.runtime,
        sdk: row.sdk,
        nonfinite_fields: row.nonfinite_fields,
        dropped_attrs: row.dropped_attrs,
        attrs: row.attrs,
        ..MetricRow::default()
    }
}

/// The numbers of a point. An error says which of them cannot be stored.
fn values(row: &mut MetricRow<'_>, form: Form, point: Point<'_>) -> Result<(), String> {
    let mut nonfinite = 0;
    let mut finite = |n: Option<f64>| {
        let kept = n.filter(|n| n.is_finite());
        nonfinite += i32::from(n.is_some() && kept.is_none());
        kept
    };
    match form {
        Form::Gauge | Form::Sum => match point.value {
            Some(Number::Int(n)) => row.value_int = Some(n),
            Some(Number::Double(n)) => row.value_double = finite(Some(n)),
            // a point may say with its flags that there is none
            None => {}
        },
        Form::Histogram | Form::Exponential | Form::Summary => {
            row.count = Some(whole("count", point.count)?);
            row.sum = finite(point.sum);
            (row.min, row.max) = (finite(point.min), finite(point.max));
        }
    }
    match form {
        Form::Gauge | Form::Sum => {}
        Form::Histogram => {
            if point.bounds.iter().any(|b| !b.is_finite()) {
                return Err("a bound is not finite".to_owned());
            }
            let (bounds, counts) = (point.bounds.len(), point.counts.len());
            if counts != bounds + 1 && (counts, bounds) != (0, 0) {
                return Err(format!("{counts} buckets do not fit {bounds} bounds"));
            }
            row.explicit_bounds = point.bounds;
            row.bucket_counts = wholes("a bucket count", point.counts)?;
        }
        Form::Exponential => {
            row.scale = Some(point.scale);
            row.zero_count = Some(whole("zeroCount", point.zero_count)?);
            row.zero_threshold = finite(Some(point.zero_threshold));
            row.positive_offset = Some(point.positive.offset);
            row.positive_counts = wholes("a bucket count", point.positive.counts)?;
            row.negative_offset = Some(point.negative.offset);
            row.negative_counts = wholes("a bucket count", point.negative.counts)?;
        }
        Form::Summary => {
            if point.quantiles.iter().any(|(q, _)| !(0.0..=1.0).contains(q)) {
                return Err("a quantile is not from 0 to 1".to_owned());
            }
            let pairs = point.quantiles.into_iter().map(|(q, v)| (q, finite(Some(v))));
            (row.quantiles, row.quantile_values) = pairs.unzip();
        }
    }
    row.nonfinite_fields += nonfinite;
    Ok(())
}

fn whole(what: &str, n: u64) -> Result<i64, String> {
    i64::try_from(n).map_err(|_| format!("{what} {n} is larger than {}", i64::MAX))
}

fn wholes(what: &str, of: Vec<u64>) -> Result<Vec<i64>, String> {
    of.into_iter().map(|n| whole(what, n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_has_a_name_that_is_read() {
        let mut names = Names::default();
        for (i, name) in COLUMNS.iter().enumerate() {
            assert!(names.find(i, name).is_some(), "{name}");
            assert!(!COLUMNS[..i].contains(name), "{name} twice");
        }
    }
}
