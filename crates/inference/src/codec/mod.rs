//! Block codecs: weights to GGUF blocks and back.
//!
//! Decoding is bit-exact to ggml. Encoding is split in three, so that error-compensating methods can sit
//! between the steps: [`fit`] chooses the scales of a block, [`Grid::round`] chooses levels on them, [`pack`]
//! stores both. The scale search minimises the weighted squared error over a list of candidate scales, each
//! refined by least squares, as the k-quants of llama.cpp do; it is used for every type, with and without
//! importance.

mod affine;
mod lanes;
mod largest;
mod layout;
mod legacy;
mod nonlinear;
mod refit;
mod search;
mod superblock;

pub use layout::{decode_block, pack};
pub(crate) use refit::has_minimum;
pub use search::Grid;
pub(crate) use {nonlinear::CODEBOOK, superblock::unpack_six_bits};

use crate::gguf::TensorType;
use half::{bf16, f16};
use rayon::prelude::*;

/// Why weights could not be coded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CodecError {
    #[error("rows of {row_len} weights are not whole blocks of {block} ({ty})")]
    RowLength { ty: TensorType, row_len: usize, block: usize },
    #[error("{got} bytes or values given, {want} needed")]
    Length { want: usize, got: usize },
    #[error("weight {index} is {value}: only finite values can be quantised")]
    NotFinite { index: usize, value: f32 },
    #[error("weight {index} is {value}, beyond ±65504, which the half-precision scales of {ty} cannot hold")]
    OutOfRange { ty: TensorType, index: usize, value: f32 },
    #[error("importance of column {column} is {value}: it must be finite and not negative")]
    Importance { column: usize, value: f32 },
}

/// Most bytes that precede the levels of a block (Q6_K: 16 sub-scales and one scale).
pub const MAX_HEADER: usize = 18;

/// How scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Scales {
    /// Least squares over a list of candidates.
    #[default]
    Searched,
    /// The scale of the largest magnitude, for types with blocks of 32 and without importance.
    Largest,
}

/// The scales of one block: as the decoder will see them, and as they are stored.
#[derive(Debug, Clone)]
pub struct Fit {
    pub grid: Grid,
    pub(crate) header: [u8; MAX_HEADER],
}

/// Decodes `n` weights; large tensors in parallel. Works on whole tensors, since rows are whole blocks.
///
/// # Errors
/// [`CodecError::Length`] if `bytes` is not exactly `n` weights.
pub fn dequantize(ty: TensorType, bytes: &[u8], n: usize) -> Result<Vec<f32>, CodecError> {
    let mut out = vec![0.0; n];
    dequantize_into(ty, bytes, &mut out)?;
    Ok(out)
}

/// [`dequantize`] into memory of the caller.
///
/// # Errors
/// As [`dequantize`].
pub fn dequantize_into(ty: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), CodecError> {
    let want =
        ty.row_bytes(out.len()).ok_or(CodecError::RowLength { ty, row_len: out.len(), block: ty.block_len() })?;
    if bytes.len() != want {
        return Err(CodecError::Length { want, got: bytes.len() });
    }
    // 16 Ki weights per task: large enough to hide the cost of a task, a multiple of every block.
    const PART: usize = 1 << 14;
    let part_bytes = PART / ty.block_len() * ty.block_bytes();
    out.par_chunks_mut(PART).zip(bytes.par_chunks(part_bytes)).for_each(|(out, bytes)| decode_run(ty, bytes, out));
    Ok(())
}

/// Whole rows, on this thread.
pub(crate) fn decode_run(ty: TensorType, bytes: &[u8], out: &mut [f32]) {
    match ty {
        TensorType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        TensorType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        TensorType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => {
            for (o, b) in out.chunks_mut(ty.block_len()).zip(bytes.chunks(ty.block_bytes())) {
                decode_block(ty, b, o);
            }
        }
    }
}

/// Encodes `weights` (rows of `row_len`), rows in parallel; the result does not depend on the number of threads.
///
/// `importance` holds one weight per column (mean squared activation of that input); columns that matter more
/// are kept more exactly. A block whose importance is zero throughout is treated as unweighted.
///
/// # Errors
/// [`CodecError`] for a row that is not whole blocks, values that are not finite or do not fit, or importance
/// of the wrong length or sign.
pub fn quantize(
    ty: TensorType,
    weights: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, CodecError> {
    let row_bytes = ty.row_bytes(row_len).filter(|_| row_len > 0).ok_or(CodecError::RowLength {
        ty,
        row_len,
        block: ty.block_len(),
    })?;
    if !weights.len().is_multiple_of(row_len) {
        return Err(CodecError::Length { want: weights.len().next_multiple_of(row_len), got: weights.len() });
    }
    check_weights(ty, weights)?;
    check_importance(row_len, importance)?;
    let mut out = vec![0; weights.len() / row_len * row_bytes];
    out.par_chunks_mut(row_bytes)
        .zip(weights.par_chunks(row_len))
        .for_each(|(out, row)| encode_row(ty, row, importance, Scales::Searched, out));
    Ok(out)
}

/// One row of checked values and importance.
pub(crate) fn encode_row(ty: TensorType, row: &[f32], importance: Option<&[f32]>, scales: Scales, out: &mut [u8]) {
    match ty {
        TensorType::F32 => {
            for (o, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                *o = x.to_le_bytes();
            }
        }
        TensorType::F16 => {
            for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *o = f16::from_f32(*x).to_le_bytes();
            }
        }
        TensorType::BF16 => {
            for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *o = bf16::from_f32(*x).to_le_bytes();
            }
        }
        _ if scales == Scales::Largest && importance.is_none() && encode_largest(ty, row, out) => {}
        _ => encode_blocks(ty, row, importance, out),
    }
}

/// Defines a function compiled for the plain target and for AVX2, chosen at run time. The operations are the same (no
/// fused multiply-add), and so are the bits.
macro_rules! wide {
    ($(#[$attr:meta])* $vis:vis fn $name:ident[$lanes:ident]($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$attr])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$lanes: lanes::Lanes>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body::<std::arch::x86_64::__m256>($($arg),*) }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the feature was detected on this CPU.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body::<[f32; 8]>($($arg),*)
        }
    };
}

wide! {
    fn encode_blocks[V](ty: TensorType, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let n = ty.block_len();
        let mut levels = [0i8; 256];
        for (b, (out, x)) in out.chunks_mut(ty.block_bytes()).zip(row.chunks(n)).enumerate() {
            let fit = fit_block::<V>(ty, x, importance.map(|w| &w[b * n..(b + 1) * n]));
            fit.grid.round(x, &mut levels[..n]);
            pack(ty, &fit, &levels[..n], out);
        }
    }
}

wide! {
    /// Whole blocks without a search; `false` for types that are always searched.
    fn encode_largest[V](ty: TensorType, row: &[f32], out: &mut [u8]) -> bool {
        let blocks = out.chunks_exact_mut(ty.block_bytes()).zip(row.as_chunks::<32>().0);
        let _ = V::splat(0.0);
        blocks.fold(ty.block_len() == 32, |done, (out, x)| done && largest::encode(ty, x, out))
    }
}

wide! {
    /// Sums of `(weight - back)²` and of `weight²`.
    pub(crate) fn error_sums[V](weights: &[f32], back: &[f32]) -> (f64, f64) {
        let _ = V::splat(0.0);
        let (mut error, mut norm) = (0.0, 0.0);
        // few enough for single precision
        for (a, b) in weights.chunks(256).zip(back.chunks(256)) {
            let (mut errors, mut squares) = ([0.0f32; 8], [0.0f32; 8]);
            let rest = a.as_chunks::<8>().1.iter().zip(b.as_chunks::<8>().1);
            for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
                for i in 0..8 {
                    errors[i] += (a[i] - b[i]) * (a[i] - b[i]);
                    squares[i] += a[i] * a[i];
                }
            }
            for (a, b) in rest {
                (errors[0], squares[0]) = (errors[0] + (a - b) * (a - b), squares[0] + a * a);
            }
            let sum = |v: [f32; 8]| v.into_iter().map(f64::from).sum::<f64>();
            (error, norm) = (error + sum(errors), norm + sum(squares));
        }
        (error, norm)
    }
}

wide! {
    /// Chooses the scales of one block of a quantised type. `x` and `importance` hold `ty.block_len()` values.
    /// Float types have no scales: their grid is empty.
    #[must_use]
    pub fn fit[V](ty: TensorType, x: &[f32], importance: Option<&[f32]>) -> Fit {
        fit_block::<V>(ty, x, importance)
    }
}

#[inline(always)]
fn fit_block<V: lanes::Lanes>(ty: TensorType, x: &[f32], importance: Option<&[f32]>) -> Fit {
    match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => {
            Fit { grid: Grid::new(1, 0, 0, 0), header: [0; MAX_HEADER] }
        }
        TensorType::Q4_0 => legacy::symmetric::<V>(x, importance, 4),
        TensorType::Q5_0 => legacy::symmetric::<V>(x, importance, 5),
        TensorType::Q4_1 => legacy::affine::<V>(x, importance, 15),
        TensorType::Q5_1 => legacy::affine::<V>(x, importance, 31),
        TensorType::Q8_0 => legacy::q8_0(x),
        TensorType::Iq4Nl => nonlinear::iq4_nl(x, importance),
        TensorType::Q4K => superblock::affine::<V>(x, importance, 15),
        TensorType::Q5K => superblock::affine::<V>(x, importance, 31),
        TensorType::Q6K => superblock::symmetric::<V>(x, importance),
    }
}

/// Refuses what [`quantize`] refuses of values.
pub(crate) fn check_weights(ty: TensorType, weights: &[f32]) -> Result<(), CodecError> {
    const PART: usize = 1 << 16;
    let bad = weights.par_chunks(PART).enumerate().find_map_first(|(i, part)| check_part(ty, part, i * PART).err());
    bad.map_or(Ok(()), Err)
}

/// The same for values that begin with weight `first`.
pub(crate) fn check_part(ty: TensorType, weights: &[f32], first: usize) -> Result<(), CodecError> {
    let limit = match ty {
        TensorType::F32 | TensorType::BF16 => f32::MAX,
        _ => f16::MAX.to_f32(),
    };
    // a NaN is not below a limit; one loop without an early end, which becomes vectors
    if weights.iter().fold(true, |fine, x| fine & (x.abs() <= limit)) {
        return Ok(());
    }
    let Some(at) = weights.iter().position(|x| x.is_nan() || x.abs() > limit) else { return Ok(()) };
    let (index, value) = (first + at, weights[at]);
    Err(if value.is_finite() {
        CodecError::OutOfRange { ty, index, value }
    } else {
        CodecError::NotFinite { index, value }
    })
}

/// Refuses importance of the wrong length or sign.
pub(crate) fn check_importance(row_len: usize, importance: Option<&[f32]>) -> Result<(), CodecError> {
    let Some(importance) = importance else { return Ok(()) };
    if importance.len() != row_len {
        return Err(CodecError::Length { want: row_len, got: importance.len() });
    }
    match importance.iter().position(|w| !(w.is_finite() && *w >= 0.0)) {
        Some(column) => Err(CodecError::Importance { column, value: importance[column] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
