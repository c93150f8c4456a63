//! A folder in memory for decoders that only open files. One per process, emptied before every use.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static IN_USE: Mutex<()> = Mutex::new(());

/// An empty folder; held until dropped.
pub(crate) struct Scratch {
    path: PathBuf,
    _held: MutexGuard<'static, ()>,
}

impl Scratch {
    pub(crate) fn empty() -> Self {
        // a failed target poisons the lock; the folder is emptied anyway
        let held = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let base = Path::new("/dev/shm");
        let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
        let path = base.join(format!("flywheel-fuzz-{}", std::process::id()));
        if path.exists() {
            std::fs::remove_dir_all(&path).expect("the scratch folder can be emptied");
        }
        std::fs::create_dir_all(&path).expect("the scratch folder can be made");
        Self { path, _held: held }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // left-overs are emptied by the next use; the folder itself is gone after a clean end
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
