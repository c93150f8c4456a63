//! Export for NPUs that compute on integers: a tensor pack of asymmetric INT4, INT6 or INT8 weights with power-of-two
//! scales, and a manifest with everything a runtime needs.
//!
//! A folder with two files. `weights.bin` holds the tensors one after the other, each at a multiple of 64 bytes:
//!
//! - a quantised matrix of `rows × columns`: the levels row by row, each row packed on its own into whole bytes
//!   (two's complement, least significant bit first); then one byte `n` for each group, row by row; then one signed
//!   byte `z` for each group. A group is `group_len` columns of a row (the last one may be shorter), and
//!   `w = 2⁻ⁿ · (q - z)` with `n` in 3..=8 and `z` in -7..=7;
//! - a vector: little-endian f32.
//!
//! `manifest.json` is [`Manifest`]: version, profile, the digest of the pack and of the base, and where every tensor is.

mod grid;
mod pack;

pub use grid::{EXPONENTS, Group, ZERO_POINTS};
pub use pack::{Entry, Manifest, NpuPack, PackError};

use super::profile::is_matrix;
use super::{Imatrix, Progress, QuantizeError};
use crate::calibrate::output_tensor;
use crate::gguf::{Gguf, GgufError, TensorInfo};
use grid::{pack as pack_levels, row_bytes};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{fs, io::Write, ops::ControlFlow, path::Path, str::FromStr};

/// Width of the integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NpuProfile {
    #[serde(rename = "npu-int4")]
    Int4,
    #[serde(rename = "npu-int6")]
    Int6,
    #[serde(rename = "npu-int8")]
    Int8,
}

impl NpuProfile {
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Self::Int4 => 4,
            Self::Int6 => 6,
            Self::Int8 => 8,
        }
    }
}

impl FromStr for NpuProfile {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "npu-int4" => Ok(Self::Int4),
            "npu-int6" => Ok(Self::Int6),
            "npu-int8" => Ok(Self::Int8),
            other => Err(format!("`{other}` is not an NPU profile; known are npu-int4, npu-int6, npu-int8")),
        }
    }
}

/// Weights that share a scale and a zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// A whole row (an output channel).
    Channel,
    /// So many columns of a row.
    Columns(usize),
}

/// What to export.
#[derive(Debug, Clone)]
pub struct NpuOptions {
    pub profile: NpuProfile,
    pub grouping: Grouping,
    pub imatrix: Option<Imatrix>,
}

/// Version of the layout.
const VERSION: u32 = 1;
const ALIGNMENT: usize = 64;
pub(super) const WEIGHTS: &str = "weights.bin";
pub(super) const MANIFEST: &str = "manifest.json";

/// Writes the pack of a float model into the new folder `out`. The matrix that makes the logits is always INT8.
///
/// # Errors
/// [`QuantizeError`]; nothing is left under `out` then.
pub fn export(
    base: &Gguf,
    out: &Path,
    options: &NpuOptions,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Manifest, QuantizeError> {
    let part = out.with_extension("part");
    let io = |path: &Path, e| QuantizeError::Gguf(GgufError::Io { path: path.to_owned(), source: e });
    if out.exists() {
        let e = std::io::Error::new(std::io::ErrorKind::AlreadyExists, "the folder exists; choose a new one");
        return Err(io(out, e));
    }
    fs::create_dir_all(&part).map_err(|e| io(&part, e))?;
    let written = write(base, &part, options, progress);
    let manifest = match written {
        Ok(manifest) => fs::rename(&part, out).map(|()| manifest).map_err(|e| io(out, e)),
        Err(e) => Err(e),
    };
    if manifest.is_err() {
        // Best effort: the error that led here is the one worth reporting.
        let _ = fs::remove_dir_all(&part);
    }
    manifest
}

fn write(
    base: &Gguf,
    folder: &Path,
    options: &NpuOptions,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Manifest, QuantizeError> {
    let path = folder.join(WEIGHTS);
    let io = |e| QuantizeError::Gguf(GgufError::Io { path: path.clone(), source: e });
    let mut file = std::io::BufWriter::new(fs::File::create(&path).map_err(io)?);
    let (mut hash, mut at, mut tensors) = (Sha256::new(), 0usize, Vec::new());
    let total = base.tensors().len();
    for (done, tensor) in base.tensors().iter().enumerate() {
        if progress(Progress { done, total, tensor: &tensor.name }).is_break() {
            return Err(QuantizeError::Cancelled);
        }
        let (bytes, entry) = encode(base, tensor, options, at)?;
        let padding = vec![0; bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()];
        for part in [&bytes, &padding] {
            hash.update(part);
            file.write_all(part).map_err(io)?;
        }
        at += bytes.len() + padding.len();
        tensors.push(entry);
    }
    if progress(Progress { done: total, total, tensor: "" }).is_break() {
        return Err(QuantizeError::Cancelled);
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(|f| f.sync_all()).map_err(io)?;
    let manifest = Manifest {
        version: VERSION,
        profile: options.profile,
        architecture: base.str("general.architecture")?.to_owned(),
        base_sha256: crate::model::base_digest(base),
        weights_sha256: hex::encode(hash.finalize()),
        weights_bytes: at as u64,
        tensors,
    };
    manifest.write(folder)?;
    Ok(manifest)
}

fn encode(
    base: &Gguf,
    tensor: &TensorInfo,
    options: &NpuOptions,
    offset: usize,
) -> Result<(Vec<u8>, Entry), QuantizeError> {
    let values = base.dequantize(tensor)?;
    if let Some(index) = values.iter().position(|v| !v.is_finite()) {
        let source = crate::codec::CodecError::NotFinite { index, value: values[index] };
        return Err(QuantizeError::Codec { tensor: tensor.name.clone(), source });
    }
    let (rows, columns) = (tensor.rows(), tensor.row_len());
    let mut entry = Entry {
        name: tensor.name.clone(),
        rows,
        columns,
        bits: 32,
        group_len: columns,
        offset: offset as u64,
        clipped_weights: 0,
        relative_error: 0.0,
    };
    if !is_matrix(tensor) || columns == 0 {
        return Ok((values.iter().flat_map(|v| v.to_le_bytes()).collect(), entry));
    }
    entry.bits = if tensor.name == output_tensor(base) { 8 } else { options.profile.bits() };
    entry.group_len = match options.grouping {
        Grouping::Columns(n) if n > 0 => n.min(columns),
        _ => columns,
    };
    let importance = options.imatrix.as_ref().and_then(|m| m.get(&tensor.name)).filter(|i| i.len() == columns);
    let coded: Vec<CodedRow> =
        values.par_chunks_exact(columns).map(|row| code_row(row, importance.as_deref(), &entry)).collect();
    let mut bytes = Vec::with_capacity(rows * row_bytes(columns, entry.bits));
    coded.iter().for_each(|row| bytes.extend_from_slice(&row.levels));
    coded.iter().for_each(|row| bytes.extend(row.groups.iter().map(|g| g.exponent)));
    coded.iter().for_each(|row| bytes.extend(row.groups.iter().map(|g| g.zero_point.cast_unsigned())));
    let (error, power) = coded.iter().fold((0.0, 0.0), |(e, p), row| (e + row.error, p + row.power));
    entry.clipped_weights = coded.iter().map(|row| row.clipped).sum();
    entry.relative_error = if power > 0.0 { (error / power).sqrt() } else { 0.0 };
    Ok((bytes, entry))
}

struct CodedRow {
    levels: Vec<u8>,
    groups: Vec<Group>,
    clipped: u64,
    error: f64,
    power: f64,
}

fn code_row(row: &[f32], importance: Option<&[f32]>, entry: &Entry) -> CodedRow {
    let mut out = CodedRow { levels: Vec::new(), groups: Vec::new(), clipped: 0, error: 0.0, power: 0.0 };
    let mut levels = Vec::with_capacity(row.len());
    for (i, weights) in row.chunks(entry.group_len).enumerate() {
        let importance = importance.map(|w| &w[i * entry.group_len..][..weights.len()]);
        let group = Group::fit(weights, importance, entry.bits);
        for w in weights {
            let (level, clipped) = group.level(*w, entry.bits);
            out.clipped += u64::from(clipped);
            out.error += f64::from(w - group.value(level)).powi(2);
            out.power += f64::from(*w).powi(2);
            levels.push(level);
        }
        out.groups.push(group);
    }
    pack_levels(&levels, entry.bits, &mut out.levels);
    out
}

#[cfg(test)]
mod tests;
