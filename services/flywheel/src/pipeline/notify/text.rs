//! The words of the mails: plain text with the numbers and a link. Pure, so that tests can read them.

use flywheel_attribution::culprit::{Proposal, SubjectKind, Transition};
use flywheel_experiment::gate::{GateReportV1, GateResult};
use flywheel_experiment::planner::{Change, Next, PlanV1};
use flywheel_types::{AppId, ChunkState};
use std::fmt::Write as _;

/// One planning round, as far as mails tell it.
pub struct Round<'a> {
    pub app: &'a AppId,
    pub before: &'a PlanV1,
    pub next: &'a Next,
    pub report: Option<&'a GateReportV1>,
    /// Address of the dashboard.
    pub url: &'a str,
}

/// A header value holds no line ends.
fn one_line(text: &str, most: usize) -> String {
    let flat: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if flat.chars().count() <= most {
        return flat;
    }
    flat.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Subject and body about a frozen chunk.
pub fn chunk(app: &AppId, p: &Proposal, to: ChunkState, url: &str) -> (String, String) {
    let what = match p.kind {
        SubjectKind::Chunk => "chunk",
        SubjectKind::Template => "template",
    };
    let done = match to {
        ChunkState::CanaryFrozen => "hidden on a share of the devices",
        _ => "hidden everywhere",
    };
    let subject = one_line(&format!("[{app}] suspected cause: {what} {} is {done}", p.name), 200);
    let mut body = format!("App {app}: the {what} {} is now {done}.\n\nWhy: {}\n", p.name, p.reason);
    if let Transition::CanaryFreeze { share_ppm } = p.transition {
        let _ = write!(
            body,
            "\n{:.1} % of the devices do not see it from now on. The others still do: whether hiding it helps is \
             measured before it is hidden everywhere.\n",
            f64::from(share_ppm) / 10_000.0
        );
    }
    let _ = write!(
        body,
        "\nTo bring it back: POST /v1/chunks/state. To stop every automatic freeze: freeze_kill_switch in the \
         settings.\n\nSuspected causes: {url}/findings\n"
    );
    (subject, body)
}

/// Longest part of an error that goes into a mail, characters.
const ERROR_SHOWN: usize = 500;

/// Subject and body about a job that failed in each of its attempts.
pub fn dead_job(app: &AppId, kind: &str, job: &str, error: &str, url: &str) -> (String, String) {
    let subject = one_line(&format!("[{app}] job failed for good: {kind}"), 200);
    let body = format!(
        "App {app}: the job {job} ({kind}) failed and is not tried again by itself.\n\nLast error: {}\n\n\
         When the cause is gone, run it again: POST /v1/jobs/{job}/retry\n\nDashboard: {url}/\n",
        one_line(error, ERROR_SHOWN),
    );
    (subject, body)
}

/// Subject and body of the alerts of a round; `alerts` are (urgent, text).
pub fn alert(round: &Round<'_>, alerts: &[(bool, &str)]) -> (String, String) {
    let urgent = alerts.iter().any(|(u, _)| *u);
    let plan = &round.next.plan;
    let mark = if urgent { "URGENT: " } else { "" };
    let state = words(plan.state.as_str());
    let subject = one_line(&format!("[{}] {mark}rollout {} is {state}", round.app, plan.rollout_id), 200);
    let mut body = head(round);
    for (_, text) in alerts {
        let _ = writeln!(body, "{text}");
    }
    numbers(&mut body, round);
    (subject, body)
}

/// Subject and body of a question to approvers.
pub fn question(round: &Round<'_>, generation: u64, change: Change) -> (String, String) {
    let plan = &round.next.plan;
    let what = match change {
        Change::Start => "start",
        Change::Advance => "go to the next step",
        Change::Complete => "give the new bundle to everybody",
        Change::RollBack => "roll back",
    };
    let subject = one_line(&format!("[{}] approval needed: rollout {}: {what}", round.app, plan.rollout_id), 200);
    let mut body = head(round);
    let _ = write!(body, "This needs approval: {what}.\n\nWhy: {}\n", round.next.reason);
    if let Some(missing) = round.next.proposal.as_ref().and_then(|p| p.approvals_missing) {
        let _ = writeln!(body, "Approvals still missing: {missing}");
    }
    let _ = write!(
        body,
        "\nTo approve, and this change only: POST /v1/rollouts/{}/approve with\n\
         {{\"reason\": \"...\", \"approves\": {{\"generation\": {generation}, \"change\": \"{}\"}}}}\n",
        plan.rollout_id,
        change.as_str(),
    );
    numbers(&mut body, round);
    (subject, body)
}

fn words(state: &str) -> String {
    state.replace('_', " ")
}

fn head(round: &Round<'_>) -> String {
    let (before, next) = (round.before.state.as_str(), round.next.plan.state.as_str());
    let moved = if before == next { words(next) } else { format!("{} -> {}", words(before), words(next)) };
    format!("App {}, rollout {}: {moved}\n\n", round.app, round.before.rollout_id)
}

/// Exposure, verdict and each gate in numbers, then the link.
fn numbers(body: &mut String, round: &Round<'_>) {
    let plan = &round.next.plan;
    let share = |ppm: u32| f64::from(ppm) / 10_000.0;
    let _ = write!(
        body,
        "\nStep {}: {:.2} % of the fleet runs the new bundle, {:.2} % is compared with it.\nNew bundle:  {}\nLast good:   {}\n",
        plan.step,
        share(plan.treatment.width()),
        share(plan.control.width()),
        plan.candidate_bundle,
        plan.control_bundle,
    );
    match round.report {
        None => body.push_str("\nThere is no gate report yet.\n"),
        Some(r) => {
            let _ = write!(body, "\nGates at {} UTC: {}. {}\n", r.now.format("%Y-%m-%d %H:%M"), r.word, r.reason);
            for g in &r.gates {
                let _ = writeln!(body, "- {}", gate(g));
            }
            for (reason, n) in &r.exclusions {
                let _ = writeln!(body, "  not counted: {n} ({})", words(reason));
            }
        }
    }
    let _ = write!(body, "\nAll numbers: {}/rollouts/{}\n", round.url, plan.rollout_id);
}

/// One gate in one line.
fn gate(g: &GateResult) -> String {
    let mut s = format!("{}: {}", g.name, g.word);
    if let (Some(new), Some(old)) = (g.treatment_value, g.control_value) {
        let _ = write!(s, "; new {:.2} %, last good {:.2} %", new * 100.0, old * 100.0);
    }
    if let Some(d) = g.difference {
        let _ = write!(s, "; difference {:+.2} pp", d * 100.0);
    }
    if let (Some(l), Some(u)) = (g.lower, g.upper) {
        let _ = write!(s, " ({:+.2} to {:+.2})", l * 100.0, u * 100.0);
    }
    if let Some(m) = g.margin {
        let _ = write!(s, "; allowed {:+.2} pp", m * 100.0);
    }
    let _ = write!(s, "; {} and {} devices", g.treatment_devices, g.control_devices);
    if !g.reason.is_empty() {
        let _ = write!(s, ". {}", g.reason);
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_never_breaks_the_header() {
        assert_eq!(one_line("a\r\nBcc: x", 50), "a  Bcc: x");
        assert_eq!(one_line("abcdef", 4), "abc…");
    }

    #[test]
    fn a_canary_freeze_says_its_share_and_the_reason() {
        let p = Proposal {
            kind: SubjectKind::Chunk,
            name: "returns@3".into(),
            transition: Transition::CanaryFreeze { share_ppm: 100_000 },
            automatic: true,
            reason: "41 of 60 answers with it failed".into(),
        };
        let app = AppId::new("shop").unwrap();
        let (subject, body) = chunk(&app, &p, ChunkState::CanaryFrozen, "https://fly.example");
        assert_eq!(subject, "[shop] suspected cause: chunk returns@3 is hidden on a share of the devices");
        assert!(body.contains("41 of 60 answers with it failed") && body.contains("10.0 % of the devices"), "{body}");
        assert!(body.contains("https://fly.example/findings"), "{body}");
    }
}
