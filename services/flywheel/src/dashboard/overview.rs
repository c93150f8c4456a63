//! The overview: how much the controller may do, what the fleet runs, what is going out, and what looks wrong.

use super::format::{NONE, count, json, percent, short, time};
use super::page::{PageResult, Visitor, html};
use super::rollout::report_of;
use super::{fleet, traffic, words};
use crate::server::Server;
use askama::Template;
use axum::extract::State;
use flywheel_store::findings::{FindingRow, FindingState};
use flywheel_store::mail_outbox::MailState;
use flywheel_store::rollouts::{RolloutRow, VerdictRow};
use flywheel_types::{AppId, Digest, Error, JobState};
use std::sync::Arc;

/// Finished rollouts shown below the open ones.
const FINISHED: usize = 3;
/// Findings and audit entries shown.
const SHOWN: usize = 8;
const AUDIT_SHOWN: u32 = 8;
/// Of the findings: most of those for which something was done; they come before the open ones.
const ACTED_SHOWN: u32 = 5;
/// Newest mails looked at for the counters.
const MAILS: u32 = 500;

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    app: String,
    automation: &'static str,
    approval: &'static str,
    default_bundle: Option<String>,
    /// `None`: the telemetry cannot be read now.
    fleet: Option<FleetView>,
    silent_hours: i64,
    /// The same for what was answered and received lately.
    traffic: Option<TrafficView>,
    rollouts: Vec<RolloutView>,
    findings_open: String,
    findings: Vec<FindingView>,
    counters: Vec<(&'static str, String)>,
    audit: Vec<AuditView>,
}

struct TrafficView {
    rates: Vec<RateView>,
    /// There are more.
    cut: bool,
    intake: Vec<IntakeView>,
}

struct RateView {
    template: String,
    bundle: String,
    class: String,
    answers: String,
    rejected: String,
    share: String,
}

struct IntakeView {
    what: String,
    kind: String,
    reason: String,
    items: String,
}

struct FleetView {
    devices: String,
    not_reporting: String,
    anonymous: u64,
    bundles: Vec<BundleView>,
}

struct BundleView {
    /// Start of the digest, or that there is none.
    name: String,
    known: bool,
    role: &'static str,
    devices: String,
    /// Of all devices that proved who they are.
    share: String,
    not_reporting: String,
    rejection: String,
}

struct RolloutView {
    id: String,
    state: &'static str,
    class: &'static str,
    bundle: String,
    since: String,
    word: String,
    verdict_class: &'static str,
    reason: String,
}

struct FindingView {
    kind: &'static str,
    subject: String,
    state: &'static str,
    class: &'static str,
    since: String,
}

struct AuditView {
    at: String,
    actor: String,
    action: String,
    subject: String,
    detail: String,
}

/// `GET /`.
pub async fn show(State(server): State<Arc<Server>>, Visitor(who): Visitor) -> PageResult {
    let app = crate::pipeline::app(&server, &who.app).await?;
    let rollouts = server.store.rollout_list(&who.app, true, 50).await?;
    let newest = server.store.rollout_list(&who.app, false, 50).await?;
    let finished = newest.into_iter().filter(|r| r.state.is_final()).take(FINISHED);
    let shown: Vec<RolloutRow> = rollouts.iter().cloned().chain(finished).collect();
    let default = server.store.release_last_complete(&who.app).await?.map(|r| r.manifest);
    let findings = server.store.finding_list(&who.app, Some(FindingState::Open), 500).await?;
    let acted = server.store.finding_list(&who.app, Some(FindingState::Acted), ACTED_SHOWN).await?;
    let audit = server.store.audit_list(&who.app, None, AUDIT_SHOWN).await?;
    let traffic = traffic::load(&server, &who.app).await;
    html(&Overview {
        automation: words::automation(app.settings.automation),
        approval: words::approval(app.settings.approval),
        default_bundle: default.map(|d| d.to_hex()),
        fleet: fleet_view(&server, &who.app, default, &rollouts, traffic.as_ref()).await,
        silent_hours: fleet::SILENT_HOURS,
        traffic: traffic.as_ref().map(traffic_view),
        rollouts: rollout_views(&server, &who.app, &shown).await?,
        findings_open: at_most(findings.len(), 500),
        findings: acted.iter().chain(&findings).take(SHOWN).map(finding_view).collect(),
        counters: counters(&server, &who.app).await?,
        audit: audit
            .into_iter()
            .map(|a| AuditView {
                at: time(a.at),
                actor: a.actor,
                action: a.action,
                subject: a.subject,
                detail: json(&a.detail, 120),
            })
            .collect(),
        app: who.app.to_string(),
    })
}

/// A page of a list may be cut: then the number is only a lower bound.
fn at_most(n: usize, page: usize) -> String {
    if n >= page { format!("{n} or more") } else { n.to_string() }
}

fn finding_view(f: &FindingRow) -> FindingView {
    FindingView {
        kind: f.kind.as_str(),
        subject: subject(f),
        state: words::finding_state(f.state),
        class: words::finding_class(f.state),
        since: time(f.opened_at),
    }
}

/// Subject with its version, when it has one.
pub fn subject(f: &FindingRow) -> String {
    if f.version > 0 { format!("{} version {}", f.subject, f.version) } else { f.subject.clone() }
}

async fn rollout_views(server: &Server, app: &AppId, rows: &[RolloutRow]) -> Result<Vec<RolloutView>, Error> {
    let mut out = Vec::new();
    for row in rows {
        let newest = server.store.rollout_verdict_latest(app, &row.rollout_id, VerdictRow::WHOLE).await?;
        let report = newest.as_ref().map(report_of).transpose();
        let word = match &report {
            Ok(Some(r)) => r.word.clone(),
            Ok(None) if row.control.is_none() => "nothing to compare".into(),
            Ok(None) => "no report yet".into(),
            // one bad row must not hide the rest of the page
            Err(e) => {
                tracing::error!(rollout = %row.rollout_id, inside = e.inside, "the newest report cannot be read");
                "the report cannot be read: see the log".into()
            }
        };
        let report = report.ok().flatten();
        out.push(RolloutView {
            id: row.rollout_id.to_string(),
            state: words::rollout_state(row.state),
            class: row.state.as_str(),
            bundle: short(&row.treatment.to_hex()),
            since: time(row.state_since),
            word,
            verdict_class: report.as_ref().map_or("", |r| words::verdict_class(r.verdict)),
            reason: report.map(|r| r.reason).or_else(|| row.reason.clone()).unwrap_or_default(),
        });
    }
    Ok(out)
}

/// The fleet; `None` when the telemetry cannot be read, which must not hide the rest of the page.
async fn fleet_view(
    server: &Server,
    app: &AppId,
    default: Option<Digest>,
    rollouts: &[RolloutRow],
    traffic: Option<&traffic::Traffic>,
) -> Option<FleetView> {
    let rows = match server.lake.inventory(app, None).await {
        Ok(rows) => rows,
        Err(e) => {
            tracing::error!(code = e.code, inside = e.inside, "the inventory cannot be read");
            return None;
        }
    };
    let fleet = fleet::count(&rows, server.now());
    let mut bundles = Vec::new();
    for b in &fleet.bundles {
        let digest: Option<Digest> = b.bundle.as_deref().and_then(|t| t.parse().ok());
        let rejection = b.bundle.as_deref().and_then(|name| traffic?.rejection_rate(name));
        bundles.push(BundleView {
            name: b.bundle.as_deref().map_or_else(|| "none confirmed yet".into(), short),
            known: b.bundle.is_some(),
            role: role(digest, default, rollouts),
            devices: count(b.devices),
            share: percent(Some(b.devices as f64 / fleet.devices as f64)),
            not_reporting: count(b.not_reporting),
            rejection: percent(rejection),
        });
    }
    Some(FleetView {
        devices: count(fleet.devices),
        not_reporting: count(fleet.not_reporting),
        anonymous: fleet.anonymous,
        bundles,
    })
}

fn traffic_view(t: &traffic::Traffic) -> TrafficView {
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| NONE.into());
    TrafficView {
        rates: t
            .rates
            .iter()
            .take(SHOWN)
            .map(|r| RateView {
                template: or_none(&r.template_id),
                bundle: r.bundle.as_deref().map_or_else(|| NONE.into(), short),
                class: or_none(&r.device_class),
                answers: count(r.answers),
                rejected: count(r.rejected),
                share: percent(r.share()),
            })
            .collect(),
        cut: t.rates.len() > SHOWN,
        intake: t
            .intake
            .iter()
            .map(|i| IntakeView {
                what: i.disposition.replace('_', " "),
                kind: i.kind.clone(),
                reason: i.reason.as_deref().unwrap_or_default().replace('_', " "),
                items: count(i.items),
            })
            .collect(),
    }
}

fn role(bundle: Option<Digest>, default: Option<Digest>, rollouts: &[RolloutRow]) -> &'static str {
    match bundle {
        None => "",
        b if b == default => "for everybody",
        Some(b) if rollouts.iter().any(|r| r.treatment == b) => "new, in a rollout",
        Some(b) if rollouts.iter().any(|r| r.control == Some(b)) => "compared with",
        Some(_) => "older",
    }
}

async fn counters(server: &Server, app: &AppId) -> Result<Vec<(&'static str, String)>, Error> {
    let jobs = server.store.job_counts(Some(app)).await?;
    let of = |state: JobState| -> String {
        let n: i64 = jobs.iter().filter(|c| c.state == state).map(|c| c.count).sum();
        count(u64::try_from(n).unwrap_or(0))
    };
    let mails = server.store.mail_list(app, MAILS).await?;
    let mail = |state: MailState| mails.iter().filter(|m| m.state == state).count().to_string();
    Ok(vec![
        ("Jobs waiting", of(JobState::Queued)),
        ("Jobs running", of(JobState::Running)),
        ("Jobs given up", of(JobState::Dead)),
        ("Mails waiting", mail(MailState::Queued)),
        ("Mails given up", mail(MailState::Dead)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_list_is_only_a_lower_bound() {
        assert_eq!(at_most(3, 500), "3");
        assert_eq!(at_most(500, 500), "500 or more");
    }
}
