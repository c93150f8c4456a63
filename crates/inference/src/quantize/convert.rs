//! One tensor in its new type: rows are decoded, coded and compared while they are in the cache.

use super::{QuantizeError, QuantizeOptions};
use crate::codec::{self, CodecError, Scales};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use rayon::prelude::*;
use std::borrow::Cow;

/// Weights that a thread works on at a time. The error is summed up in these parts, whatever the number of threads.
const PART: usize = 1 << 15;

/// Squared error and squared norm.
type Sums = (f64, f64);

/// Bytes of one tensor in its new type, and the relative root mean square error. `importance` holds a weight per column, or one
/// per column of each slice of three dimensions.
pub(super) fn convert<'a>(
    base: &'a Gguf,
    tensor: &TensorInfo,
    ty: TensorType,
    importance: Option<&[f32]>,
    options: &QuantizeOptions,
) -> Result<(Cow<'a, [u8]>, f64), QuantizeError> {
    let fail = |source| QuantizeError::Codec { tensor: tensor.name.clone(), source };
    let n = tensor.row_len();
    let wrong = || fail(CodecError::RowLength { ty, row_len: n, block: ty.block_len() });
    let (from_bytes, to_bytes) = (tensor.ty.row_bytes(n).ok_or_else(wrong)?, ty.row_bytes(n).ok_or_else(wrong)?);
    let bytes = base.bytes(tensor);
    let (rows, slices) = (bytes.len() / from_bytes.max(1), importance.map_or(1, |i| (i.len() / n.max(1)).max(1)));
    codec::check_importance(n * slices, importance).map_err(fail)?;
    let scales = if options.search { Scales::Searched } else { Scales::Largest };
    let job = Job { from: tensor.ty, to: ty, n, scales, importance, rows_per_slice: rows / slices };
    if ty == tensor.ty {
        job.check(bytes).map_err(fail)?;
        return Ok((Cow::Borrowed(bytes), 0.0));
    }
    let mut out = vec![0; rows * to_bytes];
    let step = (PART / n.max(1)).max(1);
    let parts: Vec<Result<Sums, CodecError>> = out
        .par_chunks_mut(step * to_bytes)
        .zip(bytes.par_chunks(step * from_bytes))
        .enumerate()
        .map_init(Default::default, |buffers, (i, (out, bytes))| job.part(buffers, i * step, bytes, out))
        .collect();
    let mut all = (0.0, 0.0);
    for part in parts {
        let (error, norm) = part.map_err(fail)?;
        all = (all.0 + error, all.1 + norm);
    }
    let error = if all.1 > 0.0 { (all.0 / all.1).sqrt() } else { 0.0 };
    Ok((Cow::Owned(out), error))
}

struct Job<'a> {
    from: TensorType,
    to: TensorType,
    n: usize,
    scales: Scales,
    importance: Option<&'a [f32]>,
    rows_per_slice: usize,
}

impl Job<'_> {
    /// Codes the rows from `first` on.
    fn part(
        &self,
        (values, back): &mut (Vec<f32>, Vec<f32>),
        first: usize,
        bytes: &[u8],
        out: &mut [u8],
    ) -> Result<Sums, CodecError> {
        let (n, row_bytes) = (self.n, out.len() / (bytes.len() / self.from.row_bytes(self.n).unwrap_or(1)).max(1));
        values.resize(bytes.len() / (self.from.row_bytes(n).unwrap_or(1)) * n, 0.0);
        back.resize(values.len(), 0.0);
        codec::decode_run(self.from, bytes, values);
        codec::check_part(self.to, values, first * n)?;
        for (i, (row, out)) in values.chunks_exact(n).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
            let slice = (first + i) / self.rows_per_slice.max(1);
            let importance = self.importance.map(|all| &all[(slice * n).min(all.len() - n)..][..n]);
            codec::encode_row(self.to, row, importance, self.scales, out);
        }
        codec::decode_run(self.to, out, back);
        let sums = codec::error_sums(values, back);
        // a value that is not finite makes the sum so, too
        let bad = if sums.0.is_finite() { None } else { back.iter().position(|w| !w.is_finite()) };
        match bad {
            Some(at) => Err(CodecError::NotFinite { index: first * n + at, value: back[at] }),
            None => Ok(sums),
        }
    }

    /// Refuses values that are not finite.
    fn check(&self, bytes: &[u8]) -> Result<(), CodecError> {
        let step = (PART / self.n.max(1)).max(1);
        let row_bytes = self.from.row_bytes(self.n).unwrap_or(1);
        let check = |values: &mut Vec<f32>, (i, bytes): (usize, &[u8])| {
            values.resize(bytes.len() / row_bytes * self.n, 0.0);
            codec::decode_run(self.from, bytes, values);
            let bad = values.iter().position(|v| !v.is_finite());
            bad.map_or(Ok(()), |at| Err(CodecError::NotFinite { index: i * step * self.n + at, value: values[at] }))
        };
        let parts = bytes.par_chunks(step * row_bytes).enumerate();
        let all: Vec<Result<(), CodecError>> = parts.map_init(Vec::new, check).collect();
        all.into_iter().collect()
    }
}
