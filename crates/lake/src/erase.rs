//! Erasure of one person's records: out of the tables, out of the log, and off the disk. The caller does it in this order, each
//! part safe to repeat: [`Lake::interactions_of`], [`Lake::erase`], [`Lake::purge_log`], [`Lake::superseded_files`], bring the
//! cursors of the pipeline up to date (they read by version, and old versions lose files), [`Lake::delete_superseded`].

use crate::committer;
use crate::error::LakeError;
use crate::lake::{Inner, Lake, QUERIES_AT_ONCE};
use crate::read::columns::{Columns, Text};
use crate::rewrite::{Pick, Picked, Removed, remove_rows};
use aho_corasick::AhoCorasick;
use arrow::array::{BooleanArray, RecordBatch};
use chrono::{DateTime, Utc};
use deltalake::DeltaTable;
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error};
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// People and devices: whose rows an erasure is about, or on whose rows there is a hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subjects {
    /// Keys of `UserKeys`.
    pub users: BTreeSet<String>,
    /// Install ids as they are stored.
    pub installs: BTreeSet<String>,
}

impl Subjects {
    /// Nobody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty() && self.installs.is_empty()
    }

    fn has(&self, user: Option<&str>, install: Option<&str>) -> bool {
        user.is_some_and(|u| self.users.contains(u)) || install.is_some_and(|i| self.installs.contains(i))
    }
}

/// What an erasure is about.
#[derive(Debug, Clone, Default)]
pub struct Erasure {
    pub who: Subjects,
    /// Rows of these stay.
    pub held: Subjects,
    /// Interactions of the person, whose feedback and outcomes go too, whoever sent them.
    pub interactions: HashSet<String>,
}

/// Files that no current version of the tables needs.
#[derive(Debug)]
pub struct Superseded(Vec<(Table, Path)>);

impl Superseded {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }
    /// None.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Tables with rows of people, in the order in which they are erased: interactions last, because the others are found by their
/// ids, also after a crash in between.
const TABLES: [Table; 6] =
    [Table::Feedback, Table::Outcomes, Table::Rejects, Table::DeviceEvents, Table::Metrics, Table::Interactions];

impl Lake {
    /// Ids of the interactions that an erasure of `who` takes away: acknowledged ones, except those that are held.
    ///
    /// # Errors
    /// When the tables cannot be read.
    pub async fn interactions_of(
        &self,
        app: &AppId,
        who: &Subjects,
        held: &Subjects,
    ) -> Result<HashSet<String>, Error> {
        let mut found = HashSet::new();
        let any =
            [("user_key", &who.users), ("install_id", &who.installs)].map(|(column, values)| one_of(column, values));
        let query =
            format!("SELECT interaction_id, user_key, install_id FROM interactions WHERE {} OR {}", any[0], any[1]);
        let mut take = |batch: RecordBatch| {
            let people = People::of(&batch)?;
            let ids = Columns::new(&batch).text("interaction_id")?;
            let rows = (0..batch.num_rows()).filter(|i| !people.are(held, *i));
            found.extend(rows.map(|i| ids.get(i).to_owned()));
            Ok(())
        };
        self.each_row(app, None, &[Table::Interactions], &query, &mut take).await?;
        Ok(found)
    }

    /// Takes the rows of an erasure out of every table; answers what became of each. Rows that are acknowledged while this
    /// runs are not seen: flush before, and look again afterwards.
    ///
    /// # Errors
    /// When a table cannot be read or written; it can be repeated.
    pub async fn erase(&self, app: &AppId, erasure: &Erasure) -> Result<BTreeMap<&'static str, Removed>, Error> {
        let (inner, app, erasure) = (Arc::clone(&self.inner), app.clone(), erasure.clone());
        let work = async move {
            let mut done = BTreeMap::new();
            for table in TABLES {
                done.insert(table.name(), erase_in(&inner, &app, table, &erasure).await?);
            }
            Ok(done)
        };
        Ok(self.inner.rewrites.run(work).await?)
    }

    /// Commits everything that is acknowledged and frees all of the log that held it; answers how many segments went.
    ///
    /// # Errors
    /// When a table or the log cannot be written; it can be repeated.
    pub async fn purge_log(&self) -> Result<usize, Error> {
        self.inner.ingestor.seal().await?;
        self.flush().await?;
        Ok(committer::free(&self.inner).await?)
    }

    /// Files of `app` that were replaced, or that a crash left behind, as of now. Only files written before `written_before`
    /// (by the clock of the store) are named: with several nodes on one bucket, younger ones may belong to a commit of another.
    ///
    /// # Errors
    /// When the store cannot be listed.
    pub async fn superseded_files(&self, app: &AppId, written_before: DateTime<Utc>) -> Result<Superseded, Error> {
        let mut out = Vec::new();
        for table in Table::ALL {
            let found = superseded(&self.inner, app, table, written_before).await?;
            out.extend(found.into_iter().map(|path| (table, path)));
        }
        Ok(Superseded(out))
    }

    /// Deletes the files; waits for the queries that may still read them. Answers how many there were.
    ///
    /// # Errors
    /// When one cannot be deleted; it can be repeated.
    pub async fn delete_superseded(&self, files: Superseded) -> Result<usize, Error> {
        let slots = Arc::clone(&self.inner.queries.slots);
        let _none = slots.acquire_many_owned(QUERIES_AT_ONCE as u32).await.map_err(Error::internal)?;
        let mut deleted = 0;
        for table in Table::ALL {
            let of_table = files.0.iter().filter(|(t, _)| *t == table).map(|(_, path)| path);
            deleted += delete(&self.inner, table, of_table).await?;
        }
        committer::sync(&self.inner)?;
        Ok(deleted)
    }
}

/// Condition of a column with one of some values.
fn one_of(column: &str, values: &BTreeSet<String>) -> String {
    if values.is_empty() {
        return "false".to_owned();
    }
    let list: Vec<String> = values.iter().map(|v| format!("'{}'", v.replace('\'', "''"))).collect();
    format!("{column} IN ({})", list.join(", "))
}

/// Who the rows of a batch belong to.
struct People {
    users: Option<Text>,
    installs: Text,
}

impl People {
    fn of(batch: &RecordBatch) -> Result<Self, LakeError> {
        let columns = Columns::new(batch);
        let users = batch.column_by_name("user_key").map(|_| columns.text("user_key")).transpose()?;
        Ok(Self { users, installs: columns.text("install_id")? })
    }

    fn are(&self, subjects: &Subjects, row: usize) -> bool {
        subjects.has(self.users.as_ref().and_then(|u| u.opt(row)), self.installs.opt(row))
    }
}

/// Columns that say whose a row is; `None` for tables that hold counts only.
pub(crate) fn people_columns(table: Table) -> Option<&'static str> {
    match table {
        Table::Interactions | Table::Feedback | Table::Outcomes | Table::Metrics => Some("user_key, install_id"),
        Table::DeviceEvents | Table::Rejects => Some("install_id"),
        Table::Dispositions => None,
    }
}

/// Picks everything except for what is held.
pub(crate) fn all_but(batch: &RecordBatch, held: &Subjects) -> Result<Picked, LakeError> {
    let people = People::of(batch)?;
    Ok(picked(batch, |_| true, |i| people.are(held, i)))
}

async fn erase_in(inner: &Inner, app: &AppId, table: Table, erasure: &Erasure) -> Result<Removed, LakeError> {
    let by_people = |batch: &RecordBatch| {
        let people = People::of(batch)?;
        Ok(picked(batch, |i| people.are(&erasure.who, i), |i| people.are(&erasure.held, i)))
    };
    let by_interaction = |batch: &RecordBatch| {
        let (people, ids) = (People::of(batch)?, Columns::new(batch).text("interaction_id")?);
        let is_theirs = |i| people.are(&erasure.who, i) || erasure.interactions.contains(ids.get(i));
        Ok(picked(batch, is_theirs, |i| people.are(&erasure.held, i)))
    };
    let named = names(erasure)?;
    let by_mention = |batch: &RecordBatch| {
        let (people, details) = (People::of(batch)?, Columns::new(batch).text("detail")?);
        let is_theirs = |i| people.are(&erasure.who, i) || named.is_match(details.get(i));
        Ok(picked(batch, is_theirs, |i| people.are(&erasure.held, i)))
    };
    let (columns, pick): (&str, &Pick<'_>) = match table {
        Table::Interactions | Table::Metrics => ("user_key, install_id", &by_people),
        Table::DeviceEvents => ("install_id", &by_people),
        Table::Feedback | Table::Outcomes => ("user_key, install_id, interaction_id", &by_interaction),
        Table::Rejects => ("install_id, detail", &by_mention),
        Table::Dispositions => return Ok(Removed::default()),
    };
    remove_rows(inner, app, table, columns, pick, &|_| true).await
}

/// Everything by which a text can name the person.
fn names(erasure: &Erasure) -> Result<AhoCorasick, LakeError> {
    let words = erasure.who.users.iter().chain(&erasure.who.installs).chain(&erasure.interactions);
    AhoCorasick::new(words.filter(|w| !w.is_empty())).map_err(|e| LakeError::Unexpected(e.to_string()))
}

fn picked(batch: &RecordBatch, goes: impl Fn(usize) -> bool, is_held: impl Fn(usize) -> bool) -> Picked {
    let mut held = 0;
    let go = (0..batch.num_rows()).map(|i| {
        let goes = goes(i);
        let stays = goes && is_held(i);
        held += u64::from(stays);
        goes && !stays
    });
    let go: Vec<bool> = go.collect();
    Picked { go: BooleanArray::from(go), held }
}

/// Deletes files that are not part of the table by now: an import writes its files long before it commits them, looks whether
/// they are still there, and writes them again when they are not.
async fn delete(inner: &Inner, table: Table, paths: impl Iterator<Item = &Path>) -> Result<usize, LakeError> {
    let handle = inner.table(table);
    let _one = handle.commit.lock().await;
    let mut delta = handle.view().delta;
    delta.update_state().await?;
    let current = current(&delta)?;
    let store = delta.object_store();
    let mut deleted = 0;
    for path in paths.filter(|p| !current.contains(p.as_ref())) {
        match store.delete(path).await {
            Ok(()) => deleted += 1,
            Err(object_store::Error::NotFound { .. }) => {}
            Err(e) => return Err(LakeError::Unexpected(format!("{}: {e}", table.name()))),
        }
    }
    Ok(deleted)
}

/// Paths of the files of a version.
fn current(delta: &DeltaTable) -> Result<HashSet<String>, LakeError> {
    Ok(delta.snapshot()?.log_data().iter().map(|f| f.path().into_owned()).collect())
}

/// Files of an app that the current version does not have, while nobody writes any.
async fn superseded(
    inner: &Inner,
    app: &AppId,
    table: Table,
    written_before: DateTime<Utc>,
) -> Result<Vec<Path>, LakeError> {
    let handle = inner.table(table);
    let _alone = handle.rewrite.lock().await;
    let _one = handle.commit.lock().await;
    let mut delta = handle.view().delta;
    delta.update_state().await?;
    let current = current(&delta)?;
    let unexpected = |e: object_store::Error| LakeError::Unexpected(format!("{}: {e}", table.name()));
    let store = delta.object_store();
    let all: Vec<_> = store.list(Some(&Path::from(format!("app={app}")))).try_collect().await.map_err(unexpected)?;
    let old = all.into_iter().filter(|o| !current.contains(o.location.as_ref()) && o.last_modified < written_before);
    Ok(old.map(|o| o.location).collect())
}
