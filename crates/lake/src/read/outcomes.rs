//! The derived table `outcomes`: one row per labelled interaction, whichever of interaction and label came first and
//! however late the other one was. Driven by Delta versions alone: a pair is written by the step that first sees both.

use super::columns::Columns;
use super::{Identity, LIVE, Labels, PARKED_DAYS, Take, before, parked, received_between, time};
use crate::error::LakeError;
use crate::lake::Lake;
use crate::versions::Versions;
use arrow::array::RecordBatch;
use chrono::{DateTime, Duration, Utc};
use flywheel_telemetry::Table;
use flywheel_telemetry::column::Micros;
use flywheel_telemetry::rows::OutcomeRow;
use flywheel_types::{AppId, Error, TrustClass};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Columns of an interaction that its outcome takes over.
const COLUMNS: &str = "interaction_id, install_id, trust, received_at, template_id, bundle, device_class, locale, \
    rollout_id, phase, arm, detected, user_key";
/// Ids looked up with one query.
const LOOKUP: usize = 500;
/// Bits of the sequence number that hold the version of `feedback`; the version of `interactions` is above them.
const FEEDBACK_BITS: u32 = 31;

/// Interaction id and who sent it.
type Key = (String, Identity);
/// Interactions by key; of one that was sent twice the first by receipt.
type Found = BTreeMap<Key, (i64, OutcomeRow)>;

impl Lake {
    /// Adds to `outcomes` every pair of an interaction and its first label (of the same identity) that the tables hold at
    /// `upto` and did not both hold at `after`; answers how many. How far the table is stands in its own log, in the
    /// commit that adds the rows, and wins over an older `after`: a repetition adds nothing twice. `after` only saves
    /// reading ranges again in which nothing was labelled. Labels count up to 14 days around their interaction; history from
    /// files has no outcomes.
    ///
    /// # Errors
    /// When a table cannot be read or written (repeating the call is safe), or the files of a version after `after` are
    /// gone; `Conflict` when another process went on from the same point.
    pub async fn outcomes_advance(&self, app: &AppId, after: &Versions, upto: &Versions) -> Result<usize, Error> {
        let table = self.inner.table(Table::Outcomes);
        let writer = format!("outcomes/{app}");
        let done = table.sequence(&writer, &self.inner.buffers).await?;
        let from = Versions {
            interactions: after.interactions.max(done >> FEEDBACK_BITS),
            feedback: after.feedback.max(done & ((1 << FEEDBACK_BITS) - 1)),
            ..*after
        };
        if from.interactions >= upto.interactions && from.feedback >= upto.feedback {
            return Ok(0);
        }
        let rows = self.newly_labelled(app, &from, upto).await?;
        if rows.is_empty() {
            return Ok(0);
        }
        let batch = OutcomeRow::encode(&rows).map_err(LakeError::from)?;
        let seq = (upto.interactions << FEEDBACK_BITS) | upto.feedback;
        if table.append_after(&writer, done, seq, &batch, &self.inner.buffers).await? {
            return Ok(rows.len());
        }
        Err(Error::conflict("outcomes_moved", "another process has added outcomes meanwhile", "read again and repeat"))
    }

    async fn newly_labelled(
        &self,
        app: &AppId,
        from: &Versions,
        upto: &Versions,
    ) -> Result<Vec<OutcomeRow>, LakeError> {
        let mut fed: BTreeMap<Key, i64> = BTreeMap::new();
        let columns = "interaction_id, install_id, trust, received_at";
        let range = (from.feedback, upto.feedback);
        self.gained(app, Table::Feedback, range, columns, &mut |batch| feedback(&batch, &mut fed)).await?;
        // twice over the interactions, and never all of them in memory: most have no label
        let mut span = fed.values().fold(None, |span, at| wider(span, *at));
        let range = (from.interactions, upto.interactions);
        let mut receipts = |batch: RecordBatch| {
            let at = Columns::new(&batch).micros("received_at")?;
            span = at.into_iter().flatten().fold(span, wider);
            Ok(())
        };
        self.gained(app, Table::Interactions, range, "received_at", &mut receipts).await?;
        let Some((first, last)) = span else { return Ok(Vec::new()) };
        // of an interaction that is looked up below, feedback may have come this long before it
        let since = parked(parked(time(first)));
        let labels = Labels::load(self, app, Some(upto), since, DateTime::<Utc>::MAX_UTC).await?;
        let mut gained = Found::new();
        let known = labels.interactions();
        if !known.is_empty() {
            let mut take = |batch: RecordBatch| interactions(&batch, app, Some(&known), &mut gained);
            self.gained(app, Table::Interactions, range, COLUMNS, &mut take).await?;
        }
        let labels_before = Labels::load(self, app, Some(from), since, DateTime::<Utc>::MAX_UTC).await?;
        let had_label = |k: &Key| labels_before.get(&k.0, &k.1, i64::MAX).is_some();
        let wanted: BTreeSet<&str> = fed
            .keys()
            .filter(|k| !gained.contains_key(*k) && !had_label(k))
            .chain(gained.keys().filter(|k| had_label(k)))
            .map(|k| k.0.as_str())
            .collect();
        let old = self.lookup(app, from, &wanted, (time(first), time(last))).await?;
        let fresh = gained.into_iter().filter(|(k, _)| !(had_label(k) && old.contains_key(k)));
        let late =
            old.iter().filter(|(k, _)| fed.contains_key(*k) && !had_label(k)).map(|(k, v)| (k.clone(), v.clone()));
        let mut pairs: Found = fresh.collect();
        // an interaction that was there before keeps its place before a copy of it
        pairs.extend(late);
        Ok(pairs.into_iter().filter_map(|(key, (at, row))| labelled(row, at, &labels, &key)).collect())
    }

    /// Rows that `table` gained in the versions `after < v <= upto`; from the beginning without walking the log.
    async fn gained(
        &self,
        app: &AppId,
        table: Table,
        (after, upto): (u64, u64),
        columns: &str,
        take: &mut Take<'_>,
    ) -> Result<(), LakeError> {
        if after > 0 {
            return self.each_change(app, table, (after, upto), columns, None, take).await;
        }
        let mut as_of = Versions::default();
        as_of.set(table, upto);
        let query = format!("SELECT {columns} FROM {} WHERE {LIVE}", table.name());
        self.each_row(app, Some(&as_of), &[table], &query, take).await
    }

    /// Interactions of these ids as of `from`, received up to 14 days before `first` and up to `last`.
    async fn lookup(
        &self,
        app: &AppId,
        from: &Versions,
        ids: &BTreeSet<&str>,
        (first, last): (DateTime<Utc>, DateTime<Utc>),
    ) -> Result<Found, LakeError> {
        let mut found = Found::new();
        // the last moment is included, and times have microseconds
        let window = received_between(before(parked(first), Duration::microseconds(1)), last);
        let ids: Vec<String> = ids.iter().map(|id| format!("'{}'", id.replace('\'', "''"))).collect();
        for part in ids.chunks(LOOKUP) {
            let list = part.join(", ");
            let query =
                format!("SELECT {COLUMNS} FROM interactions WHERE {LIVE} AND {window} AND interaction_id IN ({list})");
            for batch in self.rows(app, Some(from), &[Table::Interactions], &query).await? {
                interactions(&batch, app, None, &mut found)?;
            }
        }
        Ok(found)
    }
}

/// The least and the greatest of the moments so far.
fn wider(span: Option<(i64, i64)>, at: i64) -> Option<(i64, i64)> {
    Some(span.map_or((at, at), |(first, last)| (first.min(at), last.max(at))))
}

/// Interactions of a batch; only those of `known` ids where it is given.
fn interactions(
    batch: &RecordBatch,
    app: &AppId,
    known: Option<&HashSet<&str>>,
    found: &mut Found,
) -> Result<(), LakeError> {
    let c = Columns::new(batch);
    let (ids, installs, trust) = (c.text("interaction_id")?, c.text("install_id")?, c.words::<TrustClass>("trust")?);
    let (at, phases) = (c.micros("received_at")?, c.ints("phase")?);
    let texts = ["template_id", "bundle", "device_class", "locale", "rollout_id", "arm", "detected", "user_key"];
    let [template, bundle, class, locale, rollout, arm, detected, user] = texts.map(|name| c.text(name));
    let (template, bundle, class, locale) = (template?, bundle?, class?, locale?);
    let (rollout, arm, detected, user) = (rollout?, arm?, detected?, user?);
    for i in 0..batch.num_rows() {
        let (Some(trust), Some(at)) = (trust[i], at[i]) else { continue };
        if known.is_some_and(|ids_known| !ids_known.contains(ids.get(i))) {
            continue;
        }
        let text = |t: &super::columns::Text| t.opt(i).map(str::to_owned);
        let interaction = Micros::from(time(at));
        let row = OutcomeRow {
            app: app.as_str().to_owned(),
            interaction_date: interaction.day(),
            interaction_at: interaction,
            interaction_id: ids.get(i).to_owned(),
            install_id: text(&installs),
            trust: trust.as_str().to_owned(),
            template_id: text(&template),
            bundle: text(&bundle),
            device_class: text(&class),
            locale: text(&locale),
            rollout_id: text(&rollout),
            phase: phases[i].and_then(|p| i32::try_from(p).ok()),
            arm: text(&arm),
            detected: text(&detected),
            user_key: text(&user),
            ..OutcomeRow::default()
        };
        let key = (ids.get(i).to_owned(), (installs.get(i).to_owned(), trust));
        match found.get(&key) {
            Some((earlier, _)) if *earlier <= at => {}
            _ => _ = found.insert(key, (at, row)),
        }
    }
    Ok(())
}

fn feedback(batch: &RecordBatch, fed: &mut BTreeMap<Key, i64>) -> Result<(), LakeError> {
    let c = Columns::new(batch);
    let (ids, installs, trust) = (c.text("interaction_id")?, c.text("install_id")?, c.words::<TrustClass>("trust")?);
    let at = c.micros("received_at")?;
    for i in 0..batch.num_rows() {
        let (Some(trust), Some(at)) = (trust[i], at[i]) else { continue };
        let key = (ids.get(i).to_owned(), (installs.get(i).to_owned(), trust));
        fed.entry(key).and_modify(|first| *first = at.min(*first)).or_insert(at);
    }
    Ok(())
}

/// The outcome, when the interaction has a label not too far from it in time.
fn labelled(mut row: OutcomeRow, at: i64, labels: &Labels, key: &Key) -> Option<OutcomeRow> {
    let (label, labelled_at, _) = labels.get(&key.0, &key.1, i64::MAX)?;
    if (time(labelled_at) - time(at)).abs() > Duration::days(PARKED_DAYS) {
        return None;
    }
    let received = Micros::from(time(labelled_at));
    row.received_date = received.day();
    row.received_at = received;
    row.label = label.as_str().to_owned();
    Some(row)
}
