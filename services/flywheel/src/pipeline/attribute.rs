//! Attribution: reads the interactions that are newly due, asks the pure crate which chunk or template causes
//! failures, stores findings and queues the transitions that policy allows. Before that it brings the derived table of
//! labelled interactions up to date.

mod cursor;

use super::{app, freeze};
use crate::server::Server;
use chrono::{DateTime, TimeDelta, Utc};
use cursor::Cursor;
use flywheel_attribution::culprit::{
    AttributionPolicyV1, AttributionState, ChunkContext, ChunkInfo, Proposal, StepReport, SubjectKind, SuspectReport,
    Transition, step,
};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::apps::AppSettings;
use flywheel_store::findings::{FindingKind, NewFinding};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, Automation, Digest, Error, FindingId};
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub const KIND: &str = "attribute";

/// Hours that an interaction waits for its label before it counts as not rejected.
pub const LABEL_DELAY_HOURS: i64 = 12;

/// Queues a run for the business time `now`.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, now: DateTime<Utc>) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "now": now }))
        .dedup(format!("{app}:{}", now.timestamp()))
        .concurrency(turn(app), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// Key of the steps of which only one may run for an app: they read the tables by version.
pub fn turn(app: &AppId) -> String {
    format!("attribute:{app}")
}

/// Derives what can be derived by now, so that no step needs a version of the tables from before this call.
///
/// # Errors
/// Of the lake and the database.
pub async fn catch_up(server: &Server, ctx: &JobContext) -> Result<(), Error> {
    let versions = server.lake.flush_and_watermark().await?;
    cursor::outcomes(server, ctx, &versions).await.map(|_| ())
}

#[derive(serde::Deserialize)]
struct Payload {
    /// Business time of the tick; of the run, when a schedule or a person started it.
    now: Option<DateTime<Utc>>,
}

/// The step.
///
/// # Errors
/// Of the lake, the object store and the database; `Invalid` for a policy that cannot work.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let id = ctx.app();
    let now = super::payload::<Option<Payload>>(ctx)?.and_then(|p| p.now).unwrap_or_else(|| server.now());
    let settings = app(server, id).await?.settings;
    let policy = policy(&settings)?;
    let versions = server.lake.flush_and_watermark().await?;
    let outcomes = cursor::outcomes(server, ctx, &versions).await?;
    // load
    let cursor = Cursor::load(server, id).await?;
    let delay = TimeDelta::hours(LABEL_DELAY_HOURS);
    let (from, until) = (cursor.due(), now - delay);
    if until <= from {
        return Ok(json!({ "rows": 0, "reason": "nothing is due", "outcomes": outcomes }));
    }
    let seen = cursor.seen(&versions)?;
    let (names, rows) = server.lake.interaction_batch_after(id, seen, from, until, delay, &versions).await?;
    let stored = server.store.attribution_state_get(id).await?;
    let (mut state, number) = load_state(server, stored).await?;
    let context = context(server, id, &settings, now).await?;
    // decide
    let report = step(&policy, &mut state, &names, &rows, &context)
        .map_err(|e| Error::invalid("attribution_refused", e.to_string(), "check the app's attribution policy"))?;
    // do
    let blob = serde_json::to_vec(&state).map_err(Error::internal)?;
    let blob = server.objects.put(blob).await?;
    // commit
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    tx.attribution_state_set(id, number, blob).await?;
    cursor.advance(&mut tx, id, &versions, until).await?;
    store_findings(&mut tx, id, &report).await?;
    let detail = summary(&report, outcomes);
    tx.audit_append(id, "controller", "attribution.step", &until.to_rfc3339(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}

fn policy(settings: &AppSettings) -> Result<AttributionPolicyV1, Error> {
    let mut policy: AttributionPolicyV1 = match settings.extra.get("attribution_policy") {
        Some(v) => serde_json::from_value(v.clone()).map_err(|e| {
            Error::invalid(
                "bad_attribution_policy",
                e.to_string(),
                "correct `attribution_policy` in the app's settings",
            )
        })?,
        None => AttributionPolicyV1::default(),
    };
    policy.freeze.kill_switch |= settings.freeze_kill_switch;
    policy.count_anonymous |= settings.count_anonymous;
    Ok(policy)
}

async fn load_state(
    server: &Server,
    stored: Option<flywheel_store::attribution_state::AttributionState>,
) -> Result<(AttributionState, i64), Error> {
    match stored {
        None => Ok((AttributionState::default(), 0)),
        Some(s) => {
            let bytes = server.objects.get(s.blob).await?;
            let state = serde_json::from_slice(&bytes)
                .map_err(|e| Error::internal(format!("attribution state {}: {e}", s.blob)))?;
            Ok((state, s.step))
        }
    }
}

fn hour(at: DateTime<Utc>) -> u32 {
    u32::try_from(at.timestamp() / 3600).unwrap_or(0)
}

async fn context(
    server: &Server,
    id: &AppId,
    settings: &AppSettings,
    now: DateTime<Utc>,
) -> Result<ChunkContext, Error> {
    let mut chunks = BTreeMap::new();
    let mut after = None;
    loop {
        let page = server.store.chunk_list(id, None, after.as_ref(), 1000).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.chunk_id.clone());
        for c in page {
            let since = hour(c.state_since);
            let info = ChunkInfo {
                state: c.state,
                since_hour: since,
                tags: c.tags,
                collection: Some(c.collection).filter(|c| !c.is_empty()),
                only_source: false,
                coverage_loss: None,
                canary_epoch: since,
            };
            chunks.insert(format!("{}@{}", c.chunk_id, c.version), info);
        }
    }
    Ok(ChunkContext { now_hour: hour(now), automation: settings.automation, precision: Default::default(), chunks })
}

/// A derived id, so that a repeated step finds the same finding.
fn finding_id(app: &AppId, kind: SubjectKind, name: &str) -> Result<FindingId, Error> {
    let digest = Digest::of(format!("{app}\0{kind:?}\0{name}").as_bytes()).to_hex();
    FindingId::new(format!("f-{}", &digest[..16])).map_err(Error::internal)
}

async fn store_findings(tx: &mut Tx, id: &AppId, report: &StepReport) -> Result<(), Error> {
    for p in &report.proposals {
        let suspect = report.suspects.iter().find(|s| s.kind == p.kind && s.name == p.name);
        let finding = finding_id(id, p.kind, &p.name)?;
        let (subject, version) = split(&p.name);
        let new = NewFinding {
            finding_id: finding.clone(),
            kind: match p.kind {
                SubjectKind::Chunk => FindingKind::Chunk,
                SubjectKind::Template => FindingKind::Template,
            },
            subject,
            version,
            evidence: evidence(p, suspect),
        };
        // clearing an old suspicion is no finding of its own
        if !matches!(p.transition, Transition::ClearSuspect) {
            tx.finding_upsert(id, &new).await?;
        }
        if p.kind == SubjectKind::Chunk && p.automatic {
            freeze::enqueue(tx, id, p, &finding).await?;
        }
    }
    Ok(())
}

fn evidence(p: &Proposal, suspect: Option<&SuspectReport>) -> Value {
    json!({ "v": 1, "proposal": p, "suspect": suspect })
}

/// `chunk@version` → chunk and version; a template has version 0.
pub fn split(name: &str) -> (String, i64) {
    match name.rsplit_once('@').and_then(|(id, v)| Some((id, v.parse().ok()?))) {
        Some((id, version)) => (id.to_owned(), version),
        None => (name.to_owned(), 0),
    }
}

fn summary(report: &StepReport, outcomes: usize) -> Value {
    json!({
        "outcomes": outcomes,
        "rows": report.rows_used,
        "anonymous_rows": report.rows_anonymous,
        "base_rate": report.base_rate,
        "communities": report.communities,
        "suspects": report.suspects.iter().filter(|s| s.significant).map(|s| &s.name).collect::<Vec<_>>(),
        "proposals": report.proposals,
    })
}

/// Whether automation lets the controller act at all.
pub fn acts(settings: &AppSettings) -> bool {
    settings.automation == Automation::Act
}
