//! Results of a query in the forms that other programs read.

use crate::error::LakeError;
use crate::sql::SqlResult;
use arrow::error::ArrowError;
use deltalake::parquet::arrow::ArrowWriter;
use flywheel_types::Error;

/// Form of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Arrow IPC stream.
    Arrow,
    /// RFC 4180 with a header line.
    Csv,
    Parquet,
}

impl Format {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::Arrow, Self::Csv, Self::Parquet];

    /// Media type of the form.
    #[must_use]
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Arrow => "application/vnd.apache.arrow.stream",
            Self::Csv => "text/csv",
            Self::Parquet => "application/vnd.apache.parquet",
        }
    }
}

impl SqlResult {
    /// The rows in a form.
    ///
    /// # Errors
    /// `Invalid` for a list or map as CSV, which has no form for it.
    pub fn to_bytes(&self, format: Format) -> Result<Vec<u8>, Error> {
        if format == Format::Csv
            && let Some(nested) = self.schema.fields().iter().find(|f| f.data_type().is_nested())
        {
            return Err(Error::invalid(
                "nested_column",
                format!("column `{}` is a list or a map, which CSV cannot hold", nested.name()),
                "select its elements, for example `array_to_string(chunk_ids, ' ')`, or ask for JSON, Arrow or Parquet",
            ));
        }
        Ok(self.write(format).map_err(LakeError::from)?)
    }

    fn write(&self, format: Format) -> Result<Vec<u8>, ArrowError> {
        match format {
            Format::Arrow => {
                let mut writer = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &self.schema)?;
                self.batches.iter().try_for_each(|batch| writer.write(batch))?;
                writer.into_inner()
            }
            Format::Csv => {
                let mut out = Vec::new();
                let mut writer = arrow::csv::WriterBuilder::new().with_header(true).build(&mut out);
                // without a batch the header would be missing
                writer.write(&arrow::array::RecordBatch::new_empty(self.schema.clone()))?;
                self.batches.iter().try_for_each(|batch| writer.write(batch))?;
                drop(writer);
                Ok(out)
            }
            Format::Parquet => {
                let mut writer = ArrowWriter::try_new(Vec::new(), self.schema.clone(), None)?;
                for batch in &self.batches {
                    writer.write(batch)?;
                }
                Ok(writer.into_inner()?)
            }
        }
    }
}
