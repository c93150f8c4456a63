//! Matrices kept in the quantised blocks of their file, and their products with activations in 8 bits.

mod input;
mod kernel;
mod kind;

use super::aligned::Aligned;
use super::kernel::{LANES, SharedMut};
use super::ops::wide;
use super::team::parallel;
use crate::gguf::TensorType;
use half::f16;
use rayon::prelude::*;
use std::cell::RefCell;

pub(crate) use input::Input;
pub(crate) use kernel::{Isa, Panel, Place, multiply};
pub(crate) use kind::{BLOCK, Q8, WIDTH, level_bytes, scale_bytes};

/// Fewer weights times rows than this are not worth waking another thread.
const PARALLEL_FROM: usize = 1 << 16;
/// Pieces of a product for each thread: evens out what the threads have to do.
const PIECES: usize = 6;

thread_local! {
    static INPUT: RefCell<Aligned<u8>> = RefCell::default();
}

/// One quantised matrix: panels of 16 rows, levels and scales apart.
#[derive(Debug, Clone)]
struct Part {
    kind: u8,
    rows: usize,
    levels: Aligned<u8>,
    scales: Aligned<u8>,
}

/// Quantised matrices of the same number of columns, one below the other.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    cols: usize,
    parts: Vec<Part>,
}

impl Part {
    fn new(ty: TensorType, bytes: &[u8], cols: usize) -> Option<Result<Self, usize>> {
        let (kind, row_bytes) = (kind::of(ty)?, ty.row_bytes(cols).filter(|n| *n > 0)?);
        let (rows, blocks) = (bytes.len() / row_bytes, cols / BLOCK);
        let (level_len, scale_len) = (blocks * kind::level_bytes(kind), kind::scale_bytes(kind, blocks));
        let panels = rows.div_ceil(WIDTH);
        let mut levels = Aligned::<u8>::zeroed(panels * level_len);
        let mut scales = Aligned::<u8>::zeroed(panels * scale_len);
        let bad = levels
            .par_chunks_mut(level_len)
            .zip(scales.par_chunks_mut(scale_len))
            .zip(bytes.par_chunks(WIDTH * row_bytes))
            .enumerate()
            .filter_map(|(p, ((levels, scales), rows))| {
                let bad = kind::put_rows(ty, rows, row_bytes, levels, scales);
                bad.map(|(lane, block)| (p * WIDTH + lane) * cols + block * ty.block_len())
            })
            .min();
        Some(bad.map_or(Ok(Self { kind, rows, levels, scales }), Err))
    }

    fn panel(&self, p: usize, blocks: usize) -> Panel<'_> {
        let (levels, scales) = (blocks * kind::level_bytes(self.kind), kind::scale_bytes(self.kind, blocks));
        Panel {
            kind: self.kind,
            blocks,
            levels: &self.levels[p * levels..(p + 1) * levels],
            scales: &self.scales[p * scales..(p + 1) * scales],
        }
    }
}

impl Blocks {
    /// As [`super::Packed::blocks`].
    pub fn new(parts: &[(TensorType, &[u8])], cols: usize) -> Option<Result<Self, usize>> {
        let mut made = Vec::with_capacity(parts.len());
        let mut before = 0;
        for (ty, bytes) in parts {
            match Part::new(*ty, bytes, cols)? {
                Ok(part) => {
                    before += part.rows * cols;
                    made.push(part);
                }
                Err(at) => return Some(Err(before + at)),
            }
        }
        Some(Ok(Self { cols, parts: made }))
    }
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|p| p.rows).sum()
    }
    pub fn size_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.levels.len() + p.scales.len()).sum()
    }

    /// `out[m, rows] (+)= x[m, cols] · Wᵀ` with `x` rounded to 8 bits.
    pub fn forward(&self, x: &[f32], m: usize, out: &mut [f32], add: bool) {
        let (stride, blocks, isa) = (self.rows(), self.cols / BLOCK, Isa::detect());
        assert!(x.len() >= m * self.cols && out.len() >= m * stride, "matrix product: wrong sizes");
        let c = SharedMut::new(out);
        let mut buffer = INPUT.take();
        let input = Input::new(x, self.cols, m, self.cols, &mut buffer);
        let panels: usize = self.parts.iter().map(|p| p.rows.div_ceil(WIDTH)).sum();
        let run = |p: usize| {
            let (mut p, mut at) = (p, 0);
            for part in &self.parts {
                let own = part.rows.div_ceil(WIDTH);
                if p < own {
                    let cols = WIDTH.min(part.rows - p * WIDTH);
                    let to = Place { c, at: at + p * WIDTH, stride, cols, add };
                    // SAFETY: panel `p` is the only writer of its columns of `out`.
                    return unsafe { multiply(isa, &input, part.panel(p, blocks), to) };
                }
                (p, at) = (p - own, at + part.rows);
            }
        };
        if m * self.cols * stride < PARALLEL_FROM {
            (0..panels).for_each(run);
        } else {
            let grain = panels.div_ceil(rayon::current_num_threads() * PIECES).max(1);
            parallel(panels.div_ceil(grain), |i| (i * grain..panels.min((i + 1) * grain)).for_each(run));
        }
        INPUT.set(buffer);
    }

    /// The part with row `row`, and the row's number in it.
    fn find(&self, mut row: usize) -> Option<(&Part, usize)> {
        for part in &self.parts {
            if row < part.rows {
                return Some((part, row));
            }
            row -= part.rows;
        }
        None
    }

    /// Decodes row `row`, bit-equal to [`crate::codec::dequantize`].
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let Some((part, row)) = self.find(row) else { return out.fill(0.0) };
        let panel = part.panel(row / WIDTH, self.cols / BLOCK);
        let mut block = [0.0; BLOCK * WIDTH];
        for (b, out) in out.chunks_mut(BLOCK).enumerate() {
            decode_block(&panel, b, &mut block);
            out.iter_mut().zip(block[row % WIDTH..].iter().step_by(WIDTH)).for_each(|(o, w)| *o = *w);
        }
    }

    /// Decodes inputs `from..from + k` (`from` a multiple of 32) of rows `first..first + 32` as `[input][row]`; rows
    /// that do not exist are 0.
    pub fn panel(&self, first: usize, from: usize, k: usize, out: &mut [f32]) {
        let mut block = [0.0; BLOCK * WIDTH];
        let mut at = 0;
        while at < LANES {
            let Some((part, row)) = self.find(first + at) else {
                out.chunks_exact_mut(LANES).for_each(|step| step[at..].fill(0.0));
                return;
            };
            // Rows side by side in one panel.
            let lane = row % WIDTH;
            let n = (WIDTH - lane).min(part.rows - row).min(LANES - at);
            let panel = part.panel(row / WIDTH, self.cols / BLOCK);
            for (i, out) in out[..k * LANES].chunks_mut(BLOCK * LANES).enumerate() {
                decode_block(&panel, from / BLOCK + i, &mut block);
                for (out, step) in out.chunks_exact_mut(LANES).zip(block.chunks_exact(WIDTH)) {
                    out[at..at + n].copy_from_slice(&step[lane..lane + n]);
                }
            }
            at += n;
        }
    }
}

wide! {
    /// Decodes block `b` of a panel as `[input][output]`, in the order of operations of ggml.
    fn decode_block[FMA](panel: &Panel<'_>, b: usize, out: &mut [f32; BLOCK * WIDTH]) {
        let _ = FMA; // ggml multiplies and adds in two roundings
        match panel.kind {
            kind::Q8 => decode::<{ kind::Q8 }>(panel, b, out),
            kind::Q4 => decode::<{ kind::Q4 }>(panel, b, out),
            kind::Q4_MIN => decode::<{ kind::Q4_MIN }>(panel, b, out),
            kind::Q5 => decode::<{ kind::Q5 }>(panel, b, out),
            kind::Q5_MIN => decode::<{ kind::Q5_MIN }>(panel, b, out),
            kind::Q4_K => decode::<{ kind::Q4_K }>(panel, b, out),
            kind::Q5_K => decode::<{ kind::Q5_K }>(panel, b, out),
            _ => decode::<{ kind::Q6_K }>(panel, b, out),
        }
    }
}

#[inline(always)]
fn decode<const KIND: u8>(panel: &Panel<'_>, b: usize, out: &mut [f32; BLOCK * WIDTH]) {
    let bytes = &panel.levels[b * kind::level_bytes(KIND)..][..kind::level_bytes(KIND)];
    let (mut scales, mut min) = ([[0.0f32; WIDTH]; 2], [0.0f32; WIDTH]);
    for lane in 0..WIDTH {
        let (s, m) = kind::scales_of(KIND, panel.scales, lane, b);
        (scales[0][lane], scales[1][lane], min[lane]) = (s[0], s[1], m);
    }
    let shift = if kind::offset(KIND) > 0 { 1i32 << kind::offset(KIND) } else { 0 };
    for j in 0..BLOCK / 4 {
        let mut words = [0u32; WIDTH];
        for (lane, w) in words.iter_mut().enumerate() {
            *w = kind::step_levels(KIND, bytes, lane, j);
        }
        for byte in 0..4 {
            let step = &mut out[(4 * j + byte) * WIDTH..][..WIDTH];
            for lane in 0..WIDTH {
                let level = ((words[lane] >> (8 * byte)) & 255).cast_signed() - shift;
                let value = level as f32 * scales[j / 4][lane];
                step[lane] = if kind::has_min(KIND) { value + min[lane] } else { value };
            }
        }
    }
}

/// Levels of at most 32 values in 8 bits and their scale, as the Q8_0 of llama.cpp has it: `x ≈ scale · level`.
pub(crate) fn to_q8(x: &[f32]) -> ([i8; BLOCK], f16) {
    let top = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff)); // a NaN is above all else
    let scale = f16::from_f32(f32::from_bits(top) / 127.0);
    let inverse = 1.0 / scale.to_f32();
    let mut levels = [0i8; BLOCK];
    if inverse.is_finite() {
        for (l, v) in levels.iter_mut().zip(x) {
            *l = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
    }
    (levels, scale)
}

/// Stores at most 32 values as block `b` of output `lane` of a [`Q8`] panel.
pub(crate) fn put_q8(levels: &mut [u8], scales: &mut [u8], b: usize, lane: usize, x: &[f32]) {
    let (values, scale) = to_q8(x);
    let four = |t: usize| std::array::from_fn(|i| values[4 * t + i].cast_unsigned() ^ 0x80);
    let words = std::array::from_fn(|t| u32::from_le_bytes(four(t)));
    kind::put_levels(Q8, &mut levels[b * level_bytes(Q8)..], lane, words);
    scales[(b * WIDTH + lane) * 2..][..2].copy_from_slice(&scale.to_le_bytes());
}

#[cfg(test)]
mod tests;
