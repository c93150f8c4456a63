//! Every block type decoded by ggml's own `to_float`, bit for bit.

use super::{python, there};
use crate::codec::dequantize;
use crate::gguf::TensorType;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

const BLOCKS: usize = 512;

/// Random blocks; no scale is an infinity or a NaN, whose payload bits are nobody's contract.
fn blocks(ty: TensorType, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let halves: &[usize] = match ty {
        TensorType::F16 | TensorType::BF16 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
        _ => &[0],
    };
    let mut out = vec![0; BLOCKS * ty.block_bytes()];
    rng.fill_bytes(&mut out);
    for block in out.chunks_mut(ty.block_bytes()) {
        for at in halves {
            // exponents from subnormal to 2^15, both signs
            if block[at + 1] & 0x7c == 0x7c {
                block[at + 1] = (block[at + 1] & 0x83) | (rng.random_range(0..31u8) << 2);
            }
        }
    }
    out
}

#[test]
fn every_type_is_decoded_to_the_bits_of_ggml() {
    if !there() {
        return;
    }
    let types: Vec<TensorType> = (0..64).filter_map(TensorType::from_id).filter(|ty| *ty != TensorType::F32).collect();
    assert!(types.len() >= 11, "{types:?}");
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("blocks"), folder.path().join("weights"));
    let (mut file, mut ours) = (Vec::new(), Vec::new());
    for ty in &types {
        let bytes = blocks(*ty, &mut rng);
        let n = BLOCKS * ty.block_len();
        file.extend(ty.id().to_le_bytes());
        file.extend((n as u64).to_le_bytes());
        file.extend((bytes.len() as u64).to_le_bytes());
        file.extend_from_slice(&bytes);
        ours.push(dequantize(*ty, &bytes, n).unwrap());
    }
    std::fs::write(&source, file).unwrap();
    assert!(python(&["dequantize"]).arg(&source).arg(&target).status().unwrap().success());
    let stock = std::fs::read(&target).unwrap();
    let mut stock = stock.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
    for (ty, ours) in types.iter().zip(&ours) {
        for (i, v) in ours.iter().enumerate() {
            let want = stock.next().unwrap();
            assert_eq!(v.to_bits(), want, "{ty}: weight {i} is {v}, stock has {}", f32::from_bits(want));
        }
    }
    assert_eq!(stock.next(), None);
}
