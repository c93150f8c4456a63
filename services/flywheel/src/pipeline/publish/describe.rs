//! What a model file says about itself, as far as a bundle tells it on. Blocking.

use crate::models::{open, refused};
use flywheel_bundle::manifest::{ArtefactHasher, ArtefactV1};
use flywheel_inference::eval::{TextIdentity, text_identity};
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::ModelConfig;
use flywheel_types::Error;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// A model file.
pub(super) struct Described {
    pub artefact: ArtefactV1,
    pub config: ModelConfig,
    pub identity: TextIdentity,
    /// The type that holds most weights, in lower case (`q4_1`).
    pub precision: String,
    /// `general.license` of the file, else of its base.
    pub licence: Option<String>,
    /// `general.name` of the base, else of the file (tuned files carry their base's name on), else the architecture.
    pub base_name: String,
}

/// Reads and hashes `file`; `base` is the file it was made from, if the server has it.
///
/// # Errors
/// `Invalid` for a file that is no known model, internal when it cannot be read.
pub(super) fn describe(file: &Path, base: Option<&Path>) -> Result<Described, Error> {
    let gguf = open(file)?;
    // a base from outside is known by its digest only
    let base = base.filter(|b| b.exists()).map(open).transpose()?;
    let text = |key: &str| {
        let of = |g: &Gguf| g.str(key).ok().map(str::trim).filter(|t| !t.is_empty()).map(str::to_owned);
        (of(&gguf), base.as_ref().and_then(of))
    };
    let config = ModelConfig::from_gguf(&gguf, &mut Vec::new()).map_err(refused)?;
    let ((own_licence, base_licence), (own_name, base_name)) = (text("general.license"), text("general.name"));
    Ok(Described {
        artefact: artefact_of(file, "gguf")?,
        identity: text_identity(&gguf),
        precision: precision(&gguf),
        licence: own_licence.or(base_licence),
        base_name: base_name.or(own_name).unwrap_or_else(|| config.arch.name().to_owned()),
        config,
    })
}

fn precision(gguf: &Gguf) -> String {
    let mut weights: BTreeMap<&str, usize> = BTreeMap::new();
    for tensor in gguf.tensors() {
        *weights.entry(tensor.ty.name()).or_default() += tensor.n_elements();
    }
    weights.into_iter().max_by_key(|(_, n)| *n).map_or("none", |(name, _)| name).to_lowercase()
}

/// Hashes a file in the pieces that devices verify.
fn artefact_of(file: &Path, extension: &str) -> Result<ArtefactV1, Error> {
    let mut reader = std::fs::File::open(file).map_err(|e| Error::internal(format!("{}: {e}", file.display())))?;
    let (mut hasher, mut buf) = (ArtefactHasher::new(), vec![0u8; 1 << 20]);
    loop {
        let n = reader.read(&mut buf).map_err(Error::internal)?;
        if n == 0 {
            return Ok(hasher.finish(extension));
        }
        hasher.update(&buf[..n]);
    }
}
