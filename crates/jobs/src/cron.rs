//! Cron expressions in a time zone. What each case does is promised here and checked by `tests/cron_table.rs`:
//!
//! | case | rule |
//! |---|---|
//! | syntax | five fields (Vixie), no seconds; `L`, `#`, `W` by croner; weekday 0 or 7 is Sunday |
//! | zone | IANA name, default `UTC`; an unknown one is refused |
//! | spring gap, fixed time | once, at the first valid minute after the gap |
//! | autumn overlap, fixed time | once, in the first pass |
//! | `*/15`, hourly | real-time spacing, both passes |
//! | never fires (`0 0 30 2 *`) | refused |

use crate::ScheduleError;
use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use std::str::FromStr as _;

/// A checked expression in its zone.
#[derive(Debug, Clone)]
pub struct CronExpr {
    cron: Cron,
    zone: Tz,
}

impl CronExpr {
    /// Reads an expression and the IANA zone it is meant in.
    ///
    /// # Errors
    /// [`ScheduleError`] when one of them is not valid or the expression never fires after `from`.
    pub fn parse(expr: &str, zone: &str, from: DateTime<Utc>) -> Result<Self, ScheduleError> {
        let zone = Tz::from_str(zone).map_err(|_| ScheduleError::Zone(zone.to_owned()))?;
        let cron = CronParser::builder()
            .seconds(Seconds::Disallowed)
            .year(Year::Disallowed)
            .build()
            .parse(expr)
            .map_err(|e| ScheduleError::Expression { expr: expr.to_owned(), detail: e.to_string() })?;
        let checked = Self { cron, zone };
        match checked.next(from) {
            Some(_) => Ok(checked),
            None => Err(ScheduleError::NeverFires(expr.to_owned())),
        }
    }

    /// The first slot after `after`; `None` when there is none.
    #[must_use]
    pub fn next(&self, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let local = after.with_timezone(&self.zone);
        let next = self.cron.find_next_occurrence(&local, false).ok()?.with_timezone(&Utc);
        (next > after).then_some(next)
    }

    /// The slot in the expression's own zone, for people.
    #[must_use]
    pub fn local(&self, slot: DateTime<Utc>) -> DateTime<Tz> {
        slot.with_timezone(&self.zone)
    }
}

/// One slot as `schedule next` prints it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct NextSlot {
    pub at: DateTime<Utc>,
    /// Wall clock with offset and abbreviation, for example `2026-03-08 03:00:00 EDT -04:00`.
    pub local: String,
    /// Set when the zone's offset changed since the slot before (or since `from`).
    pub clock_changed: bool,
}

/// The next `count` slots of an expression after `from`.
///
/// # Errors
/// [`ScheduleError`] when expression or zone is not valid.
pub fn schedule_next(
    expr: &str,
    zone: &str,
    from: DateTime<Utc>,
    count: usize,
) -> Result<Vec<NextSlot>, ScheduleError> {
    use chrono::Offset as _;
    let cron = CronExpr::parse(expr, zone, from)?;
    let mut offset = cron.local(from).offset().fix();
    let mut slots = Vec::new();
    let mut at = from;
    while slots.len() < count {
        let Some(next) = cron.next(at) else { break };
        let local = cron.local(next);
        let clock_changed = local.offset().fix() != offset;
        offset = local.offset().fix();
        slots.push(NextSlot { at: next, local: local.format("%Y-%m-%d %H:%M:%S %Z %:z").to_string(), clock_changed });
        at = next;
    }
    Ok(slots)
}
