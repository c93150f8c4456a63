//! Named reads of the pipeline: each returns plain rows of [`flywheel_types::rows`] or of this module, in a fixed
//! order, as of given Delta versions, so that a crashed step reads the same again (invariant 4).
//!
//! Identity rules used everywhere here: a device is `(install id, trust class)`, so that an anonymous sender that
//! claims a real device's id never touches that device's rows; feedback counts only with the same identity as its
//! interaction, and the first per interaction by receipt wins.

mod bundles;
mod changes;
pub(crate) mod columns;
mod devices;
mod fleet;
mod interactions;
mod outcomes;

pub use bundles::HeldBundle;
pub use fleet::{InventoryRow, RejectedInteraction};

use crate::error::LakeError;
use crate::lake::Lake;
use crate::provider::{Scope, session};
use crate::versions::Versions;
use arrow::array::RecordBatch;
use chrono::{DateTime, Duration, Utc};
use datafusion::execution::session_state::SessionState;
use datafusion::prelude::SessionContext;
use flywheel_telemetry::Table;
use flywheel_types::{AppId, LabelKind, TrustClass};
use futures::StreamExt as _;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

/// Feedback is looked for this long before its interaction was received: it may overtake it, and phones are offline
/// for long.
pub(crate) const PARKED_DAYS: i64 = 14;

impl Lake {
    /// Runs one of our own queries. `None` reads everything acknowledged.
    pub(crate) async fn rows(
        &self,
        app: &AppId,
        as_of: Option<&Versions>,
        tables: &[Table],
        query: &str,
    ) -> Result<Vec<RecordBatch>, LakeError> {
        let mut out = Vec::new();
        self.each_row(app, as_of, tables, query, &mut |batch| {
            out.push(batch);
            Ok(())
        })
        .await?;
        Ok(out)
    }

    /// [`Self::rows`] piece by piece: for queries over more than should be in memory.
    pub(crate) async fn each_row(
        &self,
        app: &AppId,
        as_of: Option<&Versions>,
        tables: &[Table],
        query: &str,
        take: &mut Take<'_>,
    ) -> Result<(), LakeError> {
        let scope = as_of.map_or(Scope::Now, |v| Scope::At(*v));
        drain(session(&self.inner, app, scope, tables).await?, query, take).await
    }
}

/// Takes the next rows of a query.
pub(crate) type Take<'a> = dyn FnMut(RecordBatch) -> Result<(), LakeError> + Send + 'a;

/// Runs a query and hands on its rows as they come.
pub(crate) async fn drain(state: SessionState, query: &str, take: &mut Take<'_>) -> Result<(), LakeError> {
    let mut rows = SessionContext::new_with_state(state).sql(query).await?.execute_stream().await?;
    while let Some(batch) = rows.next().await {
        take(batch?)?;
    }
    Ok(())
}

/// Condition of the steps that judge: what phones sent. History is for queries; millions of its rows would arrive at once, and
/// prove nothing.
pub(crate) const LIVE: &str = "source <> 'import'";

/// A moment as an SQL constant of exactly the column's type: a plain `TIMESTAMP` literal has nanoseconds, ends in
/// the year 2262 and would put a cast on the column.
fn moment(t: DateTime<Utc>) -> String {
    format!("arrow_cast({}, 'Timestamp(Microsecond, Some(\"UTC\"))')", t.timestamp_micros())
}

/// A moment within the years SQL can write, 1970 to 9999.
fn clamp(t: DateTime<Utc>) -> DateTime<Utc> {
    const LAST: i64 = 253_402_300_799_999_999;
    time(t.timestamp_micros().clamp(0, LAST))
}

/// Condition on `received_at` in `(from, to]` that also prunes the partitions.
pub(crate) fn received_between(from: DateTime<Utc>, to: DateTime<Utc>) -> String {
    let (from, to) = (clamp(from), clamp(to));
    format!(
        "received_date >= DATE '{}' AND received_date <= DATE '{}' AND received_at > {} AND received_at <= {}",
        from.date_naive(),
        to.date_naive(),
        moment(from),
        moment(to)
    )
}

/// Condition on `received_at` after `since`, pruning likewise.
pub(crate) fn received_after(since: DateTime<Utc>) -> String {
    received_between(since, DateTime::<Utc>::MAX_UTC)
}

/// A device, or who claims to be one.
pub(crate) type Identity = (String, TrustClass);

/// First feedback per interaction and identity.
#[derive(Default)]
pub(crate) struct Labels(HashMap<(String, Identity), (i64, LabelKind, Option<String>)>);

impl Labels {
    /// Loads the feedback received in `(from, to]`.
    pub(crate) async fn load(
        lake: &Lake,
        app: &AppId,
        as_of: Option<&Versions>,
        from: DateTime<Utc>,
        to: DateTime<Utc>,
    ) -> Result<Self, LakeError> {
        let query = format!(
            "SELECT interaction_id, coalesce(install_id, '') AS install, trust, label, reason, received_at \
             FROM feedback WHERE {LIVE} AND {}",
            received_between(from, to)
        );
        let mut out = Self::default();
        for batch in lake.rows(app, as_of, &[Table::Feedback], &query).await? {
            let c = columns::Columns::new(&batch);
            let (ids, installs, trust) = (c.text("interaction_id")?, c.text("install")?, c.words("trust")?);
            let (labels, reasons, at) = (c.words::<LabelKind>("label")?, c.text("reason")?, c.micros("received_at")?);
            for i in 0..batch.num_rows() {
                let (Some(trust), Some(label), Some(at)) = (trust[i], labels[i], at[i]) else {
                    continue;
                };
                let key = (ids.get(i).to_owned(), (installs.get(i).to_owned(), trust));
                let new = (at, label, reasons.opt(i).map(str::to_owned));
                match out.0.entry(key) {
                    Entry::Vacant(e) => {
                        e.insert(new);
                    }
                    // Same receipt: the graver label, so that the order of rows never matters.
                    Entry::Occupied(mut e) => {
                        let old = e.get();
                        if (new.0, !new.1.is_rejection(), new.1, &new.2) < (old.0, !old.1.is_rejection(), old.1, &old.2)
                        {
                            e.insert(new);
                        }
                    }
                }
            }
        }
        Ok(out)
    }

    /// Ids of all interactions with a label.
    pub(crate) fn interactions(&self) -> HashSet<&str> {
        self.0.keys().map(|(id, _)| id.as_str()).collect()
    }

    /// The label of an interaction, if it was received by `until` (microseconds).
    pub(crate) fn get(&self, interaction: &str, who: &Identity, until: i64) -> Option<(LabelKind, i64, Option<&str>)> {
        self.0
            .get(&(interaction.to_owned(), who.clone()))
            .filter(|(at, ..)| *at <= until)
            .map(|(at, label, reason)| (*label, *at, reason.as_deref()))
    }
}

pub(crate) fn time(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

/// `t - span`, at the edge of time instead of beyond it.
pub(crate) fn before(t: DateTime<Utc>, span: Duration) -> DateTime<Utc> {
    t.checked_sub_signed(span).unwrap_or(DateTime::<Utc>::MIN_UTC)
}

pub(crate) fn parked(from: DateTime<Utc>) -> DateTime<Utc> {
    before(from, Duration::days(PARKED_DAYS))
}
