//! Operator requests as they are stored, turned into what the planner understands.

use crate::server::Server;
use flywheel_experiment::planner::{OperatorRequest, PlanV1, RequestKind};
use flywheel_store::rollout_requests::{RequestRow, RequestVerb};
use flywheel_types::{AppId, Error};

/// Open requests, in the order in which they were made.
pub struct Asked {
    pub planner: Vec<OperatorRequest>,
    /// Planner request id → stored ids (a promotion that was approved by a second person is two of them).
    ids: Vec<(String, Vec<String>)>,
}

impl Asked {
    /// Stored ids behind a planner request.
    pub fn stored(&self, request: &str) -> &[String] {
        self.ids.iter().find(|(id, _)| id == request).map_or(&[], |(_, v)| v.as_slice())
    }
}

/// Loads the open requests of a rollout.
///
/// # Errors
/// Those of the database.
pub async fn open(server: &Server, app: &AppId, plan: &PlanV1) -> Result<Asked, Error> {
    let rows = server.store.rollout_request_list(app, &plan.rollout_id, true).await?;
    let mut asked = Asked { planner: Vec::new(), ids: Vec::new() };
    for row in &rows {
        let Some(kind) = kind(row, &rows) else { continue };
        let mut ids = vec![row.request_id.clone()];
        if let RequestKind::Promote { approved_by: Some(by) } = &kind {
            ids.extend(
                rows.iter().filter(|r| r.verb == RequestVerb::Override && r.who == *by).map(|r| r.request_id.clone()),
            );
        }
        asked.ids.push((row.request_id.clone(), ids));
        asked.planner.push(OperatorRequest {
            id: row.request_id.clone(),
            by: row.who.clone(),
            reason: row.reason.clone(),
            kind,
        });
    }
    Ok(asked)
}

fn kind(row: &RequestRow, all: &[RequestRow]) -> Option<RequestKind> {
    Some(match row.verb {
        RequestVerb::Pause => RequestKind::Pause,
        RequestVerb::Resume => RequestKind::Resume,
        RequestVerb::Halt => RequestKind::Halt,
        RequestVerb::Rollback => RequestKind::Rollback,
        RequestVerb::Approve => serde_json::from_value(row.detail.clone())
            .ok()
            .map(|a: Approves| RequestKind::Approve { generation: a.generation, change: a.change })?,
        RequestVerb::Promote => RequestKind::Promote {
            approved_by: all
                .iter()
                .find(|r| r.verb == RequestVerb::Override && r.who != row.who)
                .map(|r| r.who.clone()),
        },
        // counted with the promotion it approves
        RequestVerb::Override => return None,
    })
}

/// What an approval names: the change that the person saw.
#[derive(serde::Deserialize)]
struct Approves {
    generation: u64,
    change: flywheel_experiment::planner::Change,
}
