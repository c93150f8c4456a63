//! Suspected causes with their evidence in numbers and plain words.

use super::format::{count, json, odds, percent, time};
use super::overview::subject;
use super::page::{PageError, PageResult, Visitor, html};
use super::words;
use crate::server::Server;
use askama::Template;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use flywheel_attribution::culprit::{Proposal, SuspectReport, Transition};
use flywheel_store::findings::{FindingRow, FindingState};
use flywheel_types::Error;
use serde::Deserialize;
use std::sync::Arc;

/// Most suspected causes on the page.
const SHOWN: u32 = 100;
/// What is in force comes first, what is settled last: a long list is cut at its end.
const ORDER: [FindingState; 4] =
    [FindingState::Acted, FindingState::Open, FindingState::Resolved, FindingState::Dismissed];

#[derive(Debug, Deserialize)]
pub struct Filter {
    state: Option<FindingState>,
}

#[derive(Template)]
#[template(path = "findings.html")]
struct Page {
    app: String,
    /// Word, address and whether it is the shown one.
    filters: Vec<(&'static str, String, bool)>,
    findings: Vec<View>,
    cut: bool,
    shown: u32,
}

struct View {
    id: String,
    kind: &'static str,
    subject: String,
    state: &'static str,
    class: &'static str,
    /// Shown with its evidence; the others unfold.
    unfolded: bool,
    opened: String,
    updated: String,
    reason: String,
    proposal: String,
    why: String,
    explanation: String,
    /// Name and value.
    numbers: Vec<(&'static str, String)>,
    caveats: Vec<String>,
}

/// What attribution stores as evidence.
#[derive(Deserialize)]
struct Evidence {
    proposal: Proposal,
    suspect: Option<SuspectReport>,
}

/// `GET /findings`.
pub async fn show(
    State(server): State<Arc<Server>>,
    Visitor(who): Visitor,
    filter: Result<Query<Filter>, QueryRejection>,
) -> PageResult {
    let Query(filter) = filter.map_err(|e| {
        PageError(Error::invalid("bad_query", e.body_text(), "use the links on the page of suspected causes"))
    })?;
    let states = filter.state.map_or_else(|| ORDER.to_vec(), |one| vec![one]);
    let mut rows = Vec::new();
    for state in states {
        let left = SHOWN.saturating_sub(u32::try_from(rows.len()).unwrap_or(SHOWN));
        rows.extend(server.store.finding_list(&who.app, Some(state), left).await?);
    }
    html(&Page {
        app: who.app.to_string(),
        filters: filters(filter.state),
        cut: rows.len() >= SHOWN as usize,
        shown: SHOWN,
        findings: rows.iter().map(view).collect(),
    })
}

fn filters(shown: Option<FindingState>) -> Vec<(&'static str, String, bool)> {
    let one = |s: &FindingState| (words::finding_state(*s), format!("/findings?state={s}"), shown == Some(*s));
    let all = ("all", "/findings".to_owned(), shown.is_none());
    std::iter::once(all).chain(FindingState::ALL.iter().map(one)).collect()
}

fn view(f: &FindingRow) -> View {
    let mut view = View {
        id: f.finding_id.to_string(),
        kind: f.kind.as_str(),
        subject: subject(f),
        state: words::finding_state(f.state),
        class: words::finding_class(f.state),
        unfolded: f.state == FindingState::Acted,
        opened: time(f.opened_at),
        updated: time(f.updated_at),
        reason: f.reason.clone().unwrap_or_default(),
        proposal: String::new(),
        why: String::new(),
        explanation: String::new(),
        numbers: Vec::new(),
        caveats: Vec::new(),
    };
    match serde_json::from_value::<Evidence>(f.evidence.clone()) {
        Ok(e) => {
            view.proposal = proposal(&e.proposal.transition);
            view.why = e.proposal.reason;
            if let Some(s) = e.suspect {
                view.numbers = numbers(&s);
                view.caveats = caveats(&s);
                // the same sentences are said once
                if !view.why.contains(&s.explanation) {
                    view.explanation = s.explanation;
                }
            }
        }
        // evidence of another form (a slice, an older version): shown as it is rather than hidden
        Err(_) => view.why = json(&f.evidence, 600),
    }
    if view.reason == view.why {
        view.reason.clear();
    }
    view
}

fn proposal(t: &Transition) -> String {
    match t {
        Transition::MarkSuspect => "watch it".into(),
        Transition::ClearSuspect => "no longer suspected".into(),
        Transition::CanaryFreeze { share_ppm } => {
            format!("hide it on {:.1} % of the devices and compare", f64::from(*share_ppm) / 10_000.0)
        }
        Transition::Freeze => "hide it everywhere".into(),
        Transition::ConfirmByCanary => "hide it everywhere: hiding it on some devices helped".into(),
        Transition::RefuteByCanary => "show it again: hiding it did not help".into(),
        Transition::Activate => "use the new version everywhere: it does no harm".into(),
        Transition::Refreeze => "hide it again: the new version fails too".into(),
        Transition::ExpireFreeze => "try it again: it was hidden for long enough".into(),
        Transition::NeedsPerson { why } => format!("a person must decide: {why}"),
    }
}

fn numbers(s: &SuspectReport) -> Vec<(&'static str, String)> {
    let likely = format!("{} ({} to {})", percent(Some(s.q_hat)), percent(Some(s.q_low)), percent(Some(s.q_high)));
    let mut out = vec![
        ("Failed answers with it", format!("{} of {}", count(s.failures), count(s.exposures))),
        ("Likely cause of a failure when it comes first", likely),
        ("Evidence (sequential test)", odds(s.log_e_decision)),
        ("Evidence without the loudest reporters", odds(s.log_e_trimmed)),
        ("Passes false-discovery control", if s.significant { "yes" } else { "no" }.to_owned()),
        ("People counted", count(u64::from(s.users))),
        ("Days", s.days.to_string()),
        ("Device classes, languages", format!("{}, {}", s.device_classes, s.locales)),
        ("Share of all retrievals", percent(Some(s.retrieval_share))),
    ];
    for t in &s.by_template {
        let failed = format!("{}: {} of {}", t.template, count(t.failures), count(t.exposures));
        out.push(("Failed answers with it, by template", failed));
    }
    if let Some(c) = &s.canary {
        out.push(("Failed where it is shown", format!("{} of {}", count(c.shown_failures), count(c.shown))));
        out.push(("Failed where it is hidden", format!("{} of {}", count(c.hidden_failures), count(c.hidden))));
    }
    out
}

fn caveats(s: &SuspectReport) -> Vec<String> {
    let mut out = Vec::new();
    if s.confounded_with_topic {
        out.push("It cannot be told apart from its topic: too few answers about the topic came without it.".to_owned());
    }
    if s.confounded_with_template {
        out.push("Nearly all answers with it come from templates that fail as a whole: only hiding it on some devices can tell.".to_owned());
    }
    if !s.only_under.is_empty() {
        let templates = s.only_under.join(", ");
        out.push(format!(
            "It fails only with {templates} and does no harm elsewhere: the template is to blame, not the text."
        ));
    }
    if !s.not_separable.is_empty() {
        let others = s.not_separable.join(", ");
        out.push(format!("It nearly always comes together with {others}: nobody can say which one it is."));
    }
    out
}
