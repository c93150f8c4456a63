//! One step: judge the new rows with the model of the past, add them to the sums, refit at period borders, report.

use super::canary::{Bets, Canary};
use super::community::row_community;
use super::decide;
use super::model::{FAMILIES, q_of, rank_weight, sigmoid};
use super::patterns::Cell;
use super::policy::{AttributionError, AttributionPolicyV1, FailureKind};
use super::refit::refit;
use super::report::{ChunkContext, StepReport};
use super::state::{AttributionState, user_bucket};
use super::suspect::Outcome;
use flywheel_types::rows::{InteractionRows, Interner, Names};
use flywheel_types::{ChunkState, TrustClass};
use std::collections::BTreeMap;

/// Feeds the rows that became due since the last step (each interaction exactly once, in time order) and reports
/// suspects and proposed transitions. `names` belongs to `batch`; the state keeps its own ids.
///
/// The result does not depend on how rows are cut into batches, except that transitions can only be proposed
/// when a step ends.
///
/// # Errors
/// [`AttributionError`] when a column is too short, an offset or id is out of range, or the policy is out of range.
/// The state is unchanged then.
pub fn step(
    policy: &AttributionPolicyV1,
    state: &mut AttributionState,
    names: &Names,
    batch: &InteractionRows,
    context: &ChunkContext,
) -> Result<StepReport, AttributionError> {
    policy.check()?;
    check_batch(names, batch)?;
    let mut report = StepReport::default();
    let mut ids = Ids::new(names);
    let mut canaries = open_canaries(policy, state, context);
    for i in 0..batch.len() {
        if batch.trust[i] == TrustClass::Anonymous && !policy.count_anonymous {
            report.rows_anonymous += 1;
            continue;
        }
        let period = batch.hour[i] / policy.refit_hours;
        if state.period.is_none_or(|p| period > p) {
            if state.rows > 0 {
                refit(state, policy, period * policy.refit_hours);
                report.refits += 1;
            }
            state.period = Some(period);
        }
        let row = ids.row(state, names, batch, i, policy);
        judge(policy, state, &row, &batch.interaction[i]);
        for (chunk, hidden) in &row.all {
            if let Some((since, bets)) = canaries.get_mut(chunk)
                && batch.hour[i] >= *since
                && let Some(c) = state.canaries.get_mut(chunk)
            {
                c.add(row.user, *hidden, row.failed, bets);
            }
        }
        count(policy, state, &row);
        report.rows_used += 1;
    }
    for bench in [&mut state.chunks, &mut state.templates] {
        for s in bench.suspects.values_mut() {
            s.update_maxima(policy.trim_keyed, policy.trim_attested, policy.freeze.freeze_trim);
        }
    }
    decide::report(policy, state, context, &mut report);
    Ok(report)
}

/// One row in own ids.
struct Row {
    cell: Cell,
    levels: [u32; FAMILIES],
    user: u32,
    trust: TrustClass,
    day: u32,
    failed: bool,
    /// Shown chunks, rank order, each once.
    shown: Vec<u32>,
    /// All chunks with their hidden flags.
    all: Vec<(u32, bool)>,
}

/// Batch ids → own ids, filled as they are met.
struct Ids {
    template: Vec<u32>,
    bundle: Vec<u32>,
    device_class: Vec<u32>,
    locale: Vec<u32>,
    chunk: Vec<u32>,
    install: Vec<u32>,
}

const UNSEEN: u32 = u32::MAX;

fn own(map: &mut [u32], theirs: &Interner, mine: &mut Interner, id: u32) -> u32 {
    let slot = &mut map[id as usize];
    if *slot == UNSEEN {
        *slot = mine.intern(theirs.name(id));
    }
    *slot
}

impl Ids {
    fn new(names: &Names) -> Self {
        let blank = |i: &Interner| vec![UNSEEN; i.len()];
        Self {
            template: blank(&names.template),
            bundle: blank(&names.bundle),
            device_class: blank(&names.device_class),
            locale: blank(&names.locale),
            chunk: blank(&names.chunk),
            install: blank(&names.install),
        }
    }

    fn row(
        &mut self,
        state: &mut AttributionState,
        names: &Names,
        batch: &InteractionRows,
        i: usize,
        policy: &AttributionPolicyV1,
    ) -> Row {
        let own_names = &mut state.names;
        let template = own(&mut self.template, &names.template, &mut own_names.template, batch.template[i]);
        let bundle = own(&mut self.bundle, &names.bundle, &mut own_names.bundle, batch.bundle[i]);
        let class =
            own(&mut self.device_class, &names.device_class, &mut own_names.device_class, batch.device_class[i]);
        let locale = own(&mut self.locale, &names.locale, &mut own_names.locale, batch.locale[i]);
        let mut all: Vec<(u32, bool)> = Vec::with_capacity(8);
        for (c, hidden) in batch.chunks(i) {
            let c = own(&mut self.chunk, &names.chunk, &mut own_names.chunk, c);
            if !all.iter().any(|x| x.0 == c) {
                all.push((c, hidden));
            }
        }
        let slot = &mut self.install[batch.install[i] as usize];
        if *slot == UNSEEN {
            *slot = state.users.slot(names.install.name(batch.install[i]));
        }
        let user = *slot;
        let bucket = user_bucket(&state.users.sums[user as usize], state.mean());
        let shown: Vec<u32> = all.iter().filter(|c| !c.1).map(|c| c.0).collect();
        let community = row_community(&state.labels, &shown);
        let failed = match policy.failure {
            FailureKind::Rejected => batch.rejected[i],
            FailureKind::Refused => batch.refused[i],
            FailureKind::RejectedOrRefused => batch.rejected[i] || batch.refused[i],
        };
        let hour = batch.hour[i];
        Row {
            cell: Cell { epoch: Cell::epoch_of(hour), template, bundle, device_class: class, locale, bucket },
            levels: [template, bundle, class, locale, u32::from(bucket), community],
            user,
            trust: batch.trust[i],
            day: hour / 24,
            failed,
            shown,
            all,
        }
    }
}

/// Rows of a template in the model's window before chunks are judged under it.
const KNOWN_ROWS: f64 = 30.0;

/// Adds the row to the evidence of every suspect it touches.
fn judge(policy: &AttributionPolicyV1, state: &mut AttributionState, row: &Row, interaction: &str) {
    let q = &state.chunks.lens.q;
    let other: f64 = row.shown.iter().enumerate().map(|(r, c)| 1.0 - q_of(q, *c) * rank_weight(r)).product();
    let outcome = |p_without: f64, weight: f64| Outcome {
        user: row.user,
        trust: row.trust,
        day: row.day,
        device_class: row.cell.device_class,
        locale: row.cell.locale,
        failed: row.failed,
        p_without,
        weight,
    };
    let t = row.cell.template;
    // What a template does to the failure rate must be known before a chunk is judged under it: without this rule the
    // first answers of a new, hard template would count against every chunk it uses. The rule looks at the past only,
    // so the evidence that remains is as valid as before.
    let template_known = state.templates.lens.scores.get(t as usize).is_some_and(|s| s.exposures >= KNOWN_ROWS);
    if template_known && row.shown.iter().any(|c| state.chunks.suspects.contains_key(c)) {
        let survive = (1.0 - sigmoid(state.chunks.lens.baseline.eta(&row.levels))) * other;
        for (r, c) in row.shown.iter().enumerate() {
            let Some(s) = state.chunks.suspects.get_mut(c) else {
                continue;
            };
            let (w, qc) = (rank_weight(r), q_of(q, *c));
            s.add(&outcome(1.0 - survive / (1.0 - qc * w), w), &policy.lambda_grid, policy.gamma);
            if row.failed && qc > 0.0 {
                s.example(interaction, qc * w / (1.0 - survive).max(1e-6), r as u32 + 1);
            }
        }
    }
    if let Some(s) = state.templates.suspects.get_mut(&t) {
        // The suspect replaces the template family, whose effects this lens keeps at zero.
        let survive = (1.0 - sigmoid(state.templates.lens.baseline.eta(&row.levels))) * other;
        s.add(&outcome(1.0 - survive, 1.0), &policy.lambda_grid, policy.gamma);
        let qt = q_of(&state.templates.lens.q, t);
        if row.failed && qt > 0.0 {
            s.example(interaction, qt / (1.0 - survive * (1.0 - qt)).max(1e-6), 1);
        }
    }
}

/// Adds the row to the sums of the past.
fn count(policy: &AttributionPolicyV1, state: &mut AttributionState, row: &Row) {
    let u = &mut state.users.sums[row.user as usize];
    if u.day != row.day {
        (u.day, u.today) = (row.day, 0);
    }
    u.today = u.today.saturating_add(1);
    u.rows = u.rows.saturating_add(1);
    u.failures = u.failures.saturating_add(u32::from(row.failed));
    state.rows += 1;
    state.failures += u64::from(row.failed);
    if u.today > policy.user_daily_cap {
        return;
    }
    state.patterns.add(row.cell, &row.shown, 1, u32::from(row.failed), policy.max_patterns);
    let cap = policy.screen_min_users as usize;
    row.shown.iter().for_each(|c| state.chunks.note_user(*c, row.user, cap));
    state.templates.note_user(row.cell.template, row.user, cap);
}

/// Starts and ends canary evidence as the registry says; returns the bets per own chunk id.
fn open_canaries(
    policy: &AttributionPolicyV1,
    state: &mut AttributionState,
    context: &ChunkContext,
) -> BTreeMap<u32, (u32, Bets)> {
    let share = f64::from(policy.freeze.canary_share_ppm) / 1e6;
    let mut open = BTreeMap::new();
    for (name, info) in &context.chunks {
        let hidden_share = match info.state {
            ChunkState::CanaryFrozen => share,
            ChunkState::CanaryActive => 1.0 - share,
            _ => continue,
        };
        let id = state.names.chunk.intern(name);
        let c =
            state.canaries.entry(id).or_insert_with(|| Canary::new(info.canary_epoch, info.since_hour, hidden_share));
        if c.epoch != info.canary_epoch || c.since_hour != info.since_hour {
            *c = Canary::new(info.canary_epoch, info.since_hour, hidden_share);
        }
        open.insert(id, (info.since_hour, c.bets(policy.freeze.canary_delta)));
    }
    state.canaries.retain(|id, _| open.contains_key(id));
    open
}

fn check_batch(names: &Names, b: &InteractionRows) -> Result<(), AttributionError> {
    let n = b.len();
    let columns: [(&'static str, usize); 8] = [
        ("hour", b.hour.len()),
        ("template", b.template.len()),
        ("bundle", b.bundle.len()),
        ("device_class", b.device_class.len()),
        ("locale", b.locale.len()),
        ("install", b.install.len()),
        ("trust", b.trust.len()),
        ("rejected", b.rejected.len()),
    ];
    let lengths = columns
        .into_iter()
        .map(|(column, found)| (column, found, n))
        .chain([("refused", b.refused.len(), n), ("chunk_hidden", b.chunk_hidden.len(), b.chunk.len())]);
    for (column, found, expected) in lengths {
        if found != expected {
            return Err(AttributionError::ColumnLength { column, found, expected });
        }
    }
    // A default (empty) batch has no offsets at all; that is a batch of zero rows.
    if b.chunk_start.len() != n + 1 && !(n == 0 && b.chunk_start.is_empty()) {
        let found = b.chunk_start.len();
        return Err(AttributionError::ColumnLength { column: "chunk_start", found, expected: n + 1 });
    }
    let mut last = 0;
    for (row, &value) in b.chunk_start.iter().enumerate() {
        if value < last || value as usize > b.chunk.len() {
            return Err(AttributionError::ChunkOffsets { row, value, chunks: b.chunk.len() });
        }
        last = value;
    }
    let known: [(&'static str, &[u32], usize); 6] = [
        ("template", &b.template, names.template.len()),
        ("bundle", &b.bundle, names.bundle.len()),
        ("device_class", &b.device_class, names.device_class.len()),
        ("locale", &b.locale, names.locale.len()),
        ("install", &b.install, names.install.len()),
        ("chunk", &b.chunk, names.chunk.len()),
    ];
    for (column, ids, len) in known {
        if let Some(row) = ids.iter().position(|id| *id as usize >= len) {
            return Err(AttributionError::UnknownId { row, column, id: ids[row] });
        }
    }
    Ok(())
}
