//! Where tests find model files and texts.

use std::path::PathBuf;

/// `name` in `FLYWHEEL_MODELS` (default `~/.cache/flywheel/models`), or a printed line and `None` if it is absent.
pub(crate) fn model_file(name: &str) -> Option<PathBuf> {
    cached("FLYWHEEL_MODELS", "models", name)
}

/// `name` among the vocabularies of llama.cpp's own tests, in `FLYWHEEL_VOCABULARIES` (default
/// `~/.cache/flywheel/llama-vocab`), or a printed line and `None` if it is absent.
pub(crate) fn vocab_file(name: &str) -> Option<PathBuf> {
    cached("FLYWHEEL_VOCABULARIES", "llama-vocab", name)
}

fn cached(variable: &str, folder: &str, name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(PathBuf::from(home).join(".cache/flywheel").join(folder))
    })?;
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is absent; `cargo xtask model` fetches it", path.display());
    None
}

/// `name` in `FLYWHEEL_DATA` (default `../shared/data` beside the workspace), or a printed line and `None` if it is absent.
pub(crate) fn data_file(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("FLYWHEEL_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"), PathBuf::from);
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is absent", path.display());
    None
}
