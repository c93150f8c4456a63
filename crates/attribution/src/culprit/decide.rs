//! From evidence to proposed transitions: e-BH over the live suspects, then the automation table.

use super::explain;
use super::policy::{AttributionPolicyV1, FreezePolicyV1};
use super::report::{
    Buddy, ChunkContext, ChunkInfo, FreezePrecision, Proposal, StepReport, SubjectKind, SuspectReport, TemplateEffect,
    TraceShare, Transition,
};
use super::scope;
use super::state::{AttributionState, Bench, Surroundings};
use super::suspect::{e_bh, log_adjusted};
use flywheel_types::rows::Interner;
use flywheel_types::{Automation, ChunkState};
use std::collections::{BTreeMap, BTreeSet};

/// 90 % two-sided normal quantile for the interval of the causal power.
const Z90: f64 = 1.645;

/// Fills suspects and proposals of `report`.
pub(crate) fn report(
    policy: &AttributionPolicyV1,
    state: &AttributionState,
    context: &ChunkContext,
    report: &mut StepReport,
) {
    report.base_rate = (state.rows > 0).then(|| state.failures as f64 / state.rows as f64);
    report.communities = state.communities;
    report.patterns_forgotten = state.patterns.forgotten();
    let templates = suspects(policy, state, SubjectKind::Template, &BTreeSet::new());
    let raised = templates.iter().filter(|t| t.0.significant).filter_map(|t| state.names.template.get(&t.0.name));
    let chunks = suspects(policy, state, SubjectKind::Chunk, &raised.collect());
    report.hypotheses = (chunks.len() + templates.len()) as u32;
    report.proposals = Decider::new(policy, context).chunk_proposals(&chunks);
    report.proposals.extend(canary_proposals(policy, state, context, &chunks));
    report.proposals.extend(template_proposals(&policy.freeze, &templates, &chunks));
    report.suspects = chunks.into_iter().chain(templates).map(|s| s.0).collect();
    report.suspects.sort_by(|a, b| {
        b.log_e_trimmed.total_cmp(&a.log_e_trimmed).then(b.z.total_cmp(&a.z)).then(a.name.cmp(&b.name))
    });
}

/// One proposal per template that is significant itself, or to which significant chunks owe their failures.
fn template_proposals(policy: &FreezePolicyV1, templates: &[Judged], chunks: &[Judged]) -> Vec<Proposal> {
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for t in templates.iter().filter(|t| t.0.significant) {
        reasons.entry(&t.0.name).or_default().push(t.0.explanation.clone());
    }
    for c in chunks.iter().filter(|c| c.0.significant && enough_evidence(policy, &c.0)) {
        for template in &c.0.only_under {
            reasons.entry(template).or_default().push(explain::limited(&c.0));
        }
    }
    let why = "a prompt template causes failures: an editor must change it; the fixed one ships as a `prompt` bundle";
    reasons
        .into_iter()
        .map(|(name, reasons)| Proposal {
            kind: SubjectKind::Template,
            name: name.to_owned(),
            transition: Transition::NeedsPerson { why: why.to_owned() },
            automatic: false,
            reason: reasons.join(" "),
        })
        .collect()
}

/// A suspect's report and whether it is rejected at the stricter level for a freeze without a canary.
struct Judged(SuspectReport, bool, bool);

/// `raised`: templates that fail as a whole, by own id.
fn suspects(
    policy: &AttributionPolicyV1,
    state: &AttributionState,
    kind: SubjectKind,
    raised: &BTreeSet<u32>,
) -> Vec<Judged> {
    let (bench, names): (&Bench, &Interner) = match kind {
        SubjectKind::Chunk => (&state.chunks, &state.names.chunk),
        SubjectKind::Template => (&state.templates, &state.names.template),
    };
    let live: Vec<_> = bench.suspects.iter().collect();
    let decision: Vec<f64> = live.iter().map(|s| log_adjusted(s.1.max_log_e)).collect();
    let strict: Vec<f64> = live.iter().map(|s| log_adjusted(s.1.max_log_e_strict)).collect();
    let significant = e_bh(&decision, policy.freeze.alpha_canary);
    let certain = e_bh(&strict, policy.freeze.alpha_freeze);
    let total: f64 = bench.lens.scores.iter().map(|s| s.exposures).sum::<f64>().max(1.0);
    live.iter()
        .enumerate()
        .map(|(i, &(&id, s))| {
            let score = bench.lens.scores.get(id as usize).copied().unwrap_or_default();
            let q = bench.lens.q.get(id as usize).copied().unwrap_or(0.0);
            let around = (kind == SubjectKind::Chunk).then(|| state.surroundings.get(&id)).flatten();
            let community = state.labels.get(id as usize).copied().filter(|l| *l > 0);
            let mut r = SuspectReport {
                kind,
                name: names.name(id).to_owned(),
                exposures: score.exposures as u64,
                failures: score.failures as u64,
                retrieval_share: score.exposures / total,
                z: score.z,
                z_offset: score.z_offset,
                q_hat: q,
                q_low: (q - Z90 * score.q_se).clamp(0.0, 1.0),
                q_high: (q + Z90 * score.q_se).clamp(0.0, 1.0),
                since_hour: s.since_hour,
                users: s.users(),
                days: s.days(),
                device_classes: s.classes(),
                locales: s.locales(),
                log_e: s.log_e(0, 0),
                log_e_trimmed: s.log_e(policy.trim_keyed, policy.trim_attested),
                log_e_decision: decision[i],
                significant: significant[i],
                community: if kind == SubjectKind::Chunk { community } else { None },
                confounded_with_topic: around.is_some_and(|a| a.confounded),
                not_separable: around
                    .map_or_else(Vec::new, |a| a.twins.iter().map(|t| names.name(*t).to_owned()).collect()),
                buddies: around.map_or_else(Vec::new, |a| {
                    let buddy = |b: &(u32, f64)| Buddy { name: names.name(b.0).to_owned(), share: b.1 };
                    a.buddies.iter().map(buddy).collect()
                }),
                by_template: around.map_or_else(Vec::new, |a| by_template(&state.names.template, a)),
                only_under: around.map_or_else(Vec::new, |a| {
                    scope::limited_to(&a.by_template).iter().map(|t| state.names.template.name(*t).to_owned()).collect()
                }),
                confounded_with_template: around
                    .is_some_and(|a| scope::hardly_outside(&a.by_template, |t| raised.contains(&t))),
                top_traces: s
                    .examples
                    .iter()
                    .map(|e| TraceShare { interaction: e.interaction.clone(), share: e.share, rank: e.rank })
                    .collect(),
                canary: state
                    .canaries
                    .get(&id)
                    .filter(|_| kind == SubjectKind::Chunk)
                    .map(super::canary::Canary::report),
                explanation: String::new(),
            };
            r.explanation = explain::suspect(&r);
            Judged(r, certain[i], s.one_locale_only())
        })
        .collect()
}

fn by_template(names: &Interner, around: &Surroundings) -> Vec<TemplateEffect> {
    let mut splits: Vec<_> = around.by_template.iter().collect();
    splits.sort_by(|a, b| b.exposures.cmp(&a.exposures).then(a.template.cmp(&b.template)));
    let effect = |s: &&scope::Split| TemplateEffect {
        template: names.name(s.template).to_owned(),
        exposures: s.exposures,
        failures: s.failures,
        q_hat: s.q.clamp(0.0, 1.0),
    };
    splits.iter().map(effect).collect()
}

/// Whether the transitions may be done without a person at all.
fn automation_on(policy: &FreezePolicyV1, context: &ChunkContext) -> bool {
    context.automation == Automation::Act
        && !policy.kill_switch
        && !precision_lost(context.precision, policy.alpha_canary, policy.precision_min_judged)
}

/// The precision meter: true when `refuted` of the judged freezes is too many for a false-discovery rate of
/// `alpha` (exact binomial tail at 5 %), once enough have been judged.
fn precision_lost(p: FreezePrecision, alpha: f64, min_judged: u32) -> bool {
    let n = p.confirmed + p.refuted;
    if n < min_judged {
        return false;
    }
    let mut term = (1.0 - alpha).powi(n as i32);
    let mut below = 0.0;
    for k in 0..p.refuted {
        below += term;
        term *= f64::from(n - k) / f64::from(k + 1) * alpha / (1.0 - alpha);
    }
    1.0 - below <= 0.05
}

struct Decider<'a> {
    policy: &'a AttributionPolicyV1,
    context: &'a ChunkContext,
    /// Chunks in the index, device classes a suspect must show, budgets left.
    index: f64,
    chunks_left: i64,
    total_left: i64,
    mass_left: f64,
    collections: BTreeMap<&'a str, (u32, u32)>,
}

fn is_hidden(s: ChunkState) -> bool {
    matches!(s, ChunkState::CanaryFrozen | ChunkState::Frozen | ChunkState::ReembedQueued | ChunkState::Shadow)
}

impl<'a> Decider<'a> {
    fn new(policy: &'a AttributionPolicyV1, context: &'a ChunkContext) -> Self {
        let f = &policy.freeze;
        let served = || context.chunks.values().filter(|c| c.state != ChunkState::Retired);
        let n = served().count() as f64;
        let hidden = served().filter(|c| is_hidden(c.state));
        let today = hidden.clone().filter(|c| c.since_hour + 24 > context.now_hour).count() as i64;
        let mut collections: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
        for c in served() {
            if let Some(name) = &c.collection {
                let e = collections.entry(name).or_default();
                e.0 += 1;
                e.1 += u32::from(is_hidden(c.state));
            }
        }
        let at_least_one = |share: f64| ((share * n).floor() as i64).max(1);
        Self {
            policy,
            context,
            index: n,
            chunks_left: at_least_one(f.budget_chunks_per_day) - today,
            total_left: at_least_one(f.budget_total) - hidden.count() as i64,
            mass_left: f.budget_mass_per_day.max(f.small_index_factor / n.max(1.0)),
            collections,
        }
    }

    /// Most failures avoided first, so that the budget goes where it helps most.
    fn chunk_proposals(mut self, suspects: &[Judged]) -> Vec<Proposal> {
        let mut order: Vec<&Judged> = suspects.iter().collect();
        let avoided = |j: &Judged| j.0.q_hat * j.0.exposures as f64;
        order.sort_by(|a, b| avoided(b).total_cmp(&avoided(a)).then(a.0.name.cmp(&b.0.name)));
        let mut out = Vec::new();
        for j in order {
            let context = self.context;
            let Some(info) = context.chunks.get(&j.0.name) else {
                continue;
            };
            if let Some((transition, automatic, reason)) = self.one(j, info) {
                out.push(Proposal { kind: SubjectKind::Chunk, name: j.0.name.clone(), transition, automatic, reason });
            }
        }
        out
    }

    fn one(&mut self, j: &Judged, info: &ChunkInfo) -> Option<(Transition, bool, String)> {
        let Judged(s, certain, _) = j;
        if !s.only_under.is_empty() {
            return self.limited(s, info);
        }
        if info.state == ChunkState::Active {
            let on = self.context.automation != Automation::Observe && !self.policy.freeze.kill_switch;
            return Some((Transition::MarkSuspect, on, s.explanation.clone()));
        }
        if !matches!(info.state, ChunkState::Suspect | ChunkState::CanaryFrozen) || !s.significant {
            return None;
        }
        if !s.not_separable.is_empty() {
            let why = format!("not separable from {}: they are never retrieved apart", s.not_separable.join(", "));
            return Some((Transition::NeedsPerson { why }, false, s.explanation.clone()));
        }
        if !enough_evidence(&self.policy.freeze, s) {
            return None;
        }
        let auto = automation_on(&self.policy.freeze, self.context);
        let f = &self.policy.freeze;
        let strong = *certain && strong(f, s);
        if strong {
            return Some(self.freeze(j, info, auto));
        }
        if info.state == ChunkState::Suspect {
            if info.coverage_loss.is_some_and(|l| l > f.max_coverage_loss) {
                return Some(needs_person(s, vec![self.coverage_reason(info)]));
            }
            let fits = self.take_budget(s);
            let reason = budget_note(fits, &s.explanation);
            return Some((Transition::CanaryFreeze { share_ppm: f.canary_share_ppm }, auto && fits, reason));
        }
        None
    }

    /// The template is to blame: the chunk is neither suspected nor hidden because of it.
    fn limited(&self, s: &SuspectReport, info: &ChunkInfo) -> Option<(Transition, bool, String)> {
        let on = self.context.automation != Automation::Observe && !self.policy.freeze.kill_switch;
        (info.state == ChunkState::Suspect).then(|| (Transition::ClearSuspect, on, explain::limited(s)))
    }

    fn freeze(&mut self, j: &Judged, info: &ChunkInfo, auto: bool) -> (Transition, bool, String) {
        let Judged(s, _, one_locale) = j;
        let mut why = self.person_reasons(s, info, *one_locale);
        if s.canary.is_some_and(|c| c.log_e_no_help >= self.policy.freeze.canary_refute_e.ln()) {
            why.push(
                "hiding it does not help: the topic fails with and without it, so the text is wrong or missing".into(),
            );
        }
        if !why.is_empty() {
            return needs_person(s, why);
        }
        let fits = info.state == ChunkState::CanaryFrozen || self.take_budget(s);
        (Transition::Freeze, auto && fits, budget_note(fits, &s.explanation))
    }

    fn coverage_reason(&self, info: &ChunkInfo) -> String {
        let loss = info.coverage_loss.unwrap_or(0.0);
        format!("hiding it leaves {:.1} % of the affected queries without any chunk", 100.0 * loss)
    }

    /// Why a person must decide about a freeze; empty when nobody must.
    fn person_reasons(&self, s: &SuspectReport, info: &ChunkInfo, one_locale: bool) -> Vec<String> {
        let f = &self.policy.freeze;
        let mut why = Vec::new();
        if !s.only_under.is_empty() {
            why.push(explain::limited(s));
        }
        let limit = f.person_share.max(f.small_index_factor / self.index.max(1.0));
        if s.retrieval_share >= limit {
            why.push(format!(
                "it holds {:.2} % of all retrievals (limit {:.2} %)",
                100.0 * s.retrieval_share,
                100.0 * limit
            ));
        }
        if let Some(tag) = info.tags.iter().find(|t| f.person_tags.contains(t)) {
            why.push(format!("it is tagged `{tag}`"));
        }
        if info.only_source {
            why.push("it is the only source for a group of queries".to_owned());
        }
        if info.coverage_loss.is_some_and(|l| l > f.max_coverage_loss) {
            why.push(self.coverage_reason(info));
        }
        if one_locale {
            why.push("all failures come from one locale although other locales use it".to_owned());
        }
        if let Some((size, hidden)) = info.collection.as_deref().and_then(|c| self.collections.get(c)) {
            let allowed = ((f.max_collection_share * f64::from(*size)).floor() as u32).max(1);
            if hidden + u32::from(!is_hidden(info.state)) > allowed {
                why.push(format!("{hidden} of {size} chunks of its collection are hidden already"));
            }
        }
        why
    }

    /// Takes one chunk from today's budget; false when it is used up.
    fn take_budget(&mut self, s: &SuspectReport) -> bool {
        let fits = self.chunks_left > 0 && self.total_left > 0 && self.mass_left >= s.retrieval_share;
        if fits {
            self.chunks_left -= 1;
            self.total_left -= 1;
            self.mass_left -= s.retrieval_share;
        }
        fits
    }
}

fn enough_evidence(f: &FreezePolicyV1, s: &SuspectReport) -> bool {
    s.users >= f.min_users
        && s.days >= f.min_days
        && s.device_classes >= f.min_device_classes
        && s.q_low >= f.min_q_lower
}

/// The effect is large, and neither its topic nor a template can be mistaken for it.
fn strong(f: &FreezePolicyV1, s: &SuspectReport) -> bool {
    s.q_low >= f.freeze_min_q_lower && !s.confounded_with_topic && !s.confounded_with_template
}

fn budget_note(fits: bool, explanation: &str) -> String {
    if fits {
        explanation.to_owned()
    } else {
        format!("Over the budget for hidden chunks, so it waits for a person or for tomorrow. {explanation}")
    }
}

fn needs_person(s: &SuspectReport, why: Vec<String>) -> (Transition, bool, String) {
    (Transition::NeedsPerson { why: why.join("; ") }, false, s.explanation.clone())
}

/// Proposals that follow from the registry's states alone: canary outcomes, expired freezes, cleared suspects.
fn canary_proposals(
    policy: &AttributionPolicyV1,
    state: &AttributionState,
    context: &ChunkContext,
    suspects: &[Judged],
) -> Vec<Proposal> {
    let f = &policy.freeze;
    let auto = automation_on(f, context);
    let mut out = Vec::new();
    for (name, info) in &context.chunks {
        let id = state.names.chunk.get(name);
        let canary = id.and_then(|id| state.canaries.get(&id)).map(super::canary::Canary::report);
        let helps = canary.is_some_and(|c| c.log_e_helps >= f.canary_confirm_e.ln());
        let no_help = canary.is_some_and(|c| c.log_e_no_help >= f.canary_refute_e.ln());
        let judged = suspects.iter().find(|s| s.0.name == *name);
        let transition = match info.state {
            ChunkState::CanaryFrozen if helps => {
                let why =
                    judged.map_or_else(Vec::new, |j| Decider::new(policy, context).person_reasons(&j.0, info, j.2));
                if why.is_empty() {
                    Transition::ConfirmByCanary
                } else {
                    Transition::NeedsPerson { why: why.join("; ") }
                }
            }
            ChunkState::CanaryFrozen if no_help => {
                if judged.is_some_and(|j| j.1 && j.0.only_under.is_empty() && strong(f, &j.0)) {
                    continue; // the two kinds of evidence disagree: already handed to a person
                }
                Transition::RefuteByCanary
            }
            ChunkState::CanaryActive if helps => Transition::Refreeze,
            ChunkState::CanaryActive if no_help => Transition::Activate,
            ChunkState::Frozen if context.now_hour >= info.since_hour.saturating_add(f.ttl_days * 24) => {
                Transition::ExpireFreeze
            }
            ChunkState::Suspect
                if judged.is_none()
                    && context.now_hour >= info.since_hour.saturating_add(policy.evidence_days * 24) =>
            {
                Transition::ClearSuspect
            }
            _ => continue,
        };
        let automatic = match transition {
            Transition::NeedsPerson { .. } => false,
            Transition::ClearSuspect => context.automation != Automation::Observe && !f.kill_switch,
            _ => auto,
        };
        let reason = canary.map_or_else(
            || format!("in state `{}` since hour {}", info.state, info.since_hour),
            |c| explain::canary(&c),
        );
        out.push(Proposal { kind: SubjectKind::Chunk, name: name.clone(), transition, automatic, reason });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_precision_meter_needs_enough_cases_and_tolerates_alpha() {
        let p = |confirmed, refuted| FreezePrecision { confirmed, refuted };
        assert!(!precision_lost(p(1, 2), 0.1, 10), "three cases say nothing");
        assert!(!precision_lost(p(18, 2), 0.1, 10));
        assert!(precision_lost(p(6, 4), 0.1, 10)); // P(X >= 4 | 10, 0.1) = 0.013
        assert!(!precision_lost(p(7, 3), 0.1, 10)); // P(X >= 3 | 10, 0.1) = 0.070
    }
}
