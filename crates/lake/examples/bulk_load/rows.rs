//! Made-up interactions and their outcomes.

use arrow::array::RecordBatch;
use chrono::{DateTime, Utc};
use flywheel_telemetry::column::{Attrs, Day, Micros};
use flywheel_telemetry::rows::{InteractionRow, OutcomeRow};
use std::borrow::Cow;

/// Apps and their share of the rows, per mille.
const APPS: [(&str, u64); 4] = [("shop", 970), ("news", 15), ("bank", 10), ("maps", 5)];
/// Device class, model, SoC, RAM in GiB, operating system.
const DEVICES: [(&str, &str, &str, i64, &str); 8] = [
    ("high-12gb", "Pixel 9 Pro", "tensor-g4", 16, "android 16"),
    ("high-8gb", "iPhone16,1", "a17-pro", 8, "ios 18.4"),
    ("high-8gb-npu", "SM-S921B", "exynos-2400", 8, "android 15"),
    ("mid-8gb", "Pixel 8", "tensor-g3", 8, "android 15"),
    ("mid-6gb", "iPhone15,4", "a16", 6, "ios 18.3"),
    ("mid-6gb-gpu", "23117RA68G", "dimensity-7200", 6, "android 14"),
    ("low-4gb", "SM-A155F", "helio-g99", 4, "android 14"),
    ("low-3gb", "moto g24", "helio-g85", 4, "android 13"),
];
const TEMPLATES: usize = 200;
const BUNDLES: usize = 6;
const INSTALLS: u64 = 400_000;
/// Rows of one request, which have one receipt.
const REQUEST: u64 = 200;
/// Interactions made at once.
const PIECE: u64 = 16_384;
/// Labels and their share of the outcomes, per cent.
const LABELS: [(&str, u64); 5] = [("accepted", 52), ("rejected", 34), ("edited", 8), ("corrected", 4), ("reported", 2)];

/// Rows that were made.
pub struct Made {
    /// One batch per app.
    pub interactions: Vec<RecordBatch>,
    pub outcomes: Vec<RecordBatch>,
    pub rows: u64,
}

/// Makes rows, one after the other in time.
pub struct Maker {
    state: u64,
    /// Receipt of the first row, and the time that all rows take, microseconds.
    begin: i64,
    span: i64,
    total: u64,
    made: u64,
    templates: Vec<String>,
    /// Upper ends of the templates' shares, out of 2^32: the nth is used in proportion to 1/n.
    shares: Vec<u64>,
    bundles: Vec<String>,
    hashes: Vec<String>,
}

impl Maker {
    pub fn new(until: DateTime<Utc>, total: u64, days: u32) -> Self {
        let mut out = Self {
            state: 0x9e37_79b9_7f4a_7c15,
            begin: 0,
            // a little less, so that the first rows are within the last `days` days when they are asked for
            span: i64::from(days) * 86_400_000_000 - 1_800_000_000,
            total,
            made: 0,
            templates: (0..TEMPLATES).map(|n| format!("template-{n:03}@{}", 1 + n % 7)).collect(),
            shares: Vec::new(),
            bundles: Vec::new(),
            hashes: Vec::new(),
        };
        out.begin = until.timestamp_micros() - out.span;
        let weight = |n: usize| 1.0 / (n + 1) as f64;
        let all: f64 = (0..TEMPLATES).map(weight).sum();
        let mut sum = 0.0;
        for n in 0..TEMPLATES {
            sum += weight(n) / all;
            out.shares.push((sum * f64::from(u32::MAX)) as u64);
            let hash = out.hex(64);
            out.hashes.push(hash);
        }
        for _ in 0..BUNDLES {
            let digest = out.hex(64);
            out.bundles.push(digest);
        }
        out
    }

    /// The next piece, no more than `most` interactions.
    pub fn next(&mut self, most: u64) -> Result<Made, String> {
        let rows = PIECE.min(most);
        let mut per_app: Vec<(Vec<InteractionRow<'static>>, Vec<OutcomeRow>)> = APPS.map(|_| Default::default()).into();
        for _ in 0..rows {
            let app = pick(&APPS, self.below(1000));
            let row = self.interaction(APPS[app].0);
            if self.below(100) < 8 {
                let outcome = self.outcome(&row);
                per_app[app].1.push(outcome);
            }
            per_app[app].0.push(row);
            self.made += 1;
        }
        let mut made = Made { interactions: Vec::new(), outcomes: Vec::new(), rows };
        for (interactions, mut outcomes) in per_app {
            outcomes.sort_by_key(|o| o.received_date.0);
            made.interactions.push(InteractionRow::encode(&interactions).map_err(|e| e.to_string())?);
            made.outcomes.push(OutcomeRow::encode(&outcomes).map_err(|e| e.to_string())?);
        }
        Ok(made)
    }

    fn interaction(&mut self, app: &'static str) -> InteractionRow<'static> {
        let request = self.made / REQUEST;
        let received = self.begin
            + (request as i128 * i128::from(self.span) * i128::from(REQUEST) / i128::from(self.total.max(1))) as i64;
        let received = received.min(self.begin + self.span);
        let lag = if self.below(10) == 0 { self.below(86_400_000_000) } else { self.below(30_000_000) } as i64;
        let install = self.below(INSTALLS);
        let (class, model, soc, gib, os) = DEVICES[skewed(mixed(install), DEVICES.len())];
        let n = self.below(1 << 32);
        let template = self.shares.partition_point(|s| *s < n).min(TEMPLATES - 1);
        let bundle = skewed(self.random(), BUNDLES);
        let chunks = 3;
        let text = |s: &'static str| Some(Cow::Borrowed(s));
        InteractionRow {
            app: app.into(),
            received_date: Micros(received).day(),
            received_at: Micros(received),
            event_at: Some(Micros(received - lag)),
            occurred_at: Micros(received - lag),
            source: "otlp_logs".into(),
            trust: "anonymous".into(),
            install_id: Some(install_id(install).into()),
            interaction_id: self.uuid().into(),
            template_id: Some(self.templates[template].clone().into()),
            template_hash: Some(self.hashes[template].clone().into()),
            bundle: Some(self.bundles[bundle].clone().into()),
            rollout_id: text("rollout-17"),
            phase: Some(1 + self.below(3) as i32),
            arm: text(if mixed(install ^ 77).is_multiple_of(2) { "control" } else { "treatment" }),
            chunk_ids: (0..chunks).map(|_| format!("kb-{}", 1 + self.below(5000)).into()).collect(),
            chunk_versions: (0..chunks).map(|_| 1 + self.below(4) as i32).collect(),
            chunk_scores: (0..chunks).map(|_| self.below(10_000) as f32 / 10_000.0).collect(),
            chunk_hidden: vec![false; chunks],
            index_version: Some(41),
            ttft_ms: Some(300.0 + self.below(2700) as f64),
            ttfv_ms: Some(350.0 + self.below(2900) as f64),
            decode_tokens_per_s: Some(5.0 + self.below(3500) as f64 / 100.0),
            prefill_tokens_per_s: Some(50.0 + self.below(9000) as f64 / 10.0),
            input_tokens: Some(40 + self.below(860) as i64),
            output_tokens: Some(5 + self.below(215) as i64),
            peak_memory_bytes: Some((300 + self.below(600) as i64) << 20),
            memory_metric: text("rss"),
            energy_mj: Some(500.0 + self.below(89_500) as f64),
            load_ms: Some(700.0 + self.below(12_300) as f64),
            cold_start: Some(self.below(10) == 0),
            operation: text("chat"),
            provider: text("on_device"),
            request_model: text("deepseek-r1-distill-qwen-1.5b"),
            response_model: text("deepseek-r1-distill-qwen-1.5b"),
            quantization: text(if self.below(3) == 0 { "q8_0" } else { "q4_k_m" }),
            finish_reason: text(if self.below(20) == 0 { "length" } else { "stop" }),
            session_id: Some(self.uuid().into()),
            conversation_id: Some(self.uuid().into()),
            device_class: text(class),
            device_model: text(model),
            soc: text(soc),
            ram_bytes: Some(gib << 30),
            os: text(os),
            locale: text(["en-GB", "de-DE", "fr-FR", "pt-BR", "hi-IN"][skewed(mixed(install ^ 5), 5)]),
            app_version: text(["5.2.0", "5.1.3", "5.1.2", "4.9.0"][skewed(mixed(install ^ 9), 4)]),
            runtime: text("llama.cpp b6100"),
            sdk: text("opentelemetry 1.45.0"),
            detected: if self.below(50) == 0 { text("refused") } else { None },
            adapter: text("support-lora-3"),
            battery_start: Some(self.below(100) as f64 / 100.0),
            battery_end: Some(self.below(100) as f64 / 100.0),
            charging: Some(self.below(10) < 3),
            thermal_start: Some(self.below(4) as i32),
            thermal_end: Some(self.below(4) as i32),
            attrs: Attrs(vec![("gen_ai.request.temperature".into(), "0.7".into())]),
            ..InteractionRow::default()
        }
    }

    /// Labels come within ten minutes.
    fn outcome(&mut self, row: &InteractionRow<'_>) -> OutcomeRow {
        let last = self.begin + self.span;
        let at = (row.received_at.0 + self.below(600_000_000) as i64).min(last);
        let own = |t: &Option<Cow<'_, str>>| t.as_deref().map(str::to_owned);
        OutcomeRow {
            user_key: None,
            app: row.app.to_string(),
            received_date: Micros(at).day(),
            received_at: Micros(at),
            interaction_date: Day(row.received_date.0),
            interaction_at: row.received_at,
            interaction_id: row.interaction_id.to_string(),
            install_id: own(&row.install_id),
            trust: row.trust.to_string(),
            template_id: own(&row.template_id),
            bundle: own(&row.bundle),
            device_class: own(&row.device_class),
            locale: own(&row.locale),
            rollout_id: own(&row.rollout_id),
            phase: row.phase,
            arm: own(&row.arm),
            label: LABELS[pick(&LABELS, self.below(100))].0.to_owned(),
            detected: own(&row.detected),
        }
    }

    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.state)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.random() % n
    }
    fn hex(&mut self, digits: usize) -> String {
        let mut out = String::new();
        while out.len() < digits {
            out += &format!("{:016x}", self.random());
        }
        out.truncate(digits);
        out
    }
    fn uuid(&mut self) -> String {
        let (a, b) = (self.random(), self.random());
        format!(
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
            a >> 32,
            (a >> 16) & 0xffff,
            a & 0xfff,
            0x8000 | (b >> 50),
            b & 0xffff_ffff_ffff
        )
    }
}

/// Digest of a public key that nobody has.
fn install_id(n: u64) -> String {
    (1..5).map(|part| format!("{:016x}", mixed(n << 3 | part))).collect()
}

/// SplitMix64's finaliser.
fn mixed(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// One of `n`, the later ones more rarely.
fn skewed(random: u64, n: usize) -> usize {
    let (a, b) = ((random >> 32) as usize % n, (random & 0xffff_ffff) as usize % n);
    a.min(b)
}

/// The place whose share `at` falls into.
fn pick(shares: &[(&str, u64)], mut at: u64) -> usize {
    for (i, (_, share)) in shares.iter().enumerate() {
        if at < *share {
            return i;
        }
        at -= share;
    }
    0
}
