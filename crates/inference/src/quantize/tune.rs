//! Quantisation on calibration texts, block by block: fold channel scales (AWQ), round with error compensation (GPTQ),
//! keep the better of the results by measured error, and go on with what the quantised block computes.
//!
//! One block is in memory. Finished blocks are kept beside the output until it is complete: a run that was stopped
//! continues there, and its result has the same bytes.

use super::budget;
use super::parts::Parts;
use super::profile::{Choice, Chooser, is_matrix};
use super::run::Run;
use super::tuned::TuneReport;
use super::{Profile, Progress, Provenance, QuantizeError, check_choice, check_overrides};
use crate::gguf::{Gguf, TensorType};
use crate::model::{ModelConfig, base_digest};
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

/// How the types of tensors are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// The named mix.
    Profile(Profile),
    /// The types with the least expected loss in a file of at most this many bytes.
    Budget(u64),
}

/// What to make of a float model.
#[derive(Debug, Clone, PartialEq)]
pub struct TuneOptions {
    pub goal: Goal,
    /// Fold channel scales before rounding.
    pub fold: bool,
    /// Compensate rounding errors within rows.
    pub compensate: bool,
    /// Lower the error of what was compensated further, scales and levels in turn.
    pub refine: bool,
    /// Types of single tensors, by name.
    pub overrides: BTreeMap<String, TensorType>,
    /// The least type of single tensors under a budget, instead of Q6_K for what makes the logits and none for others.
    pub floors: BTreeMap<String, TensorType>,
    pub allow_requantize: bool,
    pub strict_types: bool,
    /// Names of the calibration texts, for the file.
    pub datasets: Vec<String>,
}

impl TuneOptions {
    /// All steps, no exceptions.
    #[must_use]
    pub fn new(goal: Goal) -> Self {
        Self {
            goal,
            fold: true,
            compensate: true,
            refine: true,
            overrides: BTreeMap::new(),
            floors: BTreeMap::new(),
            allow_requantize: false,
            strict_types: false,
            datasets: Vec::new(),
        }
    }
}

/// Makes `out` from the float model `base`, calibrated on `texts` (each run on its own). `progress` may stop the run;
/// called again with the same arguments, it continues.
///
/// # Errors
/// [`QuantizeError`]; nothing appears under `out` then.
pub fn tune(
    base: &Gguf,
    out: &Path,
    texts: &[Vec<u32>],
    options: &TuneOptions,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<TuneReport, QuantizeError> {
    let config = ModelConfig::from_gguf(base, &mut Vec::new())?.plain("tuning")?;
    check_overrides(base, &options.overrides)?;
    check_overrides(base, &options.floors)?;
    let from = Provenance {
        datasets: options.datasets.join(", "),
        entries: (config.layers * 7 + 1) as u32,
        chunks: texts.len() as u32,
    };
    let coded = base.tensors().iter().find(|t| is_matrix(t) && t.ty.is_quantized());
    if let Some(tensor) = coded.filter(|_| !options.allow_requantize) {
        return Err(QuantizeError::AlreadyQuantized { tensor: tensor.name.clone(), ty: tensor.ty });
    }
    let parts = Parts::new(out, fingerprint(base, texts, options));
    let complete = |choices: &Choices| base.tensors().iter().all(|t| choices.contains_key(&t.name));
    let found = parts.find_choices().filter(|(choices, _)| complete(choices));
    let (chosen, new) = match (found, options.goal) {
        (Some(found), _) => (found, false),
        (None, Goal::Profile(profile)) => ((by_profile(base, profile, &options.overrides), None), true),
        (None, Goal::Budget(bytes)) => (budget::choices(base, &config, texts, options, bytes, &from, progress)?, true),
    };
    for tensor in base.tensors() {
        check_choice(tensor, chosen.0[&tensor.name], options.strict_types, options.allow_requantize)?;
    }
    if new {
        parts.keep_choices(&chosen)?;
    }
    let (choices, predicted) = chosen;
    let run = Run { base, config: &config, options, choices: &choices };
    let (blocks, mut tensors) = run.blocks(texts, &parts, progress)?;
    let size_bytes = run.assemble(out, &from, &blocks, &mut tensors)?;
    drop(blocks);
    parts.remove()?;
    Ok(TuneReport { size_bytes, tensors, predicted })
}

/// Types by tensor name.
pub(super) type Choices = BTreeMap<String, Choice>;

fn by_profile(base: &Gguf, profile: Profile, overrides: &BTreeMap<String, TensorType>) -> Choices {
    let chooser = Chooser::new(base, profile, true);
    let choose = |t: &crate::gguf::TensorInfo| chooser.choose_with(t, overrides);
    base.tensors().iter().map(|t| (t.name.clone(), choose(t))).collect()
}

/// Digest of everything that decides the bytes of a block.
fn fingerprint(base: &Gguf, texts: &[Vec<u32>], options: &TuneOptions) -> String {
    let mut hash = Sha256::new();
    hash.update(concat!("3 ", env!("CARGO_PKG_VERSION")));
    hash.update(base_digest(base));
    for text in texts {
        hash.update((text.len() as u64).to_le_bytes());
        text.iter().for_each(|t| hash.update(t.to_le_bytes()));
    }
    let TuneOptions { goal, fold, compensate, refine, overrides, floors, .. } = options;
    // Debug text of plain names and numbers: complete, and stable within a version.
    hash.update(format!("{goal:?} {fold} {compensate} {refine} {overrides:?} {floors:?}"));
    hex::encode(hash.finalize())
}

#[cfg(test)]
mod tests;
