//! One object, piece by piece.

use super::read::{self, Form, Reader};
use super::{Observer, Report, Request};
use crate::append::Append;
use crate::error::LakeError;
use crate::lake::Inner;
use crate::table::Appended;
use arrow::array::{AsArray as _, RecordBatch};
use arrow::compute::{sort_to_indices, take_record_batch};
use arrow::datatypes::Date32Type;
use arrow::error::ArrowError;
use deltalake::kernel::Add;
use flywheel_telemetry::decode::Context;
use flywheel_telemetry::import::Fates;
use flywheel_telemetry::trust::Sender;
use flywheel_telemetry::{Endpoint, Table, TableRows};
use object_store::ObjectMeta;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Seek as _;
use std::sync::Arc;

/// Rows of several days keep a file open for each day; after this much of them the files are closed, bytes in memory.
const OPEN_BYTES: usize = 256 << 20;
/// Tables that rows go to; their counts are committed last.
const TABLES: [Table; 4] = [Table::Interactions, Table::Feedback, Table::DeviceEvents, Table::Rejects];
/// How often a piece is written again because a vacuum took its files.
const TRIES: usize = 20;

/// Everything about one object.
pub(crate) struct Work {
    pub inner: Arc<Inner>,
    pub request: Arc<Request>,
    pub meta: ObjectMeta,
    pub name: String,
    pub form: Form,
    pub report: Report,
    pub observer: Observer,
}

/// Why an object is not done.
pub(crate) enum Failure {
    /// The object itself; others go on.
    Object(String),
    /// A table of ours; nothing can go on.
    Lake(LakeError),
    Stopped,
}

impl From<LakeError> for Failure {
    fn from(e: LakeError) -> Self {
        Self::Lake(e)
    }
}
impl From<ArrowError> for Failure {
    fn from(e: ArrowError) -> Self {
        Self::Lake(e.into())
    }
}

/// Imports an object; the report comes back with what is committed.
pub(crate) async fn import(mut work: Work) -> (Report, Result<(), Failure>) {
    let fate = work.run().await;
    (work.report, fate)
}

impl Work {
    async fn run(&mut self) -> Result<(), Failure> {
        let table = self.request.table.filter(|_| self.form == Form::Parquet).map_or("events", Table::name);
        // the same bytes for another app or table, or in other pieces, are something else
        let salt = format!("flywheel-import-v1\0{}\0{table}\0{}\0", self.request.app, self.request.piece_rows);
        let folder = self.inner.config.log.folder.clone();
        let (file, digest) = self.request.source.fetch(&self.meta, &salt, &folder).await.map_err(Failure::Object)?;
        let unchanged = Unchanged::of(&file);
        let writer = format!("import/{digest}");
        let end = format!("{writer}/end");
        let inner = Arc::clone(&self.inner);
        let counts = inner.table(Table::Dispositions);
        let whole = counts.sequence(&end, &inner.buffers).await?;
        if whole > 0 {
            self.report.already += whole;
            return Ok(());
        }
        Reader::verify(again(&file)?, self.form).map_err(Failure::Object)?;
        for attempt in 0..TRIES {
            let done = counts.sequence(&writer, &inner.buffers).await?;
            if attempt == 0 {
                self.report.already += done * self.request.piece_rows as u64;
            }
            let begun = Piece { writer: &writer, end: &end, unchanged: &unchanged, number: done };
            if self.pieces(again(&file)?, begun).await? {
                return Ok(());
            }
            tracing::warn!(object = self.name, "a vacuum took files before their commit; the piece is written again");
        }
        Err(LakeError::Unexpected(format!("{}: files vanish before their commit again and again", self.name)).into())
    }

    /// The pieces behind `begun`; `false` when one has to be written again.
    async fn pieces(&mut self, file: File, begun: Piece<'_>) -> Result<bool, Failure> {
        let skip = usize::try_from(begun.number).unwrap_or(usize::MAX).saturating_mul(self.request.piece_rows);
        let mut reader = Reader::open(file, self.form, self.request.table, skip).map_err(Failure::Object)?;
        if !reader.ignored().is_empty() && self.report.ignored_columns.len() < super::NAMES {
            self.report.ignored_columns.insert(self.name.clone(), reader.ignored().to_vec());
        }
        let mut piece = begun;
        while !reader.at_end().map_err(Failure::Object)? {
            piece.number += 1;
            if !self.piece(&mut reader, &piece).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One piece: its rows, then their counts.
    async fn piece(&mut self, reader: &mut Reader, piece: &Piece<'_>) -> Result<bool, Failure> {
        let mut open = Open::new(&self.inner, piece).await?;
        let mut fates = Fates::default();
        let mut rows = 0;
        let size = self.request.piece_rows;
        while rows < size {
            let Some((batch, n)) = reader.next(size - rows).map_err(Failure::Object)? else { break };
            let encoded = {
                let ctx = self.context();
                let decoded = read::decode(&ctx, reader, &batch);
                fates.encode(&ctx, &self.name, &decoded)?
            };
            open.write(&self.inner, &encoded).await?;
            rows += n;
            if (self.observer)(&self.report).is_break() {
                return Err(Failure::Stopped);
            }
        }
        if !piece.unchanged.holds() {
            return Err(Failure::Object("it was changed while it was read".to_owned()));
        }
        let done = (piece.number - 1) * size as u64 + rows as u64;
        let end = reader.at_end().map_err(Failure::Object)?.then_some(done);
        if !open.commit(&self.inner, piece).await? || !commit_counts(&self.inner, piece, &fates, end).await? {
            return Ok(false);
        }
        self.report.rows += rows as u64;
        for (to, from) in [(&mut self.report.stored, fates.stored), (&mut self.report.quarantined, fates.quarantined)] {
            for (word, n) in from {
                *to.entry(word).or_default() += n;
            }
        }
        if (self.observer)(&self.report).is_break() {
            return Err(Failure::Stopped);
        }
        Ok(true)
    }

    fn context(&self) -> Context<'_> {
        let settings = &self.inner.config.ingest;
        Context {
            app: &self.request.app,
            endpoint: Endpoint::Import,
            sender: Sender::ANONYMOUS,
            now: self.request.start,
            limits: &settings.limits,
            masks: settings.masks,
            users: &settings.users,
            otlp_content: settings.otlp_content,
            classify: settings.classifier.as_deref(),
        }
    }
}

/// The file at its beginning. Handles share their place, so one of them is read at a time.
fn again(file: &File) -> Result<File, Failure> {
    let rewound = file.try_clone().and_then(|mut f| f.rewind().map(|()| f));
    rewound.map_err(|e| Failure::Object(format!("it cannot be read: {e}")))
}

/// One piece of an object.
struct Piece<'a> {
    /// Names of the transactions.
    writer: &'a str,
    end: &'a str,
    unchanged: &'a Unchanged,
    /// Counted from 1.
    number: u64,
}

/// A file as it was when its digest was made.
struct Unchanged(Option<(File, std::fs::Metadata)>);

impl Unchanged {
    fn of(file: &File) -> Self {
        Self(file.try_clone().ok().and_then(|f| f.metadata().ok().map(|m| (f, m))))
    }
    fn holds(&self) -> bool {
        let Some((file, before)) = &self.0 else { return false };
        let same = |now: std::fs::Metadata| now.len() == before.len() && now.modified().ok() == before.modified().ok();
        file.metadata().is_ok_and(same)
    }
}

/// Files of a piece that are being written.
struct Open {
    appends: BTreeMap<Table, Append>,
    /// Tables that have the piece, from an import that was broken off between two of them.
    there: BTreeSet<Table>,
    days: BTreeSet<i32>,
    bytes: usize,
}

impl Open {
    async fn new(inner: &Inner, piece: &Piece<'_>) -> Result<Self, LakeError> {
        let mut there = BTreeSet::new();
        for table in TABLES {
            if inner.table(table).sequence(piece.writer, &inner.buffers).await? >= piece.number {
                there.insert(table);
            }
        }
        Ok(Self { appends: BTreeMap::new(), there, days: BTreeSet::new(), bytes: 0 })
    }

    async fn write(&mut self, inner: &Inner, rows: &TableRows) -> Result<(), LakeError> {
        for table in TABLES.into_iter().filter(|t| !self.there.contains(t)) {
            let Some(batch) = rows.get(table) else { continue };
            let batch = by_day(batch, &mut self.days)?;
            let append = match self.appends.entry(table) {
                Entry::Occupied(begun) => begun.into_mut(),
                Entry::Vacant(place) => place.insert(Append::begin(&inner.table(table).view().delta)?),
            };
            append.write(&batch).await?;
            self.bytes += batch.get_array_memory_size();
        }
        if self.days.len() > 1 && self.bytes > OPEN_BYTES {
            for append in self.appends.values_mut() {
                append.close().await?;
            }
            self.days.clear();
            self.bytes = 0;
        }
        Ok(())
    }

    async fn commit(self, inner: &Arc<Inner>, piece: &Piece<'_>) -> Result<bool, LakeError> {
        for (table, append) in self.appends {
            let files = append.finish().await?;
            let marks = vec![(piece.writer.to_owned(), piece.number)];
            if commit(inner, table, files, marks).await? == Appended::Gone {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The counts of a piece, after its rows; with the last piece how many rows the object has.
async fn commit_counts(
    inner: &Arc<Inner>,
    piece: &Piece<'_>,
    fates: &Fates,
    end: Option<u64>,
) -> Result<bool, LakeError> {
    let mut append = Append::begin(&inner.table(Table::Dispositions).view().delta)?;
    append.write(&fates.dispositions()?).await?;
    let mut marks = vec![(piece.writer.to_owned(), piece.number)];
    marks.extend(end.map(|rows| (piece.end.to_owned(), rows)));
    let files = append.finish().await?;
    Ok(commit(inner, Table::Dispositions, files, marks).await? != Appended::Gone)
}

/// Commits on the thread of all commits: one of low priority must not sit on the table's lock.
async fn commit(
    inner: &Arc<Inner>,
    table: Table,
    files: Vec<Add>,
    marks: Vec<(String, u64)>,
) -> Result<Appended, LakeError> {
    let owned = Arc::clone(inner);
    inner
        .upkeep
        .run(async move {
            let marks: Vec<_> = marks.iter().map(|(name, seq)| (name.as_str(), *seq)).collect();
            owned.table(table).append_files(files, &marks, &owned.buffers).await
        })
        .await
}

/// The rows sorted by day, so that each batch touches each day's file once.
fn by_day(rows: &RecordBatch, seen: &mut BTreeSet<i32>) -> Result<RecordBatch, LakeError> {
    let unexpected = || LakeError::Unexpected("rows without `received_date`".to_owned());
    let column = rows.column_by_name("received_date").ok_or_else(unexpected)?;
    let days = column.as_primitive_opt::<Date32Type>().ok_or_else(unexpected)?;
    seen.extend(days.values().chunk_by(|a, b| a == b).filter_map(|run| run.first()));
    if days.values().is_sorted() {
        return Ok(rows.clone());
    }
    Ok(take_record_batch(rows, &sort_to_indices(column, None, None)?)?)
}
