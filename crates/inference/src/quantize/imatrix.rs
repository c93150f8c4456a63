//! Importance matrix: mean squared activation of every input column of every linear layer.

use crate::gguf::{Array, Gguf, GgufError, TensorData, TensorSpec, TensorType, Value, write};
use std::{collections::BTreeMap, path::Path};

/// Importance by tensor name. Stored in llama.cpp's GGUF layout (`<tensor>.in_sum2`, `<tensor>.counts`).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Imatrix {
    /// What it was collected on, for the record.
    pub datasets: Vec<String>,
    /// Calibration chunks, and tokens in each.
    pub chunks: u32,
    pub chunk_tokens: u32,
    columns: BTreeMap<String, Column>,
}

/// Sums of the columns, slice after slice for tensors of three dimensions, and the tokens each slice saw.
#[derive(Debug, Clone, PartialEq)]
struct Column {
    sum2: Vec<f32>,
    counts: Vec<f32>,
}

impl Column {
    fn columns(&self) -> usize {
        self.sum2.len() / self.counts.len()
    }
}

impl Imatrix {
    /// An empty one for a calibration run over `chunks` of `chunk_tokens` of these texts.
    #[must_use]
    pub fn new(datasets: Vec<String>, chunks: u32, chunk_tokens: u32) -> Self {
        Self { datasets, chunks, chunk_tokens, columns: BTreeMap::new() }
    }

    /// Adds sums: `sum2[j]` is the sum of squares of input `j` over `count` tokens. Called again for the same
    /// tensor, it accumulates.
    ///
    /// # Errors
    /// [`GgufError::Tensor`] for values that are not finite or negative, or another number of columns.
    pub fn add(&mut self, tensor: &str, sum2: &[f32], count: u64) -> Result<(), GgufError> {
        self.add_slice(tensor, (0, 1), sum2, count)
    }

    /// [`Imatrix::add`] for slice `at.0` of the `at.1` slices of a tensor of three dimensions (experts). Slices that are
    /// never added count as unseen.
    ///
    /// # Errors
    /// As [`Imatrix::add`], and for another number of slices.
    pub fn add_slice(&mut self, tensor: &str, at: (usize, usize), sum2: &[f32], count: u64) -> Result<(), GgufError> {
        let (slice, slices) = at;
        if slice >= slices || sum2.is_empty() {
            let what = format!("importance for {} columns of slice {slice} of {slices}", sum2.len());
            return Err(GgufError::tensor(tensor, what));
        }
        let column = self
            .columns
            .entry(tensor.to_owned())
            .or_insert_with(|| Column { sum2: vec![0.0; sum2.len() * slices], counts: vec![0.0; slices] });
        if column.counts.len() != slices || column.columns() != sum2.len() {
            let (n, old) = (column.columns(), column.counts.len());
            let what = format!("importance for {} columns of {slices} slices, earlier for {n} of {old}", sum2.len());
            return Err(GgufError::tensor(tensor, what));
        }
        let sums = &mut column.sum2[slice * sum2.len()..][..sum2.len()];
        for (j, (sum, more)) in sums.iter_mut().zip(sum2).enumerate() {
            let new = *sum + more;
            // the sum of two finite numbers may be none
            if !(new.is_finite() && *more >= 0.0) {
                let what =
                    format!("importance of column {j} is {more}, with earlier {sum}: the calibration run is broken");
                return Err(GgufError::tensor(tensor, what));
            }
            *sum = new;
        }
        column.counts[slice] += count as f32;
        Ok(())
    }

    /// Mean square of each column, slice after slice; `None` if the tensor was never seen. Slices that no token
    /// reached have 1 throughout, as in stock llama.cpp: such an expert is quantised unweighted, not lost.
    #[must_use]
    pub fn get(&self, tensor: &str) -> Option<Vec<f32>> {
        let c = self.columns.get(tensor).filter(|c| c.counts.iter().any(|n| *n > 0.0))?;
        let slices = c.sum2.chunks_exact(c.columns()).zip(&c.counts);
        Some(slices.flat_map(|(s, n)| s.iter().map(move |s| if *n > 0.0 { s / n } else { 1.0 })).collect())
    }
    /// Slices of a tensor that no token reached.
    #[must_use]
    pub fn unseen(&self, tensor: &str) -> usize {
        self.columns.get(tensor).map_or(0, |c| c.counts.iter().filter(|n| **n == 0.0).count())
    }
    /// Tensors it knows, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.columns.keys().map(String::as_str)
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Reads a file of `llama-imatrix` (GGUF, or the older `imatrix.dat`) or of [`Imatrix::write`].
    ///
    /// # Errors
    /// [`GgufError`] for other files, and for importance that is not finite.
    pub fn read(path: &Path) -> Result<Self, GgufError> {
        Self::from_bytes(std::fs::read(path).map_err(|e| GgufError::io(path, e))?)
    }

    /// The same over bytes in memory.
    ///
    /// # Errors
    /// As [`Imatrix::read`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        if !bytes.starts_with(b"GGUF") {
            return super::legacy_imatrix::parse(&bytes);
        }
        let g = Gguf::from_bytes(bytes)?;
        if g.optional::<&str>("general.type")? != Some("imatrix") {
            return Err(GgufError::Unsupported { what: "general.type is not `imatrix`".into() });
        }
        let mut out = Self {
            datasets: g.optional::<&[String]>("imatrix.datasets")?.unwrap_or_default().to_vec(),
            chunks: g.optional("imatrix.chunk_count")?.unwrap_or(0),
            chunk_tokens: g.optional("imatrix.chunk_size")?.unwrap_or(0),
            columns: BTreeMap::new(),
        };
        for sums in g.tensors() {
            let Some(name) = sums.name.strip_suffix(".in_sum2") else { continue };
            let counts = g.dequantize(g.tensor(&format!("{name}.counts"))?)?;
            let values = g.dequantize(sums)?;
            if !values.len().is_multiple_of(counts.len()) {
                let what = format!("{} sums for {} counts", values.len(), counts.len());
                return Err(GgufError::tensor(name, what));
            }
            let columns = values.len() / counts.len();
            for (slice, (values, count)) in values.chunks_exact(columns).zip(&counts).enumerate() {
                if !(count.is_finite() && *count >= 0.0) {
                    return Err(GgufError::tensor(name, format!("its count is {count}")));
                }
                out.add_slice(name, (slice, counts.len()), values, *count as u64)?;
            }
        }
        Ok(out)
    }

    /// Writes the GGUF form that llama.cpp reads.
    ///
    /// # Errors
    /// [`GgufError`].
    pub fn write(&self, path: &Path) -> Result<u64, GgufError> {
        let metadata = [
            ("general.type", Value::from("imatrix")),
            ("imatrix.datasets", Value::Array(Array::String(self.datasets.clone()))),
            ("imatrix.chunk_count", Value::U32(self.chunks)),
            ("imatrix.chunk_size", Value::U32(self.chunk_tokens)),
        ]
        .map(|(k, v)| (k.to_owned(), v));
        let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let tensors = self.columns.iter().flat_map(|(name, c)| {
            let entry = |suffix: &str, dims: Vec<u64>, values: &[f32]| {
                let spec = TensorSpec { name: format!("{name}.{suffix}"), dims, ty: TensorType::F32 };
                (spec, TensorData::Bytes(bytes(values).into()))
            };
            let (columns, slices) = (c.columns() as u64, c.counts.len() as u64);
            [entry("in_sum2", vec![columns, slices], &c.sum2), entry("counts", vec![1, slices], &c.counts)]
        });
        write(path, &metadata, tensors)
    }
}
