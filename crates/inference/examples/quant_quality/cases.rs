//! What is quantised to what, and the bars it is held against.

use crate::Result;
use flywheel_inference::gguf::{Gguf, TensorType};
use flywheel_inference::model::ModelConfig;
use flywheel_inference::quantize::{Fold, Profile};
use std::path::{Path, PathBuf};

/// A float model and a size.
pub struct Case {
    pub name: &'static str,
    pub base: Base,
    pub profile: Profile,
    /// By how much the mean divergence must be lower than that of stock with the same calibration text.
    pub wanted: f64,
}

/// Where the float model comes from.
#[derive(Clone, Copy)]
pub enum Base {
    /// SmolLM2-135M with badly scaled channels of this spread (`Fold::noise`): the same function off the lattice on which
    /// its published weights lie.
    OffGrid(f32),
    /// The model that `cargo xtask model tiny` trains; its rows are whole k-quant blocks.
    Tiny,
}

pub const CASES: &[Case] = &[
    Case { name: "SmolLM2, spread 0.08, Q4_1", base: Base::OffGrid(0.08), profile: Profile::Q4_1, wanted: 0.10 },
    Case { name: "SmolLM2, spread 0.08, Q4_0", base: Base::OffGrid(0.08), profile: Profile::Q4_0, wanted: 0.10 },
    Case { name: "SmolLM2, spread 0.25, Q4_1", base: Base::OffGrid(0.25), profile: Profile::Q4_1, wanted: 0.50 },
    Case { name: "SmolLM2, spread 0.25, Q4_0", base: Base::OffGrid(0.25), profile: Profile::Q4_0, wanted: 0.50 },
    Case { name: "tiny, Q4_K_M", base: Base::Tiny, profile: Profile::Q4KM, wanted: 0.15 },
];

/// Seed of the spread.
const SEED: u64 = 1;

/// The base of a case, made in `folder` where it has to be; `None` if there is no such model here.
pub fn base(case: &Case, folder: &Path) -> Result<Option<PathBuf>> {
    let models = std::env::var_os("FLYWHEEL_MODELS").ok_or("FLYWHEEL_MODELS names no folder")?;
    let found = |name: &str| Some(Path::new(&models).join(name)).filter(|p| p.is_file());
    let spread = match case.base {
        Base::Tiny => return Ok(found("tiny/tiny.gguf")),
        Base::OffGrid(spread) => spread,
    };
    let Some(published) = found("SmolLM2-135M-Instruct.Q4_1.gguf") else { return Ok(None) };
    let path = folder.join(format!("spread-{spread}.gguf"));
    if !path.exists() {
        let published = Gguf::open(&published)?;
        let config = ModelConfig::from_gguf(&published, &mut Vec::new())?;
        Fold::noise(&config, spread, SEED).write(&published, &path, TensorType::F16)?;
    }
    Ok(Some(path))
}
