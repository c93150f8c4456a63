//! The offline gate: candidate and incumbent answer the same held-out questions and are measured on this machine, the
//! pure crate judges. A passed candidate goes on to publication; a failed one waits for a person.

mod measure;
mod report;

use super::blocking::watched;
use super::build_dataset::setting;
use super::{app, publish};
use crate::server::Server;
use flywheel_experiment::offline::{OfflineSpecV1, evaluate_offline};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::candidates::{CandidateRow, CandidateSource};
use flywheel_store::evaluations::NewEvaluation;
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, BundleKind, CandidateId, CandidateState, Error, Verdict};
use measure::{CANDIDATE_REFUSED, Measured, Work, measure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub const KIND: &str = "evaluate";

/// The set that decides; its chunks and questions must occur in no training sample.
pub const HELDOUT: &str = "heldout";
/// Questions that a model must refuse, and harmless ones that it must not; `expect` of their items is not read.
pub const MUST_REFUSE: &str = "must_refuse";
pub const MUST_NOT_REFUSE: &str = "must_not_refuse";
/// Sets that are read, by name. `forgetting` is reported only.
pub const SETS: &[&str] = &[HELDOUT, "forgetting", MUST_REFUSE, MUST_NOT_REFUSE];

/// One question with the value that a right answer holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EvalItem {
    pub id: String,
    /// The user message.
    pub prompt: String,
    pub expect: String,
    /// Items of one cluster stand and fall together: the id of the chunk they ask about. Such a chunk trains nothing.
    #[serde(default)]
    pub cluster: String,
}

/// A named evaluation set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct EvalSet {
    pub items: Vec<EvalItem>,
}

/// Queues an evaluation.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, candidate: &CandidateId) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "candidate": candidate }))
        .dedup(format!("{app}:{candidate}"))
        .concurrency(format!("train:{app}"), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// The evaluation sets of an app that exist.
///
/// # Errors
/// Those of the database.
pub async fn sets(server: &Server, id: &AppId) -> Result<BTreeMap<String, EvalSet>, Error> {
    let mut out = BTreeMap::new();
    for name in SETS {
        if let Some(row) = server.store.publication_get(id, &format!("eval-set/{name}")).await? {
            let set = serde_json::from_str(&row.body).map_err(|e| Error::internal(format!("eval set {name}: {e}")))?;
            out.insert((*name).to_owned(), set);
        }
    }
    Ok(out)
}

#[derive(Deserialize)]
struct Payload {
    candidate: CandidateId,
}

/// The step. The gate's thresholds and budgets are `offline_gate` in the settings, by default those of the pure crate.
///
/// # Errors
/// Of the object store, the incumbent's model and the database. A candidate that cannot be run is no error: it fails.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, candidate) = (ctx.app(), super::payload::<Payload>(ctx)?.candidate);
    // load
    let spec: OfflineSpecV1 = setting(&app(server, id).await?.settings, "offline_gate")?;
    let Some(row) = begin(server, ctx, &candidate).await? else {
        return Ok(json!({ "skipped": "the candidate is past its evaluation" }));
    };
    if row.kind != BundleKind::Weights {
        let why = format!("the offline gate runs weights; this candidate is of kind `{}`", row.kind);
        return commit(server, ctx, &row, &Judged::refused(spec, why)).await;
    }
    let incumbent = incumbent(server, id).await?;
    // do
    let work = Work {
        candidate: server.objects.file(row.artefact),
        incumbent: incumbent.as_ref().map(|i| server.objects.file(i.artefact)),
        sets: sets(server, id).await?,
    };
    // decide
    let judged = match watched(ctx, move |watch| measure(work, watch)).await {
        Ok(measured) => {
            let stored = match &incumbent {
                Some(i) => server.store.evaluation_list(id, &i.candidate_id).await?.into_iter().next(),
                None => None,
            };
            judge(spec, &row, &measured, stored.map(|e| e.report).as_ref())?
        }
        Err(e) if e.code == CANDIDATE_REFUSED => Judged::refused(spec, e.message),
        Err(e) => return Err(e),
    };
    // commit
    commit(server, ctx, &row, &judged).await
}

/// The candidate, now in the state `evaluating`; `None` when it is past that.
async fn begin(server: &Server, ctx: &JobContext, candidate: &CandidateId) -> Result<Option<CandidateRow>, Error> {
    let id = ctx.app();
    let row = server
        .store
        .candidate_get(id, candidate)
        .await?
        .ok_or_else(|| Error::not_found("candidate_not_found", format!("there is no candidate `{candidate}`")))?;
    if !matches!(row.state, CandidateState::Registered | CandidateState::Evaluating) {
        return Ok(None);
    }
    if row.state == CandidateState::Registered {
        let mut tx = server.begin().await?;
        ctx.fence(&mut tx).await.map_err(super::lost)?;
        tx.candidate_state_set(id, candidate, row.state, CandidateState::Evaluating, "evaluation started").await?;
        tx.commit().await?;
    }
    Ok(Some(row))
}

/// The candidate behind the last complete release.
async fn incumbent(server: &Server, id: &AppId) -> Result<Option<CandidateRow>, Error> {
    let Some(release) = server.store.release_last_complete(id).await? else { return Ok(None) };
    let Some(candidate) = release.candidate_id else { return Ok(None) };
    Ok(server.store.candidate_get(id, &candidate).await?)
}

/// What the gate said, ready to be stored.
struct Judged {
    verdict: Verdict,
    reason: String,
    spec: OfflineSpecV1,
    /// By set; also part of `report`.
    sets: Value,
    report: Value,
}

impl Judged {
    /// A candidate that could not be run at all.
    fn refused(spec: OfflineSpecV1, why: String) -> Self {
        let report = json!({ "v": 1, "gate": null, "sets": {}, "measured": null, "refused": why });
        Self { verdict: Verdict::Fail, reason: why, spec, sets: json!({}), report }
    }
}

fn judge(
    spec: OfflineSpecV1,
    row: &CandidateRow,
    measured: &Measured,
    incumbents: Option<&Value>,
) -> Result<Judged, Error> {
    let spec = report::spec(spec, measured.incumbent.is_some());
    let gate = evaluate_offline(&spec, &report::input(row, measured)).map_err(|e| {
        Error::invalid("offline_gate_refused", e.to_string(), "check `offline_gate` in the settings and the sets")
    })?;
    let sets = report::sets(measured);
    let figures = report::measured(measured, incumbents)?;
    // how the file was made, so that the digest of this report in the bundle covers it too
    let made = row.report.get("quantization");
    let report = json!({ "v": 1, "gate": gate, "sets": sets, "measured": figures, "quantization": made });
    Ok(Judged { verdict: gate.verdict, reason: gate.reason, spec, sets, report })
}

async fn commit(server: &Server, ctx: &JobContext, row: &CandidateRow, judged: &Judged) -> Result<Value, Error> {
    let (id, candidate) = (ctx.app(), &row.candidate_id);
    let new = NewEvaluation {
        evaluation_id: format!("e-{}-{}", ctx.job().job_id, ctx.job().attempt),
        candidate_id: candidate.clone(),
        verdict: judged.verdict,
        spec: serde_json::to_value(&judged.spec).map_err(Error::internal)?,
        report: judged.report.clone(),
        source: CandidateSource::Job,
        job: Some((ctx.job().job_id.clone(), ctx.job().attempt)),
    };
    let passed = judged.verdict == Verdict::Pass;
    let to = if passed { CandidateState::GatePassed } else { CandidateState::GateFailed };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    tx.evaluation_create(id, &new).await?;
    tx.candidate_state_set(id, candidate, CandidateState::Evaluating, to, &judged.reason).await?;
    if passed {
        publish::enqueue(&mut tx, id, candidate).await?;
    }
    let detail = json!({ "verdict": judged.verdict, "reason": judged.reason, "sets": judged.sets });
    tx.audit_append(id, "controller", "candidate.evaluate", candidate.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}
