//! Rows a table gained between two Delta versions: how a step with a cursor `(table, version)` reads on.

use crate::error::LakeError;
use crate::lake::Lake;
use crate::provider::session_over;
use arrow::array::RecordBatch;
use datafusion::prelude::SessionContext;
use deltalake::kernel::Add;
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error};
use serde::Deserialize;

/// The actions of a commit that matter here.
#[derive(Deserialize)]
struct Action {
    add: Option<Add>,
    #[serde(rename = "commitInfo")]
    info: Option<Info>,
}

#[derive(Deserialize)]
struct Info {
    operation: Option<String>,
}

impl Lake {
    /// Rows of `app` that appends added to `table` in versions `after < v <= upto`, in no particular order. Rewrites
    /// (compaction, erasure) add nothing; rows erased since are still returned until the old files are vacuumed.
    ///
    /// # Errors
    /// When a version is newer than the table, or its log entry or files are gone (vacuum or log clean-up ran past the
    /// cursor).
    pub async fn rows_between(
        &self,
        app: &AppId,
        table: Table,
        after: u64,
        upto: u64,
    ) -> Result<Vec<RecordBatch>, Error> {
        Ok(self.changes(app, table, after, upto).await?)
    }

    async fn changes(&self, app: &AppId, table: Table, after: u64, upto: u64) -> Result<Vec<RecordBatch>, LakeError> {
        let handle = self.inner.table(table);
        let log_store = handle.view().delta.log_store();
        let mut out = Vec::new();
        for version in after + 1..=upto {
            let entry = log_store.read_commit_entry(version).await?.ok_or_else(|| {
                LakeError::Unexpected(format!("{}: the log entry of version {version} is gone", table.name()))
            })?;
            let adds = appended(&entry)?;
            if adds.is_empty() {
                continue;
            }
            let delta = handle.at(version).await?;
            let state = session_over(&self.inner, app, table, &delta, Some(adds))?;
            let query = format!("SELECT * FROM {}", table.name());
            out.extend(SessionContext::new_with_state(state).sql(&query).await?.collect().await?);
        }
        Ok(out)
    }
}

/// Files an append added; none for other operations.
fn appended(entry: &[u8]) -> Result<Vec<Add>, LakeError> {
    let mut adds = Vec::new();
    let mut is_write = false;
    for line in entry.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
        let action: Action =
            serde_json::from_slice(line).map_err(|e| LakeError::Unexpected(format!("delta log entry: {e}")))?;
        is_write |= action.info.and_then(|i| i.operation).as_deref() == Some("WRITE");
        adds.extend(action.add.filter(|a| a.data_change));
    }
    Ok(if is_write { adds } else { Vec::new() })
}
