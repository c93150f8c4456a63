//! History from files into the tables, beside live ingest: objects of a folder or bucket, one after the other, each in pieces
//! of a million rows. A piece is one Delta commit per table with `txn("import/<digest>", piece)`, so an object of the same
//! bytes is stored once, under whatever name and however often the work was broken off (docs/adr/010-import.md).
//!
//! Rows do not pass the log: they are durable in their files already, and history through the log would delay what phones
//! send. Reading and encoding happen on a thread of low priority without any lock; only the commit takes its turn.

mod object;
mod read;
mod source;

pub use read::Form;
pub use source::{Source, check};

use crate::committer;
use crate::error::LakeError;
use crate::lake::{Inner, Lake};
use chrono::{DateTime, Utc};
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error, ErrorKind};
use object::{Failure, Work};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

/// What to import.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whose rows they are, whatever the files say.
    pub app: AppId,
    pub source: Source,
    /// Table of Parquet files. JSON lines say themselves what they are.
    pub table: Option<Table>,
    /// Form of all objects; by their names when `None`.
    pub form: Option<Form>,
    /// Start of the import, business clock: the receipt of rows that do not know theirs.
    pub start: DateTime<Utc>,
    /// Rows (or lines) of one piece, usually [`PIECE_ROWS`]. Part of an object's identity: with another number pieces would
    /// begin elsewhere.
    pub piece_rows: usize,
}

/// Rows of a piece: a commit of about 100 MB, and what is done again after a crash.
pub const PIECE_ROWS: usize = 1 << 20;

/// How far an import is, and in the end what it did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Objects found.
    pub objects: usize,
    /// Objects that are done, whatever became of them.
    pub done: usize,
    /// The one that is being read.
    pub current: Option<String>,
    /// Rows read, in the pieces that are committed.
    pub rows: u64,
    /// Rows stored, by table.
    pub stored: BTreeMap<&'static str, u64>,
    /// Rows that could not be stored, by reason; the table `rejects` shows some of them.
    pub quarantined: BTreeMap<&'static str, u64>,
    /// Rows that an earlier import has brought in (or set aside) already.
    pub already: u64,
    /// Objects whose names say nothing about their form: how many, and the first of them.
    pub passed_over: usize,
    pub passed_over_first: Vec<String>,
    /// Columns that the table does not have and that cannot be attributes either.
    pub ignored_columns: BTreeMap<String, Vec<String>>,
    /// Objects that could not be read to their end, with the reason.
    pub failed: Vec<Failed>,
}

/// An object that could not be read to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failed {
    pub object: String,
    pub reason: String,
    /// Rows of the pieces before the damage, which are stored: a repaired copy has other bytes and would bring them again.
    pub rows: u64,
}

/// Sees how far an import is, and says whether it goes on.
pub type Observer = Arc<dyn Fn(&Report) -> ControlFlow<()> + Send + Sync>;

/// Names of objects that a report lists.
const NAMES: usize = 20;

/// Imports into the tables of a lake; lives as long as it is used.
#[derive(Clone)]
pub struct Importer {
    inner: Arc<Inner>,
}

impl Lake {
    /// For imports beside everything else.
    #[must_use]
    pub fn importer(&self) -> Importer {
        Importer { inner: Arc::clone(&self.inner) }
    }
}

impl Importer {
    /// Reads every object of the source. One that cannot be read is listed as failed and the others go on; repeating the
    /// import stores nothing twice and tries it again. Durable when it returns.
    ///
    /// # Errors
    /// `Unavailable` when the observer breaks it off, the source cannot be listed or a table cannot be written; `NotFound`
    /// for a source without objects.
    pub async fn run(&self, request: Request, observer: Observer) -> Result<Report, Error> {
        let found = self.inner.imports.run(list(request.source.clone())).await.map_err(unlisted)?;
        if found.is_empty() {
            return Err(Error::not_found("nothing_to_import", format!("there is no object at {}", request.source)));
        }
        let mut report = Report { objects: found.len(), ..Report::default() };
        let request = Arc::new(request);
        for (meta, name) in found {
            let Some(form) = request.form.or_else(|| Form::of_name(&name)) else {
                report.passed_over += 1;
                report.done += 1;
                if report.passed_over_first.len() < NAMES {
                    report.passed_over_first.push(name);
                }
                continue;
            };
            report.current = Some(name.clone());
            let work = Work {
                inner: Arc::clone(&self.inner),
                request: Arc::clone(&request),
                meta,
                name: name.clone(),
                form,
                report: report.clone(),
                observer: Arc::clone(&observer),
            };
            let (after, fate) = self.object(work).await;
            let rows = after.rows - report.rows;
            report = after;
            match fate {
                Ok(()) => {}
                Err(Failure::Object(reason)) => report.failed.push(Failed { object: name, reason, rows }),
                Err(Failure::Stopped) => return Err(stopped()),
                Err(Failure::Lake(e)) => return Err(e.into()),
            }
            report.done += 1;
            if observer(&report).is_break() {
                return Err(stopped());
            }
        }
        report.current = None;
        let inner = Arc::clone(&self.inner);
        self.inner.imports.run(async move { committer::sync(&inner) }).await?;
        Ok(report)
    }

    /// One object on the import thread. A decoder that panics costs its object and not the import.
    async fn object(&self, work: Work) -> (Report, Result<(), Failure>) {
        let before = work.report.clone();
        let Some(handle) = self.inner.imports.handle() else {
            return (before, Err(Failure::Stopped));
        };
        match handle.spawn(object::import(work)).await {
            Ok(done) => done,
            Err(e) if e.is_panic() => {
                tracing::error!(error = %e, "an object cannot be decoded");
                (before, Err(Failure::Object("the file is damaged: its decoder gave up".to_owned())))
            }
            Err(_) => (before, Err(Failure::Stopped)),
        }
    }
}

async fn list(source: Source) -> Result<Vec<(object_store::ObjectMeta, String)>, LakeError> {
    source.list().await.map_err(|e| LakeError::Unexpected(e.to_string()))
}

fn unlisted(e: LakeError) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "import_source_unavailable",
        "the source of the import cannot be listed",
        "check that the folder or bucket exists and that the server may read it; the server's log has the cause",
    )
    .with_inside(e)
}

fn stopped() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "import_stopped",
        "the import was broken off",
        "start it again: it goes on with the piece it came to",
    )
}
