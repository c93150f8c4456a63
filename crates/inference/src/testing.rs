//! Where tests find model files.

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
