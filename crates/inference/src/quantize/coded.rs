//! Levels and scales of a matrix while they are still being chosen.

use crate::codec::{self, Fit};
use crate::gguf::TensorType;
use rayon::prelude::*;

/// A matrix in a quantised type, not packed yet.
#[derive(Debug, Clone)]
pub(super) struct Coded {
    ty: TensorType,
    columns: usize,
    pub rows: Vec<CodedRow>,
}

/// One row: a level for each weight, scales for each block.
#[derive(Debug, Clone)]
pub(super) struct CodedRow {
    pub levels: Vec<i8>,
    pub fits: Vec<Fit>,
}

impl Coded {
    /// Rows of `columns` weights, which are whole blocks of `ty`.
    pub fn new(ty: TensorType, columns: usize, rows: Vec<CodedRow>) -> Self {
        Self { ty, columns, rows }
    }

    pub fn ty(&self) -> TensorType {
        self.ty
    }
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// What the decoder will make of it, row-major.
    pub fn values(&self) -> Vec<f32> {
        let (n, block) = (self.columns, self.ty.block_len());
        let mut out = vec![0.0; self.rows.len() * n];
        out.par_chunks_exact_mut(n).zip(&self.rows).for_each(|(out, row)| {
            for (i, (value, level)) in out.iter_mut().zip(&row.levels).enumerate() {
                *value = row.fits[i / block].grid.value(i % block, *level);
            }
        });
        out
    }

    /// The bytes of the file.
    pub fn pack(&self) -> Vec<u8> {
        let row_bytes = self.columns / self.ty.block_len() * self.ty.block_bytes();
        let mut out = vec![0; self.rows.len() * row_bytes];
        out.par_chunks_exact_mut(row_bytes).zip(&self.rows).for_each(|(out, row)| {
            let blocks = out.chunks_exact_mut(self.ty.block_bytes()).zip(row.levels.chunks_exact(self.ty.block_len()));
            for ((out, levels), fit) in blocks.zip(&row.fits) {
                codec::pack(self.ty, fit, levels, out);
            }
        });
        out
    }
}

impl Coded {
    /// Nearest levels on scales weighted by importance.
    pub fn nearest(ty: TensorType, values: &[f32], importance: &[f32]) -> Self {
        let (n, block) = (importance.len(), ty.block_len());
        let rows = values.par_chunks_exact(n).map(|row| {
            let mut levels = vec![0; n];
            let parts = row.chunks_exact(block).zip(importance.chunks_exact(block)).zip(levels.chunks_exact_mut(block));
            let fits = parts.map(|((x, w), levels)| {
                let fit = codec::fit(ty, x, Some(w));
                fit.grid.round(x, levels);
                fit
            });
            let fits = fits.collect();
            CodedRow { levels, fits }
        });
        Self { ty, columns: n, rows: rows.collect() }
    }
}
