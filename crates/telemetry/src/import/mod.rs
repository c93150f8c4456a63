//! History from files: rows that something else stored before. They go through the same limits, masks and quarantine as live
//! telemetry, keep the time of their receipt, and prove nothing: their trust class is always `anonymous`. Knows files and
//! arrays; where they come from and where the rows go is the lake's part.

pub mod columns;
pub mod lines;
pub mod rows;

use crate::column::{Micros, Text};
use crate::decode::{Context, DAY_US, Decoded, Quarantined, SANE_FROM_US};
use crate::disposition::{Disposition, Key, Kind, Tally};
use crate::ingest::prepare::{REJECTS, rejects};
use crate::rows::{DeviceEventRow, DispositionRow, FeedbackRow, InteractionRow, RejectRow, Table, TableRows};
use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use flywheel_types::TrustClass;
use std::collections::BTreeMap;

/// Why one row is not stored: a stable word, and what was wrong.
pub(crate) type Refusal = (&'static str, String);

/// What rows of the three tables have in common.
pub(crate) trait History<'a> {
    /// Sets what history may not choose (app, source, trust), and the times. The receipt is the file's, else the time of the
    /// event, else the start of the import: never later than that, because a pipeline step may have read on from there.
    fn settle(&mut self, ctx: &Context<'a>, received: Option<Micros>, occurred: Option<Micros>) -> Result<(), Refusal>;
    /// Receipt and occurrence as the file gives them.
    fn given(&self) -> (Micros, Micros);
}

macro_rules! history {
    ($($row:ident),+) => {$(
        impl<'a> History<'a> for $row<'a> {
            fn settle(&mut self, ctx: &Context<'a>, received: Option<Micros>, occurred: Option<Micros>) -> Result<(), Refusal> {
                let (received, occurred) = times(ctx.now.into(), received, self.event_at, occurred)?;
                self.app = ctx.app.as_str().into();
                self.source = ctx.endpoint.source().into();
                self.trust = Text::Borrowed(TrustClass::Anonymous.as_str());
                (self.received_at, self.received_date, self.occurred_at) = (received, received.day(), occurred);
                Ok(())
            }
            fn given(&self) -> (Micros, Micros) {
                (self.received_at, self.occurred_at)
            }
        }
    )+};
}

history!(InteractionRow, FeedbackRow, DeviceEventRow);

/// Receipt and occurrence of a row of history.
fn times(
    start: Micros,
    received: Option<Micros>,
    event: Option<Micros>,
    occurred: Option<Micros>,
) -> Result<(Micros, Micros), Refusal> {
    let sane = |t: &Micros| (SANE_FROM_US..=start.0.saturating_add(DAY_US)).contains(&t.0);
    let at = event.filter(sane).or(occurred.filter(sane));
    let received = match received {
        Some(t) if !sane(&t) || t > start => {
            let detail = format!("received_at is {} µs, before 2015 or after the import began", t.0);
            return Err(("bad_received_at", detail));
        }
        Some(t) => t,
        None => at.unwrap_or(start).min(start),
    };
    Ok((received, occurred.filter(sane).or(at).unwrap_or(received)))
}

/// Adds the one row of `one` to `out`, with the times of history.
pub(crate) fn add<'a>(
    ctx: &Context<'a>,
    one: Decoded<'a>,
    received: Option<Micros>,
    line: usize,
    out: &mut Decoded<'a>,
) {
    fn each<'a, R: History<'a>>(
        ctx: &Context<'a>,
        rows: Vec<R>,
        received: Option<Micros>,
        refused: &mut Option<Refusal>,
    ) -> Option<R> {
        let mut row = rows.into_iter().next()?;
        match row.settle(ctx, received, None) {
            Ok(()) => Some(row),
            Err(e) => {
                *refused = Some(e);
                None
            }
        }
    }
    let kind = one.stored().into_iter().find(|(_, n)| *n > 0).map_or(Kind::Unknown, |(kind, _)| kind);
    let mut refused = None;
    out.interactions.extend(each(ctx, one.interactions, received, &mut refused));
    out.feedback.extend(each(ctx, one.feedback, received, &mut refused));
    out.device_events.extend(each(ctx, one.device_events, received, &mut refused));
    out.quarantined.extend(one.quarantined);
    if let Some((reason, detail)) = refused {
        out.quarantine(kind, reason, format!("line {line}: {detail}"));
    }
}

/// What became of the rows of one piece of a file.
#[derive(Debug, Default)]
pub struct Fates {
    tally: Tally,
    /// Rows that are stored, by table.
    pub stored: BTreeMap<&'static str, u64>,
    /// Rows that are not, by reason.
    pub quarantined: BTreeMap<&'static str, u64>,
    shown: usize,
}

impl Fates {
    /// Counts the rows of one batch and encodes them. `file` is named in the details of what is not stored; of each piece the
    /// first 100 go to `rejects`.
    ///
    /// # Errors
    /// When Arrow refuses the columns (a bug).
    pub fn encode(&mut self, ctx: &Context<'_>, file: &str, decoded: &Decoded<'_>) -> Result<TableRows, ArrowError> {
        let mut rows = decoded.encode()?;
        let room = REJECTS.saturating_sub(self.shown);
        let shown: Vec<Quarantined> = decoded
            .quarantined
            .iter()
            .take(room)
            .map(|q| Quarantined { detail: format!("{file}: {}", q.detail), ..q.clone() })
            .collect();
        rows.set(Table::Rejects, RejectRow::encode(&rejects(ctx, &shown, room))?);
        self.shown += shown.len();
        for ((kind, n), table) in decoded.stored().into_iter().zip(Table::ALL) {
            self.count(ctx, kind, Disposition::Stored, None, n);
            if n > 0 {
                *self.stored.entry(table.name()).or_default() += n;
            }
        }
        for q in &decoded.quarantined {
            self.count(ctx, q.kind, Disposition::Quarantined, Some(q.reason), 1);
            *self.quarantined.entry(q.reason).or_default() += 1;
        }
        Ok(rows)
    }

    fn count(&mut self, ctx: &Context<'_>, kind: Kind, disposition: Disposition, reason: Option<&'static str>, n: u64) {
        let (app, source, trust) = (ctx.app.clone(), ctx.endpoint.source(), TrustClass::Anonymous);
        self.tally.add(Key { app, source, kind, trust, disposition, reason }, n, ctx.now.into());
    }

    /// Rows of `dispositions`.
    ///
    /// # Errors
    /// When Arrow refuses the columns (a bug).
    pub fn dispositions(&self) -> Result<RecordBatch, ArrowError> {
        DispositionRow::encode(&self.tally.rows())
    }
}

#[cfg(test)]
mod tests;
