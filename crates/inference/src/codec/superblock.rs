//! Scales of the k-quants: 256 weights in sub-blocks whose scales are themselves quantised.

use super::{
    Fit, MAX_HEADER,
    affine::{self, Candidates},
    lanes::Lanes,
    legacy::half,
    search::{self, Grid, nearest},
};
use half::f16;

const N: usize = 256;
const SUB: usize = 32;
const SUBS: usize = N / SUB;

/// Q4_K (`max` 15) and Q5_K (`max` 31): 8 sub-blocks, 6-bit scales and minima.
#[inline(always)]
pub(super) fn affine<V: Lanes>(x: &[f32], importance: Option<&[f32]>, max: i32) -> Fit {
    let candidates = if max == 15 {
        Candidates { first: -1.0, delta: 0.1, count: 21 }
    } else {
        Candidates { first: -0.5, delta: 0.1, count: 16 }
    };
    let sigma2 = search::sigma2(x);
    let (mut scales, mut mins, mut weights) = ([0.0f32; SUBS], [0.0f32; SUBS], [0.0f32; SUBS]);
    for (s, part) in x.as_chunks::<SUB>().0.iter().enumerate() {
        let mut w = [0.0; SUB];
        search::error_weights(part, importance.map(|q| &q[s * SUB..(s + 1) * SUB]), sigma2, &mut w);
        let line = affine::line::<V>(part, &w, max as f32, true, candidates);
        scales[s] = line.scale;
        mins[s] = -line.offset;
        weights[s] = w.iter().sum();
    }
    let d = half(search::positive(&scales, &weights, 63.0));
    let dmin = half(search::positive(&mins, &weights, 63.0));
    let mut grid = Grid::new(SUB, 0, 0, max);
    let (mut sc, mut mn) = ([0u8; SUBS], [0u8; SUBS]);
    for s in 0..SUBS {
        sc[s] = six_bits(scales[s], d.to_f32());
        mn[s] = six_bits(mins[s], dmin.to_f32());
        grid.step[s] = d.to_f32() * f32::from(sc[s]);
        grid.min[s] = dmin.to_f32() * f32::from(mn[s]);
    }
    let mut header = [0; MAX_HEADER];
    header[..2].copy_from_slice(&d.to_le_bytes());
    header[2..4].copy_from_slice(&dmin.to_le_bytes());
    header[4..16].copy_from_slice(&pack_six_bits(&sc, &mn));
    Fit { grid, header }
}

/// Q4_K, Q5_K: scale and minimum of sub-block `s` as near to these as six bits of the block's steps allow.
pub(super) fn set_affine(fit: &mut Fit, s: usize, step: f32, min: f32) {
    let part = |at: usize| f16::from_le_bytes([fit.header[at], fit.header[at + 1]]).to_f32();
    let (d, dmin) = (part(0), part(2));
    let (mut sc, mut mn) = ([0u8; SUBS], [0u8; SUBS]);
    for j in 0..SUBS {
        (sc[j], mn[j]) = unpack_six_bits(&fit.header[4..16], j);
    }
    (sc[s], mn[s]) = (six_bits(step, d), six_bits(min, dmin));
    fit.grid.step[s] = d * f32::from(sc[s]);
    fit.grid.min[s] = dmin * f32::from(mn[s]);
    fit.header[4..16].copy_from_slice(&pack_six_bits(&sc, &mn));
}

/// Q6_K: scale of sub-block `s` as near to `step` as eight bits of the block's step allow.
pub(super) fn set_symmetric(fit: &mut Fit, s: usize, step: f32) {
    let d = f16::from_le_bytes([fit.header[16], fit.header[17]]).to_f32();
    let q = if d == 0.0 { 0 } else { nearest(step / d).clamp(-128.0, 127.0) as i8 };
    fit.grid.step[s] = d * f32::from(q);
    fit.header[s] = q.cast_unsigned();
}

fn six_bits(x: f32, step: f32) -> u8 {
    if step == 0.0 { 0 } else { nearest(x / step).clamp(0.0, 63.0) as u8 }
}

/// Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each in the low bits of bytes
/// 0..4 and 4..8, the last four as low nibbles in bytes 8..12 with their top two bits above the first four.
fn pack_six_bits(sc: &[u8; SUBS], mn: &[u8; SUBS]) -> [u8; 12] {
    let mut out = [0; 12];
    for j in 0..4 {
        out[j] = sc[j] | (sc[j + 4] >> 4) << 6;
        out[j + 4] = mn[j] | (mn[j + 4] >> 4) << 6;
        out[j + 8] = (sc[j + 4] & 15) | (mn[j + 4] & 15) << 4;
    }
    out
}

/// The inverse of [`pack_six_bits`] for sub-block `j`: scale and minimum.
pub(crate) fn unpack_six_bits(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    }
}

/// Q6_K: 16 sub-blocks of 16, signed 8-bit scales, no minimum.
#[inline(always)]
pub(super) fn symmetric<V: Lanes>(x: &[f32], importance: Option<&[f32]>) -> Fit {
    const SUB: usize = 16;
    let sigma2 = search::sigma2(x);
    let mut scales = [0.0f32; N / SUB];
    for (s, part) in x.as_chunks::<SUB>().0.iter().enumerate() {
        let mut w = [0.0; SUB];
        search::error_weights(part, importance.map(|q| &q[s * SUB..(s + 1) * SUB]), sigma2, &mut w);
        scales[s] = search::symmetric::<V, _>(part, &w, 32);
    }
    let extreme = scales.iter().fold(0.0f32, |m, &s| if s.abs() > m.abs() { s } else { m });
    let d = half(extreme / -128.0);
    let mut grid = Grid::new(SUB, 32, 0, 63);
    let mut header = [0; MAX_HEADER];
    for (s, &scale) in scales.iter().enumerate() {
        let q = if d.to_f32() == 0.0 { 0 } else { nearest(scale / d.to_f32()).clamp(-128.0, 127.0) as i8 };
        grid.step[s] = d.to_f32() * f32::from(q);
        header[s] = q.cast_unsigned();
    }
    header[16..18].copy_from_slice(&d.to_le_bytes());
    Fit { grid, header }
}
