//! What a quantisation really did: type, fallback, size and error of every tensor.

use super::Profile;
use crate::gguf::TensorType;
use std::{collections::BTreeMap, fmt};

/// One tensor of the result.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorReport {
    pub name: String,
    pub from: TensorType,
    pub to: TensorType,
    /// The type that the profile wanted, where rows are not whole blocks of it.
    pub fallback_from: Option<TensorType>,
    /// Whether importance was used.
    pub weighted: bool,
    /// Input channels without importance, which got the mean one.
    pub filled_channels: usize,
    pub weights: u64,
    pub size_bytes: u64,
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
    #[must_use]
    pub fn weights(&self) -> u64 {
        self.tensors.iter().map(|t| t.weights).sum()
    }
    /// TRUE bits per weight: all tensor bytes over all weights. Fallbacks and the embedding make it larger than
    /// the profile's name says.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        let bytes: u64 = self.tensors.iter().map(|t| t.size_bytes).sum();
        8.0 * bytes as f64 / self.weights().max(1) as f64
    }
    /// Number of tensors of each type.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<TensorType, usize> {
        self.tensors.iter().fold(BTreeMap::new(), |mut m, t| {
            *m.entry(t.to).or_default() += 1;
            m
        })
    }
    /// Tensors that did not get the type the profile wanted.
    pub fn fallbacks(&self) -> impl Iterator<Item = &TensorReport> {
        self.tensors.iter().filter(|t| t.fallback_from.is_some())
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
            write!(f, "; `{}` has {} channels without importance", t.name, t.filled_channels)?;
        }
        Ok(())
    }
}
