//! One rollout: where it is, what each gate says in pictures and numbers, and how it came here.

use super::format::{NONE, count, percent, points, ppm, time};
use super::page::{PageError, PageResult, Visitor, html};
use super::svg::{Interval, interval};
use super::words;
use crate::http::error::{ApiError, PathParams};
use crate::http::rollouts::found;
use crate::server::Server;
use askama::Template;
use axum::extract::State;
use flywheel_experiment::gate::{GateKind, GateReportV1, GateResult, plain_word};
use flywheel_experiment::planner::PlanV1;
use flywheel_store::rollout_requests::RequestRow;
use flywheel_store::rollouts::{RolloutRow, VerdictRow};
use flywheel_types::{Error, RolloutId, Verdict};
use std::sync::Arc;

/// Changes of the verdict that are shown, newest first.
const HISTORY: usize = 50;

#[derive(Template)]
#[template(path = "rollout.html")]
struct Page {
    app: String,
    head: Head,
    report: Option<Report>,
    plans: Vec<Plan>,
    history: Vec<Look>,
    looks: usize,
    requests: Vec<Request>,
}

struct Head {
    id: String,
    state: &'static str,
    class: &'static str,
    since: String,
    reason: String,
    treatment: String,
    /// Absent for the first bundle of an app.
    control: Option<String>,
    candidate: Option<String>,
    created_by: String,
    created_at: String,
    /// Where the newest plan stands; absent for the first bundle of an app, which has no plan.
    position: Option<Position>,
}

struct Position {
    step: u32,
    phase: u32,
    treatment_share: String,
    control_share: String,
    ring: usize,
    intake_closed: bool,
}

struct Report {
    word: String,
    class: &'static str,
    reason: String,
    at: String,
    phase: u32,
    gates: Vec<Gate>,
    phases: Vec<Phase>,
    srm_p: String,
    srm_expected: String,
    srm_observed: String,
    exclusions: Vec<(String, String)>,
}

struct Gate {
    name: String,
    what: &'static str,
    word: String,
    class: &'static str,
    required: bool,
    method: &'static str,
    new_value: String,
    old_value: String,
    /// Absent where nothing is compared.
    difference: Option<Difference>,
    new_devices: String,
    old_devices: String,
    new_events: String,
    old_events: String,
    information: String,
    reason: String,
    /// Empty where there is no interval.
    svg: String,
}

/// New minus last good, in percentage points, with the range in which it lies.
struct Difference {
    value: String,
    lower: String,
    upper: String,
    margin: String,
}

struct Phase {
    phase: u32,
    new_exposed: String,
    old_exposed: String,
    new_closed: String,
    old_closed: String,
}

struct Plan {
    generation: u64,
    at: String,
    state: &'static str,
    class: &'static str,
    step: u32,
    treatment: String,
    control: String,
    reason: String,
    /// The gates' answer when the plan was made; absent before the first look.
    said: Option<Said>,
}

struct Said {
    word: &'static str,
    class: &'static str,
    /// Of the rejected answers.
    difference: Option<Difference>,
    svg: String,
}

struct Look {
    at: String,
    word: &'static str,
    class: &'static str,
    generation: i64,
    reason: String,
}

struct Request {
    at: String,
    verb: &'static str,
    who: String,
    reason: String,
    state: &'static str,
    answer: String,
}

/// `GET /rollouts/{id}`.
pub async fn show(
    State(server): State<Arc<Server>>,
    Visitor(who): Visitor,
    id: Result<PathParams<String>, ApiError>,
) -> PageResult {
    let PathParams(id) = id.map_err(|e| PageError(e.0))?;
    let id =
        RolloutId::new(id).map_err(|_| Error::not_found("rollout_not_found", "there is no rollout of this name"))?;
    let row = found(&server, &who, &id).await?;
    let plans = server.store.rollout_plan_list(&who.app, &id).await?;
    let plans = plans.into_iter().map(|p| serde_json::from_value(p.plan)).collect::<Result<Vec<PlanV1>, _>>();
    let plans = plans.map_err(Error::internal)?;
    let verdicts = server.store.rollout_verdict_list(&who.app, &id).await?;
    let verdicts: Vec<VerdictRow> = verdicts.into_iter().filter(|v| v.gate == VerdictRow::WHOLE).collect();
    let requests = server.store.rollout_request_list(&who.app, &id, false).await?;
    html(&Page {
        app: who.app.to_string(),
        head: head(&row, plans.last()),
        report: newest_report(&verdicts)?.map(report),
        plans: plans.iter().rev().map(|p| plan(p, &verdicts)).collect::<Result<_, _>>()?,
        looks: verdicts.len(),
        history: history(&verdicts),
        requests: requests.into_iter().rev().map(request).collect(),
    })
}

/// The report of the newest look; verdicts are in the order they fell.
///
/// # Errors
/// `Internal` when it was stored in a form that cannot be read.
pub fn newest_report(verdicts: &[VerdictRow]) -> Result<Option<GateReportV1>, Error> {
    verdicts.iter().rev().find(|v| v.gate == VerdictRow::WHOLE).map(report_of).transpose()
}

/// What a row of the gate [`VerdictRow::WHOLE`] holds.
///
/// # Errors
/// `Internal` when it was stored in a form that cannot be read.
pub fn report_of(row: &VerdictRow) -> Result<GateReportV1, Error> {
    serde_json::from_value(row.numbers.clone()).map_err(Error::internal)
}

fn head(row: &RolloutRow, plan: Option<&PlanV1>) -> Head {
    Head {
        id: row.rollout_id.to_string(),
        state: words::rollout_state(row.state),
        class: row.state.as_str(),
        since: time(row.state_since),
        reason: plan.map(|p| p.reason.clone()).or_else(|| row.reason.clone()).unwrap_or_default(),
        treatment: row.treatment.to_hex(),
        control: row.control.map(|d| d.to_hex()),
        candidate: row.candidate_id.as_ref().map(ToString::to_string),
        created_by: row.created_by.clone(),
        created_at: time(row.created_at),
        position: plan.map(|p| Position {
            step: p.step,
            phase: p.phase,
            treatment_share: ppm(p.treatment.width()),
            control_share: ppm(p.control.width()),
            ring: p.ring.len(),
            intake_closed: p.intake_closed,
        }),
    }
}

fn report(r: GateReportV1) -> Report {
    Report {
        class: words::verdict_class(r.verdict),
        at: time(r.now),
        phase: r.phase,
        gates: r.gates.iter().map(gate).collect(),
        phases: r
            .phases
            .iter()
            .map(|p| Phase {
                phase: p.phase,
                new_exposed: count(p.treatment_exposed),
                old_exposed: count(p.control_exposed),
                new_closed: count(p.treatment_closed),
                old_closed: count(p.control_closed),
            })
            .collect(),
        srm_p: r.srm.p_value.map_or_else(|| NONE.into(), |p| format!("{p:.4}")),
        srm_expected: format!("{:.1}", r.srm.expected_treatment),
        srm_observed: format!("{} new, {} last good", count(r.srm.observed_treatment), count(r.srm.observed_control)),
        exclusions: r.exclusions.iter().map(|(why, n)| (why.replace('_', " "), count(*n))).collect(),
        word: r.word,
        reason: r.reason,
    }
}

fn gate(g: &GateResult) -> Gate {
    Gate {
        name: g.name.clone(),
        what: words::gate_kind(g.kind),
        word: g.word.clone(),
        class: words::verdict_class(g.verdict),
        required: g.required,
        method: words::method(g.method),
        new_value: percent(g.treatment_value),
        old_value: percent(g.control_value),
        difference: difference(g),
        new_devices: count(g.treatment_devices),
        old_devices: count(g.control_devices),
        new_events: count(g.treatment_events),
        old_events: count(g.control_events),
        information: g.information_pct.map_or_else(|| NONE.into(), |p| format!("{p:.0} %")),
        reason: g.reason.clone(),
        svg: picture(g),
    }
}

fn difference(g: &GateResult) -> Option<Difference> {
    g.difference.map(|d| Difference {
        value: points(Some(d)),
        lower: points(g.lower),
        upper: points(g.upper),
        margin: points(g.margin),
    })
}

/// An interval needs its difference and margin; an open side reaches the edge of the picture.
fn picture(g: &GateResult) -> String {
    let (Some(value), Some(margin)) = (g.difference, g.margin) else { return String::new() };
    if g.lower.is_none() && g.upper.is_none() {
        return String::new();
    }
    let lower = g.lower.unwrap_or(f64::NEG_INFINITY);
    let upper = g.upper.unwrap_or(f64::INFINITY);
    interval(&g.name, Interval { lower, value, upper, margin })
}

/// A plan and the report on which it was decided: the newest look of the same moment.
fn plan(p: &PlanV1, verdicts: &[VerdictRow]) -> Result<Plan, Error> {
    let look = verdicts.iter().rfind(|v| v.at.timestamp() == p.changed_at.timestamp());
    Ok(Plan {
        said: look.map(said).transpose()?,
        generation: p.generation,
        at: time(p.changed_at),
        state: words::rollout_state(p.state),
        class: p.state.as_str(),
        step: p.step,
        treatment: ppm(p.treatment.width()),
        control: ppm(p.control.width()),
        reason: p.reason.clone(),
    })
}

fn said(v: &VerdictRow) -> Result<Said, Error> {
    let report: GateReportV1 = serde_json::from_value(v.numbers.clone()).map_err(Error::internal)?;
    let rejection = report.gates.iter().find(|g| g.kind == GateKind::Rejection);
    Ok(Said {
        word: plain_word(v.verdict),
        class: words::verdict_class(v.verdict),
        difference: rejection.and_then(difference),
        svg: rejection.map(picture).unwrap_or_default(),
    })
}

/// Only looks at which the verdict changed, newest first: hundreds of equal looks say nothing new.
fn history(verdicts: &[VerdictRow]) -> Vec<Look> {
    let mut out = Vec::new();
    let mut before: Option<Verdict> = None;
    for v in verdicts {
        if before != Some(v.verdict) {
            before = Some(v.verdict);
            out.push(Look {
                at: time(v.at),
                word: plain_word(v.verdict),
                class: words::verdict_class(v.verdict),
                generation: v.generation,
                reason: v.numbers.get("reason").and_then(|r| r.as_str()).unwrap_or_default().to_owned(),
            });
        }
    }
    out.reverse();
    out.truncate(HISTORY);
    out
}

fn request(r: RequestRow) -> Request {
    Request {
        at: time(r.created_at),
        verb: r.verb.as_str(),
        who: r.who,
        reason: r.reason,
        state: r.state.as_str(),
        answer: r.answer.unwrap_or_default(),
    }
}
