//! The offline gate: candidate and incumbent answer the same held-out questions, the pure crate judges. A passed
//! candidate goes on to publication; a failed one waits for a person.

use super::publish;
use crate::models::{Model, contains_value};
use crate::server::Server;
use flywheel_experiment::offline::{
    CandidateChange, IdentityV1, NumericsV1, OfflineInputV1, OfflineReportV1, OfflineSpecV1, PairedItemV1,
    evaluate_offline,
};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::candidates::{CandidateRow, CandidateSource};
use flywheel_store::evaluations::NewEvaluation;
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, CandidateId, CandidateState, Digest, Error, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub const KIND: &str = "evaluate";

/// The set that decides; its items must occur in no training sample.
pub const HELDOUT: &str = "heldout";
/// Sets that are read, by name. All but the first are reported only.
pub const SETS: &[&str] = &[HELDOUT, "forgetting"];
/// Longest answer, tokens.
const ANSWER_TOKENS: usize = 32;

/// One question with the value that a right answer holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EvalItem {
    pub id: String,
    /// The user message.
    pub prompt: String,
    pub expect: String,
    /// Items of one cluster stand and fall together (the chunk they ask about).
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

/// The step.
///
/// # Errors
/// Of the object store, the model and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, candidate) = (ctx.app(), super::payload::<Payload>(ctx)?.candidate);
    // load
    let row = server
        .store
        .candidate_get(id, &candidate)
        .await?
        .ok_or_else(|| Error::not_found("candidate_not_found", format!("there is no candidate `{candidate}`")))?;
    if !matches!(row.state, CandidateState::Registered | CandidateState::Evaluating) {
        return Ok(json!({ "skipped": format!("the candidate is {}", row.state) }));
    }
    if row.state == CandidateState::Registered {
        let mut tx = server.begin().await?;
        ctx.fence(&mut tx).await.map_err(super::lost)?;
        tx.candidate_state_set(id, &candidate, row.state, CandidateState::Evaluating, "evaluation started").await?;
        tx.commit().await?;
    }
    let incumbent = incumbent(server, id).await?;
    let sets = sets(server, id).await?;
    // do
    let work = Work {
        candidate: server.objects.file(row.artefact),
        incumbent: incumbent.map(|d| server.objects.file(d)),
        sets,
    };
    let measured = tokio::task::spawn_blocking(move || measure(&work)).await.map_err(Error::internal)??;
    // decide
    let spec = OfflineSpecV1::default();
    let input = input(&row, &measured, incumbent.is_some());
    let report = evaluate_offline(&spec, &input)
        .map_err(|e| Error::invalid("offline_gate_refused", e.to_string(), "check the evaluation sets"))?;
    let verdict = if incumbent.is_none() { first_verdict(&measured) } else { report.verdict };
    // commit
    commit(server, ctx, &row, verdict, &spec, &report, &measured).await
}

/// Artefact of the last complete release.
async fn incumbent(server: &Server, id: &AppId) -> Result<Option<Digest>, Error> {
    let Some(release) = server.store.release_last_complete(id).await? else { return Ok(None) };
    let Some(candidate) = release.candidate_id else { return Ok(None) };
    Ok(server.store.candidate_get(id, &candidate).await?.map(|c| c.artefact))
}

/// The first model of an app has nothing to be compared with: it must load and answer.
fn first_verdict(m: &Measured) -> Verdict {
    if m.empty_outputs == 0 { Verdict::Pass } else { Verdict::Fail }
}

struct Work {
    candidate: PathBuf,
    incumbent: Option<PathBuf>,
    sets: BTreeMap<String, EvalSet>,
}

/// What both models did.
#[derive(Debug, Default, Serialize)]
struct Measured {
    /// Set → (cluster, incumbent right, candidate right).
    items: BTreeMap<String, Vec<(String, bool, bool)>>,
    empty_outputs: u64,
    tokenizer_equal: bool,
    template_equal: bool,
}

/// One model at a time in memory. Blocking.
fn measure(work: &Work) -> Result<Measured, Error> {
    let mut out = Measured { tokenizer_equal: true, template_equal: true, ..Measured::default() };
    let (candidate_answers, identity) = answers(&work.candidate, &work.sets)?;
    let incumbent_answers = match &work.incumbent {
        None => None,
        Some(file) => {
            let (a, other) = answers(file, &work.sets)?;
            out.tokenizer_equal = other.0 == identity.0;
            out.template_equal = other.1 == identity.1;
            Some(a)
        }
    };
    for (name, set) in &work.sets {
        let mine = &candidate_answers[name];
        out.empty_outputs += mine.iter().filter(|a| a.is_empty()).count() as u64;
        let rows = set.items.iter().enumerate().map(|(i, item)| {
            let right = |a: &[String]| contains_value(&a[i], &item.expect);
            let before = incumbent_answers.as_ref().is_some_and(|a| right(&a[name]));
            (item.cluster.clone(), before, right(mine))
        });
        out.items.insert(name.clone(), rows.collect());
    }
    Ok(out)
}

type Answers = BTreeMap<String, Vec<String>>;

/// Answers of one model to all sets, and digests of what makes its tokens: vocabulary and template.
fn answers(file: &std::path::Path, sets: &BTreeMap<String, EvalSet>) -> Result<(Answers, (u64, String)), Error> {
    let model = Model::open(file)?;
    let mut out = BTreeMap::new();
    for (name, set) in sets {
        let prompts: Vec<&str> = set.items.iter().map(|i| i.prompt.as_str()).collect();
        out.insert(name.clone(), model.answer(&prompts, ANSWER_TOKENS)?);
    }
    let identity = (model.tokenizer.vocab_size() as u64, format!("{:?}", model.template));
    Ok((out, identity))
}

fn input(row: &CandidateRow, m: &Measured, has_incumbent: bool) -> OfflineInputV1 {
    let change = if row.dataset.is_some() || row.source == CandidateSource::External {
        CandidateChange::Tuned
    } else {
        CandidateChange::Requantized
    };
    let mut input = OfflineInputV1::new(change);
    input.identity = Some(IdentityV1 {
        tokenizer_equal: m.tokenizer_equal,
        vocabulary_equal: m.tokenizer_equal,
        chat_template_equal: m.template_equal,
        eval_set_equal: true,
    });
    input.numerics = Some(NumericsV1 { non_finite_logits: 0, empty_outputs: m.empty_outputs });
    input.size_bytes = Some(row.size_bytes);
    if has_incumbent {
        input.items = m.items.get(HELDOUT).map(|v| v.as_slice()).unwrap_or_default().iter().map(paired).collect();
    }
    input
}

fn paired((cluster, before, after): &(String, bool, bool)) -> PairedItemV1 {
    PairedItemV1 { cluster: cluster.clone(), incumbent_correct: *before, candidate_correct: *after }
}

async fn commit(
    server: &Server,
    ctx: &JobContext,
    row: &CandidateRow,
    verdict: Verdict,
    spec: &OfflineSpecV1,
    report: &OfflineReportV1,
    measured: &Measured,
) -> Result<Value, Error> {
    let (id, candidate) = (ctx.app(), &row.candidate_id);
    let sets: BTreeMap<&String, Value> = measured
        .items
        .iter()
        .map(|(name, rows)| {
            let (before, after) = (rows.iter().filter(|r| r.1).count(), rows.iter().filter(|r| r.2).count());
            (name, json!({ "items": rows.len(), "incumbent_correct": before, "candidate_correct": after }))
        })
        .collect();
    let whole = json!({ "v": 1, "gate": report, "sets": sets });
    let new = NewEvaluation {
        evaluation_id: format!("e-{}-{}", ctx.job().job_id, ctx.job().attempt),
        candidate_id: candidate.clone(),
        verdict,
        spec: serde_json::to_value(spec).map_err(Error::internal)?,
        report: whole.clone(),
        source: CandidateSource::Job,
        job: Some((ctx.job().job_id.clone(), ctx.job().attempt)),
    };
    let to = if verdict == Verdict::Pass { CandidateState::GatePassed } else { CandidateState::GateFailed };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    tx.evaluation_create(id, &new).await?;
    tx.candidate_state_set(id, candidate, CandidateState::Evaluating, to, &report.reason).await?;
    if verdict == Verdict::Pass {
        publish::enqueue(&mut tx, id, candidate).await?;
    }
    let detail = json!({ "verdict": verdict, "reason": report.reason, "sets": sets });
    tx.audit_append(id, "controller", "candidate.evaluate", candidate.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}
