//! Finished blocks of a run, one small GGUF file each, so that an interrupted run continues where it stopped.

use super::tune::Choices;
use super::{Predicted, QuantizeError, TunedTensor};
use crate::gguf::{Gguf, GgufError, TensorData, TensorSpec, write};
use std::path::{Path, PathBuf};

const FINGERPRINT: &str = "flywheel.part.fingerprint";
const REPORT: &str = "flywheel.part.report";

const CHOICES: &str = "choices.json";

/// Types of all tensors, and what they promise under a budget.
pub(super) type Chosen = (Choices, Option<Predicted>);

/// The folder of a run's finished blocks, beside its output.
#[derive(Debug)]
pub(super) struct Parts {
    folder: PathBuf,
    /// What decides the bytes of every part; a part of another run is not used.
    fingerprint: String,
}

impl Parts {
    /// Nothing is made on disk before [`Parts::keep_choices`].
    pub fn new(out: &Path, fingerprint: String) -> Self {
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(".parts");
        Self { folder: out.with_file_name(name), fingerprint }
    }
    /// The types that this run had measured and chosen before it was stopped.
    pub fn find_choices(&self) -> Option<Chosen> {
        let bytes = std::fs::read(self.folder.join(CHOICES)).ok()?;
        let (fingerprint, chosen): (String, Chosen) = serde_json::from_slice(&bytes).ok()?;
        (fingerprint == self.fingerprint).then_some(chosen)
    }

    /// Keeps the chosen types.
    ///
    /// # Errors
    /// [`GgufError::Io`].
    pub fn keep_choices(&self, chosen: &Chosen) -> Result<(), GgufError> {
        std::fs::create_dir_all(&self.folder).map_err(|e| GgufError::io(&self.folder, e))?;
        let path = self.folder.join(CHOICES);
        let text =
            serde_json::to_vec(&(&self.fingerprint, chosen)).map_err(|e| GgufError::Write { what: e.to_string() })?;
        std::fs::write(&path, text).map_err(|e| GgufError::io(&path, e))
    }

    fn path(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("block-{layer:05}.gguf"))
    }

    /// A finished block of this run, and its report.
    pub fn find(&self, layer: usize) -> Option<(Gguf, Vec<TunedTensor>)> {
        let part = Gguf::open(&self.path(layer)).ok()?;
        let same = part.str(FINGERPRINT).is_ok_and(|f| f == self.fingerprint);
        let report = serde_json::from_str(part.str(REPORT).ok().filter(|_| same)?).ok()?;
        Some((part, report))
    }

    /// Keeps a block, durably, and opens it with its report.
    ///
    /// # Errors
    /// [`QuantizeError::Gguf`].
    pub fn keep(
        &self,
        layer: usize,
        report: &[TunedTensor],
        tensors: Vec<(TensorSpec, Vec<u8>)>,
    ) -> Result<(Gguf, Vec<TunedTensor>), QuantizeError> {
        let report = serde_json::to_string(report).map_err(|e| GgufError::Write { what: e.to_string() })?;
        let metadata =
            [(FINGERPRINT.to_owned(), self.fingerprint.as_str().into()), (REPORT.to_owned(), report.as_str().into())];
        let tensors = tensors.into_iter().map(|(spec, bytes)| (spec, TensorData::Bytes(bytes.into())));
        write(&self.path(layer), &metadata, tensors)?;
        // Read back: the numbers of a report are the same whether a run was interrupted or not.
        self.find(layer).ok_or_else(|| GgufError::Write { what: "a finished part cannot be read".into() }.into())
    }

    /// Removes the folder of a finished run.
    ///
    /// # Errors
    /// [`GgufError::Io`].
    pub fn remove(self) -> Result<(), GgufError> {
        std::fs::remove_dir_all(&self.folder).map_err(|e| GgufError::io(&self.folder, e))
    }
}
