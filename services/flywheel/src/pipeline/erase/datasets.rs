//! Dataset snapshots without the samples of erased interactions. A snapshot is immutable: what is left becomes a new one, the
//! old one a tombstone without bytes.

use super::receipt::{Progress, Replaced};
use crate::server::Server;
use flywheel_attribution::dataset::DatasetV1;
use flywheel_jobs::JobContext;
use flywheel_store::candidates::CandidateRow;
use flywheel_store::datasets::DatasetRow;
use flywheel_types::{Digest, Error};
use serde_json::json;
use std::collections::HashSet;

/// Snapshots and candidates looked at; an app makes one every few days.
const LIMIT: u32 = 10_000;
/// What a tombstone says.
const REASON: &str = "erasure";

/// Replaces every live snapshot that holds a sample of these interactions.
///
/// # Errors
/// Of the object store and the database.
pub async fn replace(
    server: &Server,
    ctx: &JobContext,
    interactions: &HashSet<String>,
    progress: &mut Progress,
) -> Result<(), Error> {
    let app = ctx.app();
    for row in server.store.dataset_list(app, LIMIT).await? {
        let object: Digest = row.object_path.parse().map_err(Error::internal)?;
        if row.tombstone.as_deref() == Some(REASON) {
            // a crash may have come between the tombstone and this
            server.objects.delete(object).await?;
        } else if row.tombstone_at.is_none() {
            let bytes = server.objects.get(object).await?;
            let Some((kept, erased)) = without(&bytes, interactions, &row)? else { continue };
            let replaced = tombstone(server, ctx, &row, kept, erased).await?;
            progress.datasets.push(replaced);
            server.objects.delete(object).await?;
        }
    }
    let erased: HashSet<Digest> = progress.datasets.iter().map(|d| d.erased).collect();
    let trained = |c: &CandidateRow| c.dataset.is_some_and(|d| erased.contains(&d));
    let candidates = server.store.candidate_list(app, None, LIMIT).await?;
    progress.models = candidates.iter().filter(|c| trained(c)).map(|c| c.candidate_id.to_string()).collect();
    Ok(())
}

/// The lines that stay and how many do not; `None` when all stay.
fn without(bytes: &[u8], interactions: &HashSet<String>, row: &DatasetRow) -> Result<Option<(Vec<u8>, u64)>, Error> {
    let samples = DatasetV1::read(bytes).map_err(|e| Error::internal(format!("dataset {}: {e}", row.digest)))?;
    let lines = bytes.split_inclusive(|b| *b == b'\n').filter(|l| l.iter().any(|b| *b != b'\n'));
    let (mut kept, mut erased) = (Vec::new(), 0);
    for (line, sample) in lines.zip(&samples) {
        if interactions.contains(&sample.interaction_id) {
            erased += 1;
        } else {
            kept.extend_from_slice(line);
        }
    }
    Ok((erased > 0).then_some((kept, erased)))
}

async fn tombstone(
    server: &Server,
    ctx: &JobContext,
    row: &DatasetRow,
    kept: Vec<u8>,
    samples: u64,
) -> Result<Replaced, Error> {
    let app = ctx.app();
    let successor = if kept.is_empty() { None } else { Some(server.objects.put(kept).await?) };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::super::lost)?;
    if let Some(new) = successor {
        let left = row.counts["samples"].as_u64().map(|n| n.saturating_sub(samples));
        let counts = json!({ "samples": left, "without": row.digest, "erased": samples });
        tx.dataset_create(app, new, &new.to_hex(), &counts).await?;
        tx.correction_dataset_move(app, row.digest, new).await?;
    }
    tx.dataset_tombstone(app, row.digest, REASON, successor).await?;
    let detail = json!({ "successor": successor, "samples": samples });
    tx.audit_append(app, "controller", "dataset.erase", &row.digest.to_hex(), &detail).await?;
    tx.commit().await?;
    Ok(Replaced { erased: row.digest, successor, samples })
}
