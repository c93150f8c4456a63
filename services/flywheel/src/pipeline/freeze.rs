//! Moves one chunk version along its states, as attribution proposed and policy allowed. A stale proposal (the
//! chunk has another version or state by now) changes nothing and says so.

use super::{attribute, notify};
use crate::server::Server;
use chrono::TimeDelta;
use flywheel_attribution::culprit::{Proposal, Transition};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::chunks::{ChunkMove, ChunkRow};
use flywheel_store::findings::{FindingRow, FindingState};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, ChunkId, ChunkState, Error, FindingId};
use serde_json::{Value, json};

pub const KIND: &str = "freeze";

/// Share of devices that see a re-embedded version first, ppm.
pub const CANARY_ACTIVE_PPM: u32 = 100_000;
/// Days until a freeze must prove itself again.
const FREEZE_TTL_DAYS: i64 = 14;

#[derive(serde::Serialize, serde::Deserialize)]
struct Payload {
    proposal: Proposal,
    finding: FindingId,
}

/// Queues the transition of a proposal, in the transaction that stored the finding.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, p: &Proposal, finding: &FindingId) -> Result<(), Error> {
    let payload = json!({ "v": 1, "proposal": p, "finding": finding });
    let job = NewJob::new(KIND, payload)
        .dedup(format!("{app}:{}:{}", p.name, serde_json::to_string(&p.transition).map_err(Error::internal)?))
        .concurrency(format!("freeze:{app}"), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// The step.
///
/// # Errors
/// Those of the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let Payload { proposal, finding } = super::payload(ctx)?;
    let (chunk, version) = attribute::split(&proposal.name);
    let chunk = ChunkId::new(chunk).map_err(|e| Error::invalid("bad_chunk_id", e.to_string(), "check the proposal"))?;
    let Some(to) = proposal.transition.target() else {
        return Ok(json!({ "skipped": "the proposal moves nothing" }));
    };
    let found = server.store.finding_get(ctx.app(), &finding).await?;
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let row = tx.chunk_get(ctx.app(), &chunk).await?.filter(|c| c.version == version);
    let Some(row) = row else {
        return Ok(json!({ "skipped": "the chunk has another version by now" }));
    };
    if !row.state.can_become(to) {
        return Ok(json!({ "skipped": format!("the chunk is {} by now", row.state) }));
    }
    let change = change(server, &row, to, &proposal.transition, &finding);
    let index_version = tx.chunk_state_set(ctx.app(), &chunk, version, &change).await?;
    follow_finding(&mut tx, ctx.app(), found.as_ref(), &proposal).await?;
    if matches!(to, ChunkState::CanaryFrozen | ChunkState::Frozen) {
        notify::enqueue_chunk(&mut tx, server, ctx.app(), &proposal).await?;
    }
    let detail =
        json!({ "from": row.state, "to": to, "version": version, "reason": proposal.reason, "finding": finding });
    tx.audit_append(ctx.app(), "controller", "chunk.state", chunk.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(json!({ "index_version": index_version, "to": to }))
}

fn change(server: &Server, row: &ChunkRow, to: ChunkState, t: &Transition, finding: &FindingId) -> ChunkMove {
    let mut change = ChunkMove::new(row.state, to);
    change.finding_id = Some(finding.clone());
    let now = server.now();
    match to {
        ChunkState::CanaryFrozen | ChunkState::CanaryActive => {
            change.canary_salt = Some(canary_salt(row, to, now));
            change.canary_ppm = match t {
                Transition::CanaryFreeze { share_ppm } => *share_ppm,
                _ => CANARY_ACTIVE_PPM,
            };
        }
        ChunkState::Frozen => change.ttl_until = Some(now + TimeDelta::days(FREEZE_TTL_DAYS)),
        _ => {}
    }
    change
}

/// Salt of a canary: derived, so that a repeated step hides the chunk on the same devices; another one each time.
pub fn canary_salt(row: &ChunkRow, to: ChunkState, now: chrono::DateTime<chrono::Utc>) -> String {
    format!("{}@{}:{to}:{}", row.chunk_id, row.version, now.timestamp())
}

async fn follow_finding(tx: &mut Tx, app: &AppId, found: Option<&FindingRow>, p: &Proposal) -> Result<(), Error> {
    let to = match p.transition {
        Transition::CanaryFreeze { .. } | Transition::Freeze | Transition::ConfirmByCanary | Transition::Refreeze => {
            FindingState::Acted
        }
        Transition::RefuteByCanary | Transition::ClearSuspect => FindingState::Dismissed,
        Transition::Activate => FindingState::Resolved,
        _ => return Ok(()),
    };
    let Some(row) = found else { return Ok(()) };
    let mut state = row.state;
    // acted upon although it was dismissed before: the evidence came back
    if state == FindingState::Dismissed && to == FindingState::Acted {
        tx.finding_state_set(app, &row.finding_id, state, FindingState::Open, &p.reason).await?;
        state = FindingState::Open;
    }
    if state != to && state.can_become(to) {
        tx.finding_state_set(app, &row.finding_id, state, to, &p.reason).await?;
    }
    Ok(())
}
