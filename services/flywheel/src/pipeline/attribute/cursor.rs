//! How far attribution and the derived outcomes have read the tables. The attribution state is sums over all rows so far,
//! so each row must enter it exactly once: a row is taken when its label is due, or, when it reached the table later than
//! that, with the Delta version that brought it. Both borders move in the transaction that stores the new state.

use crate::server::Server;
use chrono::{DateTime, Utc};
use flywheel_jobs::JobContext;
use flywheel_lake::Versions;
use flywheel_store::Tx;
use flywheel_types::{AppId, Error, ErrorKind};

const STEP: &str = "attribute";
const INTERACTIONS: &str = "interactions";
/// Not a version but the business time, microseconds, up to which labels were due.
const DUE: &str = "interactions.due_us";
const OUTCOMES: &str = "outcomes";
const FEEDBACK: &str = "feedback";

/// Borders of the rows that the state holds; `None` before the first step.
pub struct Cursor {
    version: Option<i64>,
    due_us: Option<i64>,
}

impl Cursor {
    /// Where the state of `app` is.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn load(server: &Server, app: &AppId) -> Result<Self, Error> {
        Ok(Self {
            version: server.store.cursor_get(app, STEP, INTERACTIONS).await?,
            due_us: server.store.cursor_get(app, STEP, DUE).await?,
        })
    }

    /// Rows due by then are in the state, as far as [`Self::seen`] reaches.
    pub fn due(&self) -> DateTime<Utc> {
        self.due_us.and_then(DateTime::from_timestamp_micros).unwrap_or(DateTime::UNIX_EPOCH)
    }

    /// Version of `interactions` up to which rows were looked at; at first there is nothing to catch up with.
    ///
    /// # Errors
    /// `Unavailable` when this process knows an older version than the process that ran the step before.
    pub fn seen(&self, versions: &Versions) -> Result<u64, Error> {
        let seen = self.version.map_or(versions.interactions, version);
        if seen <= versions.interactions {
            return Ok(seen);
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "lake_is_behind",
            "this node has not seen the newest telemetry yet",
            "nothing: the job is tried again",
        )
        .with_inside(format!("interactions at version {}, the cursor is at {seen}", versions.interactions)))
    }

    /// Moves both borders.
    ///
    /// # Errors
    /// `Conflict` when another run was faster.
    pub async fn advance(
        &self,
        tx: &mut Tx,
        app: &AppId,
        versions: &Versions,
        due: DateTime<Utc>,
    ) -> Result<(), Error> {
        tx.cursor_set(app, STEP, INTERACTIONS, self.version, stored(versions.interactions)).await?;
        tx.cursor_set(app, STEP, DUE, self.due_us, due.timestamp_micros()).await?;
        Ok(())
    }
}

/// Brings the table `outcomes` up to `versions`; answers how many rows it gained. The table's own log says how far it
/// is, so a crash between its commit and ours repeats nothing; our cursor only saves reading unlabelled ranges again.
///
/// # Errors
/// Of the lake and the database.
pub async fn outcomes(server: &Server, ctx: &JobContext, versions: &Versions) -> Result<usize, Error> {
    let app = ctx.app();
    let interactions = server.store.cursor_get(app, OUTCOMES, INTERACTIONS).await?;
    let feedback = server.store.cursor_get(app, OUTCOMES, FEEDBACK).await?;
    let after = Versions {
        interactions: interactions.map_or(0, version),
        feedback: feedback.map_or(0, version),
        ..Versions::default()
    };
    let moved = versions.interactions > after.interactions || versions.feedback > after.feedback;
    if !moved || versions.interactions < after.interactions || versions.feedback < after.feedback {
        return Ok(0);
    }
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::super::lost)?;
    tx.commit().await?;
    let added = server.lake.outcomes_advance(app, &after, versions).await?;
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::super::lost)?;
    tx.cursor_set(app, OUTCOMES, INTERACTIONS, interactions, stored(versions.interactions)).await?;
    tx.cursor_set(app, OUTCOMES, FEEDBACK, feedback, stored(versions.feedback)).await?;
    tx.commit().await?;
    Ok(added)
}

fn version(stored: i64) -> u64 {
    u64::try_from(stored).unwrap_or(0)
}

fn stored(version: u64) -> i64 {
    i64::try_from(version).unwrap_or(i64::MAX)
}
