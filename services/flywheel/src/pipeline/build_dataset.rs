//! Turns accepted corrections into an immutable dataset snapshot, named by its digest, and queues a LoRA job. Runs
//! when enough new corrections are accepted; below that it says what is missing and does nothing.

use super::{app, evaluate, lora};
use crate::server::Server;
use chrono::{DateTime, Utc};
use flywheel_attribution::dataset::{Correction, DatasetPolicyV1, DatasetV1, EvalGuard, build};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::apps::AppSettings;
use flywheel_store::corrections::{CorrectionRow, CorrectionState};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, Digest, Error};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

pub const KIND: &str = "build_dataset";

/// When a dataset is built, per app (`dataset_trigger` in the settings).
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Trigger {
    /// New accepted corrections.
    min_corrections: usize,
}

impl Default for Trigger {
    fn default() -> Self {
        Self { min_corrections: 60 }
    }
}

/// Queues a look at the corrections of an app, one that begins after `tx`; one look at a time.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, _now: DateTime<Utc>) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1 })).dedup(app.to_string()).concurrency(format!("dataset:{app}"), 1);
    tx.job_enqueue_look(app, &job).await?;
    Ok(())
}

/// A key of the settings' free part, or its default.
///
/// # Errors
/// `Invalid` when the value does not have the expected form.
pub fn setting<T: serde::de::DeserializeOwned + Default>(settings: &AppSettings, key: &str) -> Result<T, Error> {
    match settings.extra.get(key) {
        None => Ok(T::default()),
        Some(v) => serde_json::from_value(v.clone())
            .map_err(|e| Error::invalid("bad_setting", format!("`{key}`: {e}"), "correct it with PUT /v1/settings")),
    }
}

/// The step.
///
/// # Errors
/// Of the object store and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let id = ctx.app();
    let settings = app(server, id).await?.settings;
    let trigger: Trigger = setting(&settings, "dataset_trigger")?;
    let policy: DatasetPolicyV1 = setting(&settings, "dataset_policy")?;
    // load
    let accepted = server.store.correction_list(id, Some(CorrectionState::Accepted), 10_000).await?;
    if accepted.len() < trigger.min_corrections {
        return Ok(
            json!({ "waiting": format!("{} of {} accepted corrections", accepted.len(), trigger.min_corrections) }),
        );
    }
    let mut votes = Vec::new();
    for row in &accepted {
        for vote in server.store.correction_vote_list(id, &row.correction_id).await? {
            votes.push(correction(row, &vote));
        }
    }
    // the same corrections in the same order make the same bytes
    votes.sort_by(|a, b| (&a.interaction_id, &a.person).cmp(&(&b.interaction_id, &b.person)));
    number_people(&mut votes);
    let guard = guard(server, id).await?;
    // decide
    let dataset = build(&policy, &votes, &guard)
        .map_err(|e| Error::invalid("dataset_refused", e.to_string(), "check `dataset_policy` in the settings"))?;
    // do
    let object = server.objects.put(dataset.jsonl.clone()).await?;
    // commit
    match commit(server, ctx, &accepted, &dataset, object).await {
        Ok(()) => {
            let (samples, dropped) = (dataset.samples.len(), dataset.dropped.len());
            Ok(json!({ "dataset": dataset.digest, "samples": samples, "dropped": dropped }))
        }
        Err(e) => {
            // a correction may have been erased meanwhile: its text must not stay in an object that nothing names
            if server.store.dataset_get(id, dataset.digest).await?.is_none() {
                server.objects.delete(object).await?;
            }
            Err(e)
        }
    }
}

async fn commit(
    server: &Server,
    ctx: &JobContext,
    accepted: &[CorrectionRow],
    dataset: &DatasetV1,
    object: Digest,
) -> Result<(), Error> {
    let id = ctx.app();
    let used: Vec<String> = used(accepted, dataset);
    let counts = json!({ "samples": dataset.samples.len(), "dropped": dataset.dropped, "corrections": accepted.len() });
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    tx.dataset_create(id, dataset.digest, &object.to_hex(), &counts).await?;
    tx.correction_mark_used(id, &used, dataset.digest).await?;
    lora::enqueue(&mut tx, id, dataset.digest).await?;
    let detail = json!({ "samples": dataset.samples.len(), "dropped": dataset.dropped.len() });
    tx.audit_append(id, "controller", "dataset.build", &dataset.digest.to_hex(), &detail).await?;
    tx.commit().await?;
    Ok(())
}

fn correction(row: &CorrectionRow, vote: &flywheel_store::corrections::VoteRow) -> Correction {
    Correction {
        interaction_id: row.interaction_id.to_string(),
        person: vote.annotator.clone(),
        trusted: vote.trusted,
        system: None,
        question: row.prompt.clone(),
        output: row.wrong_answer.clone(),
        corrected: Some(vote.answer.clone()),
        chunks: row.chunk_ids.iter().map(ToString::to_string).collect(),
        group: row.template_id.as_ref().map_or_else(String::new, ToString::to_string),
    }
}

/// A dataset goes to trainers, and its digest must not depend on this installation: people are numbered as they appear.
/// Who they are stays with the votes in the control database.
fn number_people(votes: &mut [Correction]) {
    let mut numbers = BTreeMap::new();
    for vote in votes {
        let next = numbers.len() + 1;
        let number = *numbers.entry(vote.person.clone()).or_insert(next);
        vote.person = format!("person-{number}");
    }
}

/// Nothing that an evaluation asks about may be trained on: neither its questions nor, whatever is asked, the chunks
/// that it asks about (the items' clusters; a cluster that is no chunk's id matches nothing).
async fn guard(server: &Server, id: &AppId) -> Result<EvalGuard, Error> {
    let mut guard = EvalGuard::default();
    for (_, set) in evaluate::sets(server, id).await? {
        for item in set.items {
            guard.chunks.insert(item.cluster);
            guard.questions.push(item.prompt);
        }
    }
    Ok(guard)
}

/// Corrections whose sample is in the dataset; the others stay for the next one.
fn used(accepted: &[CorrectionRow], dataset: &DatasetV1) -> Vec<String> {
    let kept: BTreeSet<&str> = dataset.samples.iter().map(|s| s.interaction_id.as_str()).collect();
    accepted.iter().filter(|c| kept.contains(c.interaction_id.as_str())).map(|c| c.correction_id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_numbered_as_they_appear() {
        let vote = |interaction: &str, person: &str| Correction {
            interaction_id: interaction.into(),
            person: person.into(),
            trusted: false,
            system: None,
            question: "?".into(),
            output: "1".into(),
            corrected: Some("2".into()),
            chunks: Vec::new(),
            group: String::new(),
        };
        let mut votes = [vote("a", "token-z"), vote("a", "token-b"), vote("b", "token-b"), vote("c", "token-q")];
        number_people(&mut votes);
        let people: Vec<&str> = votes.iter().map(|v| v.person.as_str()).collect();
        assert_eq!(people, ["person-1", "person-2", "person-2", "person-3"]);
    }
}
