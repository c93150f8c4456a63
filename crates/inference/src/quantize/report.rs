//! What a quantisation really did: type, fallback, size and error of every tensor.

use super::{Profile, profile::Choice};
use crate::gguf::{TensorInfo, TensorType};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

/// What every report says of a tensor of the new file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorRow {
    pub name: String,
    pub from: TensorType,
    pub to: TensorType,
    /// The type that was wanted, where rows are not whole blocks of it.
    pub fallback_from: Option<TensorType>,
    pub weights: u64,
    pub size_bytes: u64,
}

impl TensorRow {
    pub(super) fn new(tensor: &TensorInfo, choice: Choice, size_bytes: usize) -> Self {
        Self {
            name: tensor.name.clone(),
            from: tensor.ty,
            to: choice.actual,
            fallback_from: (choice.wanted != choice.actual).then_some(choice.wanted),
            weights: tensor.n_elements() as u64,
            size_bytes: size_bytes as u64,
        }
    }
}

/// TRUE bits per weight: all tensor bytes over all weights, times 8.
pub(super) fn bits_per_weight<'a>(rows: impl Iterator<Item = &'a TensorRow>) -> f64 {
    let (bytes, weights) = rows.fold((0, 0), |(b, w), t| (b + t.size_bytes, w + t.weights));
    8.0 * bytes as f64 / weights.max(1) as f64
}

/// One tensor of the result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorReport {
    #[serde(flatten)]
    pub row: TensorRow,
    /// Whether importance was used.
    pub weighted: bool,
    /// Input channels without importance, which got the mean one.
    pub filled_channels: usize,
    /// Root mean square error over root mean square, against the base as given; 0 if copied.
    pub relative_error: f64,
}

/// The whole result.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizeReport {
    pub profile: Profile,
    /// Size of the file.
    pub size_bytes: u64,
    pub tensors: Vec<TensorReport>,
}

impl QuantizeReport {
    /// TRUE bits per weight: all tensor bytes over all weights. Fallbacks and the embedding make it larger than
    /// the profile's name says.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        bits_per_weight(self.tensors.iter().map(|t| &t.row))
    }
    /// Number of tensors of each type.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<TensorType, usize> {
        self.tensors.iter().fold(BTreeMap::new(), |mut m, t| {
            *m.entry(t.row.to).or_default() += 1;
            m
        })
    }
    /// Tensors that did not get the type the profile wanted.
    pub fn fallbacks(&self) -> impl Iterator<Item = &TensorReport> {
        self.tensors.iter().filter(|t| t.row.fallback_from.is_some())
    }
}

impl fmt::Display for QuantizeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes, {:.3} bits per weight", self.profile, self.size_bytes, self.bits_per_weight())?;
        for (ty, n) in self.counts() {
            write!(f, ", {n} {ty}")?;
        }
        match self.fallbacks().count() {
            0 => {}
            n => write!(f, "; fallbacks, since rows are not whole blocks: {n}")?,
        }
        for t in self.tensors.iter().filter(|t| t.filled_channels > 0) {
            write!(f, "; `{}` has {} channels without importance", t.row.name, t.filled_channels)?;
        }
        Ok(())
    }
}
