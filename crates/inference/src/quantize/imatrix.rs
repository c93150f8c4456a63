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

#[derive(Debug, Clone, PartialEq)]
struct Column {
    sum2: Vec<f32>,
    count: f32,
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
        if let Some(j) = sum2.iter().position(|v| !(v.is_finite() && *v >= 0.0)) {
            let what = format!("importance of column {j} is {}: the calibration run is broken", sum2[j]);
            return Err(GgufError::tensor(tensor, what));
        }
        let count = count as f32;
        match self.columns.get_mut(tensor) {
            None => {
                self.columns.insert(tensor.to_owned(), Column { sum2: sum2.to_vec(), count });
            }
            Some(c) if c.sum2.len() == sum2.len() => {
                c.sum2.iter_mut().zip(sum2).for_each(|(a, b)| *a += b);
                c.count += count;
            }
            Some(c) => {
                let what = format!("importance for {} columns, earlier for {}", sum2.len(), c.sum2.len());
                return Err(GgufError::tensor(tensor, what));
            }
        }
        Ok(())
    }

    /// Mean square of each column; `None` if the tensor was never seen.
    #[must_use]
    pub fn get(&self, tensor: &str) -> Option<Vec<f32>> {
        let c = self.columns.get(tensor).filter(|c| c.count > 0.0)?;
        Some(c.sum2.iter().map(|s| s / c.count).collect())
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
            let [count] = counts[..] else {
                let what = format!("{} counts: mixture-of-experts importance is not supported", counts.len());
                return Err(GgufError::tensor(name, what));
            };
            if !(count.is_finite() && count >= 0.0) {
                return Err(GgufError::tensor(name, format!("its count is {count}")));
            }
            out.add(name, &g.dequantize(sums)?, count as u64)?;
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
            [entry("in_sum2", vec![c.sum2.len() as u64, 1], &c.sum2), entry("counts", vec![1, 1], &[c.count])]
        });
        write(path, &metadata, tensors)
    }
}
