//! Interactions that became due, with their labels: the input of attribution.

use super::columns::Columns;
use super::{LIVE, Labels, before, parked, received_between, time};
use crate::lake::Lake;
use crate::versions::Versions;
use arrow::array::RecordBatch;
use chrono::{DateTime, Duration, Utc};
use flywheel_telemetry::Table;
use flywheel_types::rows::{InteractionRows, Names};
use flywheel_types::{AppId, Error, LabelKind, TrustClass};
use std::collections::HashSet;

/// What [`read`] needs of a row.
const COLUMNS: &str = "interaction_id, install_id, trust, received_at, template_id, bundle, device_class, locale, \
    detected, chunk_ids, chunk_versions, chunk_hidden";

/// One interaction before interning, in the order rows are returned.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Item {
    at: i64,
    install: String,
    id: String,
    trust: TrustClass,
    template: String,
    bundle: String,
    class: String,
    locale: String,
    refused: bool,
    chunks: Vec<(String, bool)>,
}

impl Lake {
    /// Interactions whose label is due in `(due_from, due_to]`: an interaction is due `label_delay` after its receipt.
    /// Its label is the first feedback of the same identity received by then, also when it came before the interaction
    /// (up to 14 days); later feedback is not used here. Whether an interaction was rejected therefore depends only on
    /// its own times, not on how the windows are cut. An interaction id sent twice by one device counts once per call.
    ///
    /// Rows are ordered by receipt, install, interaction id. `names` may hold ids of earlier batches and is extended.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn interaction_batch(
        &self,
        app: &AppId,
        due_from_exclusive: DateTime<Utc>,
        due_to_inclusive: DateTime<Utc>,
        label_delay: Duration,
        as_of: Option<&Versions>,
    ) -> Result<(Names, InteractionRows), Error> {
        let items = self.items_due(app, due_from_exclusive, due_to_inclusive, label_delay, as_of).await?;
        self.label(app, items, due_to_inclusive, label_delay, as_of).await
    }

    /// [`Self::interaction_batch`] as of `upto`, and with it the rows that were due by `due_from_exclusive` already but
    /// reached the table only in versions after `seen` (of another node that was cut off, say). Called with
    /// `(due_from_exclusive, seen)` set to the `(due_to_inclusive, upto)` of the call before, every row is returned
    /// exactly once, whenever it was received and whenever it came.
    ///
    /// # Errors
    /// When a table cannot be read, or the files of a version after `seen` are gone.
    pub async fn interaction_batch_after(
        &self,
        app: &AppId,
        seen: u64,
        due_from_exclusive: DateTime<Utc>,
        due_to_inclusive: DateTime<Utc>,
        label_delay: Duration,
        upto: &Versions,
    ) -> Result<(Names, InteractionRows), Error> {
        let mut items = self.items_due(app, due_from_exclusive, due_to_inclusive, label_delay, Some(upto)).await?;
        let until = before(due_from_exclusive, label_delay);
        let range = (seen, upto.interactions);
        for batch in self.changes(app, Table::Interactions, range, COLUMNS, Some(until)).await? {
            read(&batch, &mut items)?;
        }
        self.label(app, items, due_to_inclusive, label_delay, Some(upto)).await
    }

    async fn items_due(
        &self,
        app: &AppId,
        due_from_exclusive: DateTime<Utc>,
        due_to_inclusive: DateTime<Utc>,
        label_delay: Duration,
        as_of: Option<&Versions>,
    ) -> Result<Vec<Item>, Error> {
        let (from, to) = (before(due_from_exclusive, label_delay), before(due_to_inclusive, label_delay));
        let query = format!("SELECT {COLUMNS} FROM interactions WHERE {LIVE} AND {}", received_between(from, to));
        let mut items = Vec::new();
        for batch in self.rows(app, as_of, &[Table::Interactions], &query).await? {
            read(&batch, &mut items)?;
        }
        Ok(items)
    }

    async fn label(
        &self,
        app: &AppId,
        mut items: Vec<Item>,
        due_to_inclusive: DateTime<Utc>,
        label_delay: Duration,
        as_of: Option<&Versions>,
    ) -> Result<(Names, InteractionRows), Error> {
        items.sort();
        let labels = match items.first() {
            Some(first) => Labels::load(self, app, as_of, parked(time(first.at)), due_to_inclusive).await?,
            None => Labels::default(),
        };
        let delay = label_delay.num_microseconds().unwrap_or(i64::MAX);
        let (mut names, mut rows) = (Names::default(), InteractionRows::default());
        let mut seen = HashSet::new();
        rows.chunk_start.push(0);
        for item in items {
            if !seen.insert((item.id.clone(), item.install.clone(), item.trust)) {
                continue;
            }
            let who = (item.install.clone(), item.trust);
            let label = labels.get(&item.id, &who, item.at.saturating_add(delay)).map(|(l, ..)| l);
            push(&mut names, &mut rows, item, label);
        }
        Ok((names, rows))
    }
}

fn read(batch: &RecordBatch, items: &mut Vec<Item>) -> Result<(), crate::error::LakeError> {
    let c = Columns::new(batch);
    let (ids, installs, trust, at) =
        (c.text("interaction_id")?, c.text("install_id")?, c.words("trust")?, c.micros("received_at")?);
    let (templates, bundles) = (c.text("template_id")?, c.text("bundle")?);
    let (classes, locales, detected) = (c.text("device_class")?, c.text("locale")?, c.text("detected")?);
    let chunk_ids = c.text_lists("chunk_ids")?;
    let (versions, hidden) = (c.int_lists("chunk_versions")?, c.bool_lists("chunk_hidden")?);
    for (i, chunks) in chunk_ids.into_iter().enumerate() {
        let (Some(trust), Some(at)) = (trust[i], at[i]) else {
            continue;
        };
        let chunks = chunks.into_iter().enumerate().map(|(k, id)| {
            let version = versions[i].get(k).copied().unwrap_or(0);
            (format!("{id}@{version}"), hidden[i].get(k).copied().unwrap_or(false))
        });
        items.push(Item {
            at,
            install: installs.get(i).to_owned(),
            id: ids.get(i).to_owned(),
            trust,
            template: templates.get(i).to_owned(),
            bundle: bundles.get(i).to_owned(),
            class: classes.get(i).to_owned(),
            locale: locales.get(i).to_owned(),
            refused: detected.get(i) == LabelKind::Refused.as_str(),
            chunks: chunks.collect(),
        });
    }
    Ok(())
}

fn push(names: &mut Names, rows: &mut InteractionRows, item: Item, label: Option<LabelKind>) {
    rows.hour.push(u32::try_from(time(item.at).timestamp() / 3600).unwrap_or(0));
    rows.template.push(names.template.intern(&item.template));
    rows.bundle.push(names.bundle.intern(&item.bundle));
    rows.device_class.push(names.device_class.intern(&item.class));
    rows.locale.push(names.locale.intern(&item.locale));
    rows.install.push(names.install.intern(&item.install));
    rows.trust.push(item.trust);
    rows.rejected.push(label.is_some_and(LabelKind::is_rejection));
    rows.refused.push(item.refused || label == Some(LabelKind::Refused));
    for (chunk, hidden) in &item.chunks {
        rows.chunk.push(names.chunk.intern(chunk));
        rows.chunk_hidden.push(*hidden);
    }
    rows.chunk_start.push(u32::try_from(rows.chunk.len()).unwrap_or(u32::MAX));
    rows.interaction.push(item.id);
}
