//! How scales and levels are laid out in the bytes of a block. Decoding follows ggml operation by operation,
//! so results are bit-exact.

use super::{Fit, nonlinear::CODEBOOK, superblock::unpack_six_bits};
use crate::gguf::TensorType;
use half::f16;

/// Stores one block. `levels` and `out` have the block's lengths; float types store nothing.
pub fn pack(ty: TensorType, fit: &Fit, levels: &[i8], out: &mut [u8]) {
    match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => {}
        TensorType::Q4_0 | TensorType::Iq4Nl => pack_32(&fit.header[..2], levels, false, out),
        TensorType::Q4_1 => pack_32(&fit.header[..4], levels, false, out),
        TensorType::Q5_0 => pack_32(&fit.header[..2], levels, true, out),
        TensorType::Q5_1 => pack_32(&fit.header[..4], levels, true, out),
        TensorType::Q8_0 => {
            out[..2].copy_from_slice(&fit.header[..2]);
            for (o, l) in out[2..].iter_mut().zip(levels) {
                *o = l.cast_unsigned();
            }
        }
        TensorType::Q4K | TensorType::Q5K => pack_k(&fit.header[..16], levels, ty == TensorType::Q5K, out),
        TensorType::Q6K => pack_q6_k(&fit.header, levels, out),
    }
}

/// Level `j` in the low nibble of byte `j`, level `j + 16` in the high one; fifth bits in a little-endian word.
fn pack_32(header: &[u8], levels: &[i8], five_bits: bool, out: &mut [u8]) {
    let (head, rest) = out.split_at_mut(header.len());
    head.copy_from_slice(header);
    let nibbles = if five_bits {
        let high = levels.iter().enumerate().fold(0u32, |m, (j, &l)| m | u32::from(l >= 16) << j);
        let (word, nibbles) = rest.split_at_mut(4);
        word.copy_from_slice(&high.to_le_bytes());
        nibbles
    } else {
        rest
    };
    for (j, o) in nibbles.iter_mut().enumerate() {
        *o = (levels[j].cast_unsigned() & 15) | (levels[j + 16].cast_unsigned() & 15) << 4;
    }
}

/// Pairs of sub-blocks of 32 share bytes: the even one in the low nibbles. Fifth bits: bit `s` of byte `i`
/// belongs to weight `i` of sub-block `s`.
fn pack_k(header: &[u8], levels: &[i8], five_bits: bool, out: &mut [u8]) {
    out[..16].copy_from_slice(header);
    let nibbles = if five_bits {
        let (high, nibbles) = out[16..].split_at_mut(32);
        high.fill(0);
        for (i, l) in levels.iter().enumerate() {
            high[i % 32] |= u8::from(*l >= 16) << (i / 32);
        }
        nibbles
    } else {
        &mut out[16..]
    };
    for (pair, o) in nibbles.chunks_mut(32).enumerate() {
        for (i, o) in o.iter_mut().enumerate() {
            let at = pair * 64 + i;
            *o = (levels[at].cast_unsigned() & 15) | (levels[at + 32].cast_unsigned() & 15) << 4;
        }
    }
}

/// Halves of 128: four groups of 32; groups 0/2 and 1/3 share bytes of low nibbles, all four share a byte of
/// top bits.
fn pack_q6_k(header: &[u8], levels: &[i8], out: &mut [u8]) {
    for half in 0..2 {
        for i in 0..32 {
            let q = |group: usize| levels[half * 128 + group * 32 + i].cast_unsigned();
            out[half * 64 + i] = (q(0) & 15) | (q(2) & 15) << 4;
            out[half * 64 + 32 + i] = (q(1) & 15) | (q(3) & 15) << 4;
            out[128 + half * 32 + i] = q(0) >> 4 | (q(1) >> 4) << 2 | (q(2) >> 4) << 4 | (q(3) >> 4) << 6;
        }
    }
    out[192..210].copy_from_slice(header);
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Decodes one block of a quantised type; `block` and `out` have the block's lengths.
pub fn decode_block(ty: TensorType, block: &[u8], out: &mut [f32]) {
    match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => {}
        TensorType::Q4_0 => {
            let d = half_at(block, 0);
            for (j, b) in block[2..18].iter().enumerate() {
                out[j] = (i32::from(b & 15) - 8) as f32 * d;
                out[j + 16] = (i32::from(b >> 4) - 8) as f32 * d;
            }
        }
        TensorType::Iq4Nl => {
            let d = half_at(block, 0);
            for (j, b) in block[2..18].iter().enumerate() {
                out[j] = d * f32::from(CODEBOOK[usize::from(b & 15)]);
                out[j + 16] = d * f32::from(CODEBOOK[usize::from(b >> 4)]);
            }
        }
        TensorType::Q4_1 => {
            let (d, m) = (half_at(block, 0), half_at(block, 2));
            for (j, b) in block[4..20].iter().enumerate() {
                out[j] = f32::from(b & 15) * d + m;
                out[j + 16] = f32::from(b >> 4) * d + m;
            }
        }
        TensorType::Q5_0 => {
            let d = half_at(block, 0);
            five_bits(&block[2..22], |j, q| out[j] = (i32::from(q) - 16) as f32 * d);
        }
        TensorType::Q5_1 => {
            let (d, m) = (half_at(block, 0), half_at(block, 2));
            five_bits(&block[4..24], |j, q| out[j] = f32::from(q) * d + m);
        }
        TensorType::Q8_0 => {
            let d = half_at(block, 0);
            for (o, b) in out.iter_mut().zip(&block[2..34]) {
                *o = f32::from(b.cast_signed()) * d;
            }
        }
        TensorType::Q4K | TensorType::Q5K => decode_k(block, ty == TensorType::Q5K, out),
        TensorType::Q6K => decode_q6_k(block, out),
    }
}

fn five_bits(raw: &[u8], mut put: impl FnMut(usize, u8)) {
    let high = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
    for (j, b) in raw[4..20].iter().enumerate() {
        put(j, (b & 15) | (((high >> j) & 1) as u8 * 16));
        put(j + 16, (b >> 4) | (((high >> (j + 16)) & 1) as u8 * 16));
    }
}

fn decode_k(block: &[u8], five_bits: bool, out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (high, nibbles) = if five_bits { (&block[16..48], &block[48..176]) } else { (&[][..], &block[16..144]) };
    for (s, out) in out.chunks_mut(32).enumerate() {
        let (sc, mn) = unpack_six_bits(&block[4..16], s);
        let (step, min) = (d * f32::from(sc), dmin * f32::from(mn));
        let bytes = &nibbles[s / 2 * 32..s / 2 * 32 + 32];
        for (i, (o, b)) in out.iter_mut().zip(bytes).enumerate() {
            let low = if s % 2 == 0 { b & 15 } else { b >> 4 };
            let fifth = high.get(i).map_or(0, |h| (h >> s) & 1);
            *o = step * f32::from(low | fifth << 4) - min;
        }
    }
}

fn decode_q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    for (i, o) in out.iter_mut().enumerate() {
        let (half, group, j) = (i / 128, i / 32 % 4, i % 32);
        let low = block[half * 64 + group % 2 * 32 + j] >> (group / 2 * 4) & 15;
        let top = block[128 + half * 32 + j] >> (group * 2) & 3;
        let q = i32::from(low | top << 4) - 32;
        let scale = block[192 + i / 16].cast_signed();
        *o = d * f32::from(scale) * q as f32;
    }
}
