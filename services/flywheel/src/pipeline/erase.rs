//! Erasure of one person: tables, log, files, corrections and datasets, then a receipt of what was done and what is out of
//! reach. Everything that was received before the step began is in scope. It shares its turn with attribution, which would
//! otherwise derive outcomes of interactions that are on their way out; intake, commits and compaction go on.

mod datasets;
mod receipt;

use super::{attribute, build_dataset};
use crate::server::Server;
use flywheel_jobs::JobContext;
use flywheel_lake::{Erasure, Removed, Subjects};
use flywheel_store::Tx;
use flywheel_store::erasures::{ErasureRow, ErasureState, HoldRow, SubjectKind};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, Error, ErrorKind, JobState};
use receipt::Progress;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub const KIND: &str = "erase";

/// Queues the step for one erasure.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, erasure: &str) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "erasure": erasure }))
        .dedup(format!("{app}:{erasure}"))
        .concurrency(attribute::turn(app), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

#[derive(Deserialize)]
struct Payload {
    erasure: String,
}

/// The step.
///
/// # Errors
/// Of the lake, the object store and the database; each part can be repeated.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let app = ctx.app();
    // load
    let id = super::payload::<Payload>(ctx)?.erasure;
    let row = server.store.erasure_get(app, &id).await?;
    let row = row.ok_or_else(|| Error::not_found("erasure_not_found", format!("there is no erasure `{id}`")))?;
    let Some(subject) = row.subject.clone() else { return Ok(row.receipt.unwrap_or_default()) };
    let holds = server.store.hold_list(app).await?;
    let mut progress = Progress::of(&row)?;
    progress.attempts += 1;
    server.lake.flush().await?;
    // decide
    let mut erasure =
        Erasure { who: subjects([(row.subject_kind, subject.clone())]), held: held(&holds), ..Erasure::default() };
    erasure.interactions = server.lake.interactions_of(app, &erasure.who, &erasure.held).await?;
    progress.interactions += erasure.interactions.len() as u64;
    // do: what is derived first, so that a crash leaves the way to it
    erase_corrections(server, ctx, &row, &erasure, &mut progress).await?;
    datasets::replace(server, ctx, &erasure.interactions, &mut progress).await?;
    erase_rows(server, ctx, &erasure, &mut progress).await?;
    // commit
    let names = if progress.held_rows() > 0 { holds.iter().map(|h| h.name.clone()).collect() } else { Vec::new() };
    let state = if names.is_empty() { ErasureState::Done } else { ErasureState::Held };
    let receipt = receipt::write(&row, state, &progress, &names, server.now());
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    tx.erasure_finish(app, &id, state, &receipt).await?;
    let detail = json!({ "state": state, "subject_digest": row.subject_digest, "receipt_digest": receipt["digest"] });
    tx.audit_append(app, "controller", "erasure.finish", &id, &detail).await?;
    tx.commit().await?;
    Ok(receipt)
}

fn subjects(of: impl IntoIterator<Item = (SubjectKind, String)>) -> Subjects {
    let mut out = Subjects::default();
    for (kind, subject) in of {
        match kind {
            SubjectKind::UserKey => out.users.insert(subject),
            SubjectKind::Install => out.installs.insert(subject),
        };
    }
    out
}

/// Whose records stay, whatever retention and erasures say.
pub fn held(holds: &[HoldRow]) -> Subjects {
    subjects(holds.iter().map(|h| (h.subject_kind, h.subject.clone())))
}

/// Deletes corrections in the control database. A dataset that is being built may have read them: it is waited for, and those
/// that begin later do not find them.
async fn erase_corrections(
    server: &Server,
    ctx: &JobContext,
    row: &ErasureRow,
    erasure: &Erasure,
    progress: &mut Progress,
) -> Result<(), Error> {
    let app = ctx.app();
    let install = erasure.who.installs.iter().find(|i| !erasure.held.installs.contains(*i));
    let ids: Vec<String> = erasure.interactions.iter().cloned().collect();
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    progress.corrections += tx.correction_erase(app, install.map(String::as_str), &ids).await?;
    tx.erasure_progress(app, &row.erasure_id, &progress.to_json()?).await?;
    tx.commit().await?;
    let counts = server.store.job_counts(Some(app)).await?;
    if counts.iter().any(|c| c.kind == build_dataset::KIND && c.state == JobState::Running && c.count > 0) {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "dataset_is_built",
            "a dataset that may hold what is erased is being built",
            "nothing: the erasure is tried again",
        ));
    }
    Ok(())
}

/// Tables, log and files.
async fn erase_rows(
    server: &Server,
    ctx: &JobContext,
    erasure: &Erasure,
    progress: &mut Progress,
) -> Result<(), Error> {
    let app = ctx.app();
    let removed: BTreeMap<&str, Removed> = server.lake.erase(app, erasure).await?;
    progress.add(&removed);
    progress.log_segments += server.lake.purge_log().await? as u64;
    let files = server.lake.superseded_files(app, server.store.lease_now()).await?;
    // steps read by version; from here on they need none from before the erasure
    attribute::catch_up(server, ctx).await?;
    progress.files_deleted += server.lake.delete_superseded(files).await? as u64;
    let left = server.lake.interactions_of(app, &erasure.who, &erasure.held).await?;
    if left.intersection(&erasure.interactions).next().is_some() {
        return Err(Error::internal("erased interactions are still in the tables"));
    }
    Ok(())
}
