//! Saved training states: versioned, bound to one run, checked as a whole before anything is used.

use super::{Distillation, Sample, TrainConfig, Trainable, optimizer::Adam};
use crate::model::{Decoder, ModelError};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"FLYWLORA";
const VERSION: u32 = 2;
/// Magic, version, fingerprint, step, number of values.
const HEAD: usize = 8 + 4 + 32 + 8 + 8;
const DIGEST: usize = 32;

/// Digest of what decides a run's result.
pub(super) fn fingerprint(
    decoder: &Decoder,
    trainable: &Trainable,
    config: &TrainConfig,
    samples: &[Sample],
) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(decoder.base_digest());
    // Debug text of plain numbers: complete and stable within a version of the format.
    hash.update(format!("{VERSION} {trainable:?} {config:?}"));
    for sample in samples {
        hash.update((sample.tokens.len() as u64).to_le_bytes());
        hash.update((sample.answer_from as u64).to_le_bytes());
        sample.tokens.iter().for_each(|t| hash.update(t.to_le_bytes()));
        hash.update((sample.weights.len() as u64).to_le_bytes());
        sample.weights.iter().for_each(|w| hash.update(w.to_le_bytes()));
    }
    hash.finalize().into()
}

/// The digest of the same run with a teacher.
pub(super) fn with_teacher(fingerprint: &[u8; 32], teacher: &Decoder, how: Distillation) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(fingerprint);
    hash.update(teacher.base_digest());
    hash.update(format!("{how:?}"));
    hash.finalize().into()
}

pub(super) fn encode(fingerprint: &[u8; 32], step: usize, values: &[f32], adam: &Adam) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + values.len() * 12 + DIGEST);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(fingerprint);
    out.extend_from_slice(&(step as u64).to_le_bytes());
    out.extend_from_slice(&(values.len() as u64).to_le_bytes());
    for v in values.iter().chain(&adam.mean).chain(&adam.square) {
        out.extend_from_slice(&v.to_le_bytes());
    }
    let digest = Sha256::digest(&out);
    out.extend_from_slice(&digest);
    out
}

pub(super) fn decode(bytes: &[u8], fingerprint: &[u8; 32], len: usize) -> Result<(usize, Vec<f32>, Adam), ModelError> {
    if bytes.len() < HEAD + DIGEST || &bytes[..8] != MAGIC {
        return Err(ModelError::state("these bytes are not a saved training state"));
    }
    let version = u32::from_le_bytes(array(&bytes[8..12]));
    if version != VERSION {
        return Err(ModelError::state(format!("version {version}, this program reads {VERSION}")));
    }
    let (body, digest) = bytes.split_at(bytes.len() - DIGEST);
    if Sha256::digest(body).as_slice() != digest {
        return Err(ModelError::state("damaged or cut short: the digest does not match; start the training anew"));
    }
    if &body[12..44] != fingerprint {
        return Err(ModelError::state("it belongs to another model, configuration or set of samples"));
    }
    let step = u64::from_le_bytes(array(&body[44..52])) as usize;
    let count = u64::from_le_bytes(array(&body[52..60]));
    if count != len as u64 || body.len() != HEAD + len * 12 {
        return Err(ModelError::state(format!("it has {count} values, this run has {len}")));
    }
    let mut floats = body[HEAD..].chunks_exact(4).map(|b| f32::from_le_bytes(array(b)));
    let mut take = || floats.by_ref().take(len).collect::<Vec<f32>>();
    let values = take();
    Ok((step, values, Adam { mean: take(), square: take() }))
}

/// The first `N` bytes; callers pass at least that many.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[..N]);
    out
}
