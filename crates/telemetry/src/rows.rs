//! The tables of the lake, version 1: one Rust struct per table, from which the Arrow schema and the encoder are
//! made. The rows that decoders make borrow their texts from the body of the request. Columns are only ever added, at the end; a renamed or removed column needs a new table.
//!
//! Every table is partitioned by `app`, then `received_date` (the day of receipt, so that late phones never reopen
//! an old partition). Times are UTC microseconds. Numbers that were NaN or infinite on the wire are NULL and counted
//! in `nonfinite_fields`.

use crate::column::{Attrs, Column, Day, Micros, Readable, Text};
use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use std::sync::{Arc, OnceLock};

/// Version of the table schemas below; stored in their Arrow metadata.
pub const SCHEMA_VERSION: &str = "1";

/// The tables. `Outcomes` is derived by a pipeline step; the others are filled by ingest. A new one goes to the end: the log
/// tells them apart by their place here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    Interactions,
    Feedback,
    DeviceEvents,
    Dispositions,
    Outcomes,
    Rejects,
    Metrics,
}

impl Table {
    /// Every table.
    pub const ALL: [Self; 7] = [
        Self::Interactions,
        Self::Feedback,
        Self::DeviceEvents,
        Self::Dispositions,
        Self::Outcomes,
        Self::Rejects,
        Self::Metrics,
    ];
    /// Tables whose rows come through the write-ahead log.
    pub const INGESTED: [Self; 6] =
        [Self::Interactions, Self::Feedback, Self::DeviceEvents, Self::Dispositions, Self::Rejects, Self::Metrics];

    /// Name in SQL, and of the folder.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactions => "interactions",
            Self::Feedback => "feedback",
            Self::DeviceEvents => "device_events",
            Self::Dispositions => "dispositions",
            Self::Outcomes => "outcomes",
            Self::Rejects => "rejects",
            Self::Metrics => "metrics",
        }
    }
    /// The table called `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }
    /// Arrow schema of the stored rows.
    #[must_use]
    pub fn schema(self) -> SchemaRef {
        match self {
            Self::Interactions => InteractionRow::schema(),
            Self::Feedback => FeedbackRow::schema(),
            Self::DeviceEvents => DeviceEventRow::schema(),
            Self::Dispositions => DispositionRow::schema(),
            Self::Outcomes => OutcomeRow::schema(),
            Self::Rejects => RejectRow::schema(),
            Self::Metrics => MetricRow::schema(),
        }
    }
}

macro_rules! table {
    ($(#[$doc:meta])* $name:ident $(<$lt:lifetime>)? { $($(#[$fdoc:meta])* $field:ident: $ty:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Default)]
        pub struct $name $(<$lt>)? { $($(#[$fdoc])* pub $field: $ty),+ }

        impl $(<$lt>)? $name $(<$lt>)? {
            /// Arrow schema of the stored rows.
            #[must_use]
            pub fn schema() -> SchemaRef {
                static SCHEMA: OnceLock<SchemaRef> = OnceLock::new();
                Arc::clone(SCHEMA.get_or_init(|| {
                    let fields = vec![$(
                        Field::new(stringify!($field), <$ty as Column>::data_type(), <$ty as Column>::NULLABLE)
                    ),+];
                    let version = [("flywheel.schema".to_owned(), SCHEMA_VERSION.to_owned())];
                    Arc::new(Schema::new_with_metadata(fields, version.into()))
                }))
            }
            /// Encodes rows in the order of the schema.
            ///
            /// # Errors
            /// When Arrow refuses the columns, which would be a bug in this crate.
            pub fn encode(rows: &[Self]) -> Result<RecordBatch, ArrowError> {
                let columns: Vec<ArrayRef> = vec![$({
                    let mut b = <$ty as Column>::builder(rows.len());
                    for row in rows { Column::append(&row.$field, &mut b); }
                    Arc::new(b.finish()) as ArrayRef
                }),+];
                RecordBatch::try_new(Self::schema(), columns)
            }
            /// One row of a batch that has the columns of the schema in order; what is NULL and may not be is the default.
            #[must_use]
            pub fn read<'r>(rows: &'r RecordBatch, row: usize) -> Self
            where
                $($ty: Readable<'r>),+
            {
                let mut columns = rows.columns().iter();
                Self { $($field: columns.next().map(|c| <$ty as Readable<'r>>::read(c.as_ref(), row)).unwrap_or_default()),+ }
            }
        }
    };
}

table! {
    /// One answer of a model on a device.
    InteractionRow<'a> {
        app: Text<'a>,
        received_date: Day,
        /// Receipt, business clock.
        received_at: Micros,
        /// Device clock as sent.
        event_at: Option<Micros>,
        /// Best estimate of when it happened: `event_at`, moved by the drift seen in `sent_at` when that is large;
        /// the receipt when the device clock is absurd.
        occurred_at: Micros,
        sent_at: Option<Micros>,
        /// `events`, `feedback`, `otlp_traces`, `otlp_logs` or `import`.
        source: Text<'a>,
        /// Trust class word.
        trust: Text<'a>,
        /// Proven by the signature when `trust` is `keyed`, otherwise only claimed.
        install_id: Option<Text<'a>>,
        batch_seq: Option<i64>,
        interaction_id: Text<'a>,
        template_id: Option<Text<'a>>,
        /// Manifest digest, or the bundle name as an OTLP client gave it.
        bundle: Option<Text<'a>>,
        rollout_id: Option<Text<'a>>,
        phase: Option<i32>,
        /// `control` or `treatment`.
        arm: Option<Text<'a>>,
        /// Retrieved chunks in rank order; the four lists are parallel.
        chunk_ids: Vec<Text<'a>>,
        /// 0 = the client did not say.
        chunk_versions: Vec<i32>,
        chunk_scores: Vec<f32>,
        chunk_hidden: Vec<bool>,
        index_version: Option<i64>,
        ttft_ms: Option<f64>,
        ttfv_ms: Option<f64>,
        decode_tokens_per_s: Option<f64>,
        input_tokens: Option<i64>,
        output_tokens: Option<i64>,
        peak_memory_bytes: Option<i64>,
        memory_metric: Option<Text<'a>>,
        energy_mj: Option<f64>,
        load_ms: Option<f64>,
        cold_start: Option<bool>,
        operation: Option<Text<'a>>,
        provider: Option<Text<'a>>,
        request_model: Option<Text<'a>>,
        response_model: Option<Text<'a>>,
        quantization: Option<Text<'a>>,
        finish_reason: Option<Text<'a>>,
        session_id: Option<Text<'a>>,
        device_class: Option<Text<'a>>,
        device_model: Option<Text<'a>>,
        soc: Option<Text<'a>>,
        ram_bytes: Option<i64>,
        os: Option<Text<'a>>,
        locale: Option<Text<'a>>,
        app_version: Option<Text<'a>>,
        runtime: Option<Text<'a>>,
        sdk: Option<Text<'a>>,
        /// `refused` or `abstained` when a detector said so.
        detected: Option<Text<'a>>,
        /// Masked; only when the user agreed.
        question_text: Option<Text<'a>>,
        /// Masked; without a `<think>` span.
        answer_text: Option<Text<'a>>,
        nonfinite_fields: i32,
        /// Attributes that did not fit the limits.
        dropped_attrs: i32,
        attrs: Attrs<'a>,
        /// Hash of the template as the app computed it.
        template_hash: Option<Text<'a>>,
        /// LoRA adapter in use.
        adapter: Option<Text<'a>>,
        conversation_id: Option<Text<'a>>,
        prefill_tokens_per_s: Option<f64>,
        /// Charge before and after, 0 to 1.
        battery_start: Option<f64>,
        battery_end: Option<f64>,
        charging: Option<bool>,
        /// 0 nominal, 1 fair, 2 serious, 3 critical.
        thermal_start: Option<i32>,
        thermal_end: Option<i32>,
        /// Keyed digest of the app's user id (`UserKeys`).
        user_key: Option<Text<'a>>,
    }
}

table! {
    /// A person's judgement about one interaction.
    FeedbackRow<'a> {
        app: Text<'a>,
        received_date: Day,
        received_at: Micros,
        event_at: Option<Micros>,
        occurred_at: Micros,
        sent_at: Option<Micros>,
        source: Text<'a>,
        trust: Text<'a>,
        install_id: Option<Text<'a>>,
        batch_seq: Option<i64>,
        interaction_id: Text<'a>,
        /// Label word of `LabelKind`.
        label: Text<'a>,
        /// Masked.
        reason: Option<Text<'a>>,
        score: Option<f64>,
        nonfinite_fields: i32,
        user_key: Option<Text<'a>>,
    }
}

table! {
    /// What happened to a model on a device.
    DeviceEventRow<'a> {
        app: Text<'a>,
        received_date: Day,
        received_at: Micros,
        event_at: Option<Micros>,
        occurred_at: Micros,
        sent_at: Option<Micros>,
        source: Text<'a>,
        trust: Text<'a>,
        install_id: Option<Text<'a>>,
        batch_seq: Option<i64>,
        /// Word of `DeviceEventKind`.
        event: Text<'a>,
        bundle: Option<Text<'a>>,
        rollout_id: Option<Text<'a>>,
        phase: Option<i32>,
        arm: Option<Text<'a>>,
        load_ms: Option<f64>,
        reason: Option<Text<'a>>,
        device_class: Option<Text<'a>>,
        device_model: Option<Text<'a>>,
        soc: Option<Text<'a>>,
        ram_bytes: Option<i64>,
        os: Option<Text<'a>>,
        locale: Option<Text<'a>>,
        app_version: Option<Text<'a>>,
        runtime: Option<Text<'a>>,
        sdk: Option<Text<'a>>,
        nonfinite_fields: i32,
    }
}

table! {
    /// How many received items ended how; the sum over an app is everything that was received (invariant 1).
    DispositionRow {
        app: String,
        received_date: Day,
        received_at: Micros,
        source: String,
        /// `interaction`, `feedback`, `device`, `metric`, `unknown` or `request`.
        kind: String,
        trust: String,
        /// `stored`, `duplicate`, `quarantined` or `refused_intake`.
        disposition: String,
        reason: Option<String>,
        items: i64,
    }
}

table! {
    /// One labelled interaction, derived by a pipeline step; rebuildable from the other tables.
    OutcomeRow {
        app: String,
        /// Day of receipt of the label.
        received_date: Day,
        /// Receipt of the label, business clock.
        received_at: Micros,
        interaction_date: Day,
        interaction_at: Micros,
        interaction_id: String,
        install_id: Option<String>,
        trust: String,
        template_id: Option<String>,
        bundle: Option<String>,
        device_class: Option<String>,
        locale: Option<String>,
        rollout_id: Option<String>,
        phase: Option<i32>,
        arm: Option<String>,
        label: String,
        detected: Option<String>,
        user_key: Option<String>,
    }
}

table! {
    /// One record that was not stored, and why; at most 100 of a request. The record itself is not kept: nobody knows what it
    /// holds.
    RejectRow<'a> {
        app: Text<'a>,
        received_date: Day,
        received_at: Micros,
        source: Text<'a>,
        /// Kind of the record, as in `dispositions`.
        kind: Text<'a>,
        trust: Text<'a>,
        /// Proven by the signature.
        install_id: Option<Text<'a>>,
        /// Stable word.
        reason: Text<'a>,
        /// What was wrong and where; masked.
        detail: Text<'a>,
    }
}

table! {
    /// One data point of a metric, as OTLP tells it.
    MetricRow<'a> {
        app: Text<'a>,
        received_date: Day,
        /// Receipt, business clock.
        received_at: Micros,
        /// Device clock as sent.
        event_at: Option<Micros>,
        /// As in `interactions`.
        occurred_at: Micros,
        /// Device clock as sent: where a sum or histogram begins.
        start_at: Option<Micros>,
        /// `otlp_metrics`.
        source: Text<'a>,
        /// Trust class word.
        trust: Text<'a>,
        install_id: Option<Text<'a>>,
        name: Text<'a>,
        unit: Option<Text<'a>>,
        description: Option<Text<'a>>,
        /// `gauge`, `sum`, `histogram`, `exponential_histogram` or `summary`.
        kind: Text<'a>,
        /// Of sums.
        is_monotonic: Option<bool>,
        /// `delta` or `cumulative`; of sums and histograms.
        temporality: Option<Text<'a>>,
        /// Of gauges and sums: one of the two.
        value_double: Option<f64>,
        value_int: Option<i64>,
        /// Of histograms and summaries.
        count: Option<i64>,
        sum: Option<f64>,
        min: Option<f64>,
        max: Option<f64>,
        /// Histogram: upper bounds, and one count more than bounds.
        explicit_bounds: Vec<f64>,
        bucket_counts: Vec<i64>,
        /// Exponential histogram: bucket `i` of the positive counts holds values in
        /// `(base^(positive_offset + i), base^(positive_offset + i + 1)]`, base = 2^(2^-scale).
        scale: Option<i32>,
        zero_count: Option<i64>,
        zero_threshold: Option<f64>,
        positive_offset: Option<i32>,
        positive_counts: Vec<i64>,
        negative_offset: Option<i32>,
        negative_counts: Vec<i64>,
        /// Summary: parallel lists; a value that was no number is NULL.
        quantiles: Vec<f64>,
        quantile_values: Vec<Option<f64>>,
        /// Bit 0: the source recorded no value.
        flags: i64,
        operation: Option<Text<'a>>,
        provider: Option<Text<'a>>,
        request_model: Option<Text<'a>>,
        response_model: Option<Text<'a>>,
        /// `input` or `output`, of `gen_ai.client.token.usage`.
        token_type: Option<Text<'a>>,
        error_type: Option<Text<'a>>,
        template_id: Option<Text<'a>>,
        bundle: Option<Text<'a>>,
        rollout_id: Option<Text<'a>>,
        phase: Option<i32>,
        arm: Option<Text<'a>>,
        adapter: Option<Text<'a>>,
        quantization: Option<Text<'a>>,
        session_id: Option<Text<'a>>,
        device_class: Option<Text<'a>>,
        device_model: Option<Text<'a>>,
        soc: Option<Text<'a>>,
        ram_bytes: Option<i64>,
        os: Option<Text<'a>>,
        locale: Option<Text<'a>>,
        app_version: Option<Text<'a>>,
        runtime: Option<Text<'a>>,
        sdk: Option<Text<'a>>,
        nonfinite_fields: i32,
        dropped_attrs: i32,
        attrs: Attrs<'a>,
        user_key: Option<Text<'a>>,
    }
}

/// Rows of several tables that belong together: one request, or one record of the log.
#[derive(Debug, Clone, Default)]
pub struct TableRows {
    slots: [Option<RecordBatch>; Table::ALL.len()],
}

impl TableRows {
    /// Rows of `table`, if there are any.
    #[must_use]
    pub fn get(&self, table: Table) -> Option<&RecordBatch> {
        self.slots.get(table as usize).and_then(Option::as_ref)
    }
    /// Sets the rows of a table; empty batches are dropped.
    pub fn set(&mut self, table: Table, rows: RecordBatch) {
        if let Some(slot) = self.slots.get_mut(table as usize) {
            *slot = (rows.num_rows() > 0).then_some(rows);
        }
    }
    /// Memory held by the batches, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.slots.iter().flatten().map(RecordBatch::get_array_memory_size).sum()
    }
    /// Rows over all tables.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.slots.iter().flatten().map(RecordBatch::num_rows).sum()
    }
}
