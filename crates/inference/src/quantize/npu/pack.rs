//! The manifest of a tensor pack, and reading a pack back.

use super::grid::{EXPONENTS, Group, ZERO_POINTS, row_bytes, unpack};
use super::{MANIFEST, NpuProfile, VERSION, WEIGHTS};
use crate::gguf::GgufError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{fs, path::Path};

/// What `manifest.json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub version: u32,
    pub profile: NpuProfile,
    pub architecture: String,
    /// [`crate::model::base_digest`] of the model it was made of.
    pub base_sha256: String,
    pub weights_sha256: String,
    pub weights_bytes: u64,
    /// In order of their offsets.
    pub tensors: Vec<Entry>,
}

/// One tensor of a pack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub rows: usize,
    pub columns: usize,
    /// 4, 6 or 8; 32 for f32 values.
    pub bits: u32,
    /// Columns of a row that share a scale and a zero point.
    pub group_len: usize,
    /// First byte in `weights.bin`.
    pub offset: u64,
    /// Weights beyond the range of their group: the largest scale is 2⁻³.
    pub clipped_weights: u64,
    /// Root mean square error over root mean square of the weights.
    pub relative_error: f64,
}

impl Entry {
    /// Groups of the whole tensor.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.rows * self.columns.div_ceil(self.group_len.max(1))
    }
    /// Bytes without padding, `None` if they cannot be.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        if self.bits == 32 {
            return self.rows.checked_mul(self.columns)?.checked_mul(4);
        }
        let row = self.columns.checked_mul(self.bits as usize)?.div_ceil(8);
        let groups = self.columns.div_ceil(self.group_len.max(1)).checked_mul(2)?;
        self.rows.checked_mul(row.checked_add(groups)?)
    }
}

impl Manifest {
    pub(super) fn write(&self, folder: &Path) -> Result<(), GgufError> {
        let path = folder.join(MANIFEST);
        let text = serde_json::to_vec_pretty(self).map_err(|e| GgufError::Write { what: e.to_string() })?;
        fs::write(&path, text).map_err(|source| GgufError::Io { path, source })
    }
}

/// Why a pack could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error("{path}: {source}")]
    Io {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("not a tensor pack: {0}")]
    Malformed(String),
}

/// An opened pack.
#[derive(Debug)]
pub struct NpuPack {
    pub manifest: Manifest,
    weights: Vec<u8>,
}

impl NpuPack {
    /// Reads and checks a folder that [`super::export`] made.
    ///
    /// # Errors
    /// [`PackError`] for files that are absent, changed, or whose entries lie outside.
    pub fn open(folder: &Path) -> Result<Self, PackError> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).map_err(|source| PackError::Io { path: path.display().to_string(), source })
        };
        let bad = |what: String| Err(PackError::Malformed(what));
        let manifest: Manifest =
            serde_json::from_slice(&read(MANIFEST)?).map_err(|e| PackError::Malformed(format!("{MANIFEST}: {e}")))?;
        if manifest.version != VERSION {
            return bad(format!("version {}, this program reads {VERSION}", manifest.version));
        }
        let weights = read(WEIGHTS)?;
        if hex::encode(Sha256::digest(&weights)) != manifest.weights_sha256 {
            return bad(format!("{WEIGHTS} is not the file of the manifest; copy it again"));
        }
        for t in &manifest.tensors {
            let end = t.bytes().and_then(|n| (t.offset as usize).checked_add(n));
            if !matches!(t.bits, 4 | 6 | 8 | 32) || end.is_none_or(|end| end > weights.len()) {
                return bad(format!("tensor `{}` is not inside {WEIGHTS}", t.name));
            }
        }
        Ok(Self { manifest, weights })
    }

    /// All values of a tensor, row-major.
    ///
    /// # Errors
    /// [`PackError::Malformed`] for a name that is not there, or a scale or zero point that is not allowed.
    pub fn tensor(&self, name: &str) -> Result<Vec<f32>, PackError> {
        let entry = self.manifest.tensors.iter().find(|t| t.name == name);
        let t = entry.ok_or_else(|| PackError::Malformed(format!("there is no tensor `{name}`")))?;
        let bytes = &self.weights[t.offset as usize..][..t.bytes().unwrap_or(0)];
        if t.bits == 32 {
            return Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
        }
        let row_len = row_bytes(t.columns, t.bits);
        let (levels, parameters) = bytes.split_at(t.rows * row_len);
        let (exponents, zeros) = parameters.split_at(t.groups());
        let per_row = t.columns.div_ceil(t.group_len.max(1));
        let mut out = Vec::with_capacity(t.rows * t.columns);
        let mut row = vec![0; t.columns];
        for (i, packed) in levels.chunks_exact(row_len.max(1)).enumerate() {
            unpack(packed, t.bits, &mut row);
            for (g, levels) in row.chunks(t.group_len.max(1)).enumerate() {
                let at = i * per_row + g;
                let group = Group { exponent: exponents[at], zero_point: zeros[at].cast_signed() };
                if !EXPONENTS.contains(&group.exponent) || !ZERO_POINTS.contains(&group.zero_point) {
                    return Err(PackError::Malformed(format!("`{name}`: group {at} is {group:?}")));
                }
                out.extend(levels.iter().map(|l| group.value(*l)));
            }
        }
        Ok(out)
    }
}
