//! Where tests find model files and texts.

use std::path::PathBuf;

/// `name` in `FLYWHEEL_MODELS` (default `~/.cache/flywheel/models`), or a printed line and `None` if it is absent.
pub(crate) fn model_file(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("FLYWHEEL_MODELS").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(PathBuf::from(home).join(".cache/flywheel/models"))
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
