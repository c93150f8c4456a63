//! Batches of rows from one file, Parquet or lines, from any row on.

use arrow::array::RecordBatch;
use deltalake::parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use flywheel_telemetry::import::lines::{self, Compression, Lines};
use flywheel_telemetry::import::{columns, rows};
use flywheel_telemetry::{Decoded, Table};
use serde::{Deserialize, Serialize};
use std::fs::File;

/// Most rows of one batch.
const BATCH_ROWS: usize = 8192;
/// Memory that a batch of average rows takes, bytes.
const BATCH_BYTES: i64 = 16 << 20;

/// Form of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    Parquet,
    /// JSON lines.
    Jsonl,
    JsonlGzip,
    JsonlZstd,
}

impl Form {
    /// By the end of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let (stem, lines) = match name.rsplit_once('.')? {
            (stem, "gz") => (stem, Self::JsonlGzip),
            (stem, "zst" | "zstd") => (stem, Self::JsonlZstd),
            (_, "parquet") => return Some(Self::Parquet),
            _ => (name.as_str(), Self::Jsonl),
        };
        let ending = stem.rsplit_once('.').map(|(_, ending)| ending)?;
        matches!(ending, "jsonl" | "ndjson" | "json").then_some(lines)
    }
}

/// A file that is being read.
pub(crate) enum Reader {
    Parquet {
        batches: Box<ParquetRecordBatchReader>,
        mapping: columns::Mapping,
        next: usize,
        total: usize,
        rest: Option<RecordBatch>,
    },
    Lines(Box<Lines>),
}

/// Some rows that are not decoded yet.
pub(crate) enum Batch {
    Mapped { mapped: columns::Mapped, first: usize },
    Lines(lines::Batch),
}

impl Reader {
    /// Opens a file behind its first `skip` rows.
    ///
    /// # Errors
    /// Why it cannot be read; a text for people.
    pub fn open(file: File, form: Form, table: Option<Table>, skip: usize) -> Result<Self, String> {
        let compression = match form {
            Form::Parquet => return Self::parquet(file, table, skip),
            Form::Jsonl => Compression::None,
            Form::JsonlGzip => Compression::Gzip,
            Form::JsonlZstd => Compression::Zstd,
        };
        let mut lines = Lines::open(file, compression).map_err(|e| e.to_string())?;
        lines.skip(skip).map_err(|e| format!("it cannot be read: {e}"))?;
        Ok(Self::Lines(Box::new(lines)))
    }

    /// Reads what carries checksums to its end: a cut or damaged file should store nothing. Parquet has its index at the end,
    /// so a cut file does not even open.
    ///
    /// # Errors
    /// Why it cannot be read; a text for people.
    pub fn verify(file: File, form: Form) -> Result<(), String> {
        let compression = match form {
            Form::Parquet | Form::Jsonl => return Ok(()),
            Form::JsonlGzip => Compression::Gzip,
            Form::JsonlZstd => Compression::Zstd,
        };
        Lines::open(file, compression).and_then(Lines::verify).map_err(|e| format!("it is cut or damaged: {e}"))
    }

    fn parquet(file: File, table: Option<Table>, skip: usize) -> Result<Self, String> {
        let table = table.ok_or("it is Parquet: name its table with `table`")?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| e.to_string())?;
        let mapping = columns::Mapping::new(table, builder.schema())?;
        let groups = builder.metadata().row_groups();
        let rows = |n: i64| usize::try_from(n).unwrap_or(0);
        let total = groups.iter().map(|g| rows(g.num_rows())).sum();
        let bytes: i64 = groups.iter().map(|g| g.total_byte_size()).sum();
        let average = bytes / i64::try_from(total).unwrap_or(i64::MAX).max(1);
        let size = rows(BATCH_BYTES / average.max(1)).clamp(1, BATCH_ROWS);
        // whole row groups before the first wanted row are not opened
        let (mut before, mut wanted) = (0, Vec::new());
        for (i, group) in groups.iter().enumerate() {
            let n = rows(group.num_rows());
            if wanted.is_empty() && before + n <= skip {
                before += n;
            } else {
                wanted.push(i);
            }
        }
        let builder = builder.with_row_groups(wanted).with_offset(skip - before.min(skip)).with_batch_size(size);
        let batches = Box::new(builder.build().map_err(|e| e.to_string())?);
        Ok(Self::Parquet { batches, mapping, next: skip, total, rest: None })
    }

    /// Columns that are not kept.
    pub fn ignored(&self) -> &[String] {
        match self {
            Self::Parquet { mapping, .. } => &mapping.ignored,
            Self::Lines(_) => &[],
        }
    }

    /// Up to `limit` rows, with how many they are; `None` at the end.
    ///
    /// # Errors
    /// Why it cannot be read on; a text for people.
    pub fn next(&mut self, limit: usize) -> Result<Option<(Batch, usize)>, String> {
        match self {
            Self::Lines(lines) => {
                let batch = lines.batch(limit.min(BATCH_ROWS)).map_err(|e| format!("it cannot be read: {e}"))?;
                let taken = batch.taken;
                Ok((taken > 0).then_some((Batch::Lines(batch), taken)))
            }
            Self::Parquet { batches, mapping, next, rest, .. } => {
                let batch = match rest.take() {
                    Some(batch) => batch,
                    None => match batches.next().transpose().map_err(|e| format!("row {}: {e}", *next + 1))? {
                        Some(batch) => batch,
                        None => return Ok(None),
                    },
                };
                let n = batch.num_rows().min(limit);
                if n < batch.num_rows() {
                    *rest = Some(batch.slice(n, batch.num_rows() - n));
                }
                let first = *next + 1;
                *next += n;
                let mapped = mapping.apply(&batch.slice(0, n)).map_err(|e| format!("row {first}: {e}"))?;
                Ok(Some((Batch::Mapped { mapped, first }, n)))
            }
        }
    }

    /// Whether every row was taken.
    ///
    /// # Errors
    /// Why it cannot be read on; a text for people.
    pub fn at_end(&mut self) -> Result<bool, String> {
        match self {
            Self::Lines(lines) => lines.at_end().map_err(|e| format!("it cannot be read: {e}")),
            Self::Parquet { next, total, .. } => Ok(next >= total),
        }
    }
}

/// Rows of a batch, checked and masked.
pub(crate) fn decode<'a>(
    ctx: &flywheel_telemetry::decode::Context<'a>,
    reader: &Reader,
    batch: &'a Batch,
) -> Decoded<'a> {
    match (batch, reader) {
        (Batch::Mapped { mapped, first }, Reader::Parquet { mapping, .. }) => {
            rows::decode(ctx, mapping, mapped, *first)
        }
        (Batch::Lines(batch), _) => lines::decode(ctx, batch),
        (Batch::Mapped { .. }, Reader::Lines(_)) => Decoded::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_name_tells_the_form() {
        let form = Form::of_name;
        assert_eq!(form("2025/a.parquet"), Some(Form::Parquet));
        assert_eq!(form("a.JSONL"), Some(Form::Jsonl));
        assert_eq!(form("a.ndjson.gz"), Some(Form::JsonlGzip));
        assert_eq!(form("a.json.zst"), Some(Form::JsonlZstd));
        for other in ["a.csv", "a.gz", "parquet", "a.parquet.gz", "README", ""] {
            assert_eq!(form(other), None, "{other}");
        }
    }
}
