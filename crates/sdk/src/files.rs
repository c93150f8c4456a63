//! File helpers that survive a crash at any point: write to a temporary name, sync, rename, sync the folder.

use crate::config::Durability;
use crate::error::SdkError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

/// Replaces `path` by `bytes` in one step: a reader sees the old or the new content, never a mixture.
pub(crate) fn replace(path: &Path, bytes: &[u8], durability: Durability) -> Result<(), SdkError> {
    let temp = path.with_extension("new");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temp)?;
        file.write_all(bytes)?;
        if durability == Durability::Full {
            file.sync_data()?;
        }
        fs::rename(&temp, path)
    };
    write().map_err(|e| SdkError::io("replacing a file", path, e))?;
    sync_parent(path, durability)
}

/// Appends `bytes`, creating the file when absent. On a failed write the file is cut back to its old length, so that
/// no half record stays in front of the next one. Returns the new length.
pub(crate) fn append(path: &Path, bytes: &[u8], durability: Durability) -> Result<u64, SdkError> {
    let fail = |e| SdkError::io("appending", path, e);
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    let before = file.metadata().map_err(fail)?.len();
    let written = file.write_all(bytes).and_then(|()| match durability {
        Durability::Full => file.sync_data(),
        Durability::Relaxed => Ok(()),
    });
    if let Err(e) = written {
        // Best effort: should this fail as well, the record's CRC tells the rest apart at the next start.
        let _ = file.set_len(before);
        return Err(fail(e));
    }
    if before == 0 {
        sync_parent(path, durability)?;
    }
    Ok(before + bytes.len() as u64)
}

/// Reads a file; `None` when it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, SdkError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(SdkError::io("reading", path, e)),
    }
}

/// Removes a file; absent is fine.
pub(crate) fn remove(path: &Path) -> Result<(), SdkError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(SdkError::io("removing", path, e)),
    }
}

pub(crate) fn create_dir(path: &Path) -> Result<(), SdkError> {
    fs::create_dir_all(path).map_err(|e| SdkError::io("creating a folder", path, e))
}

/// Makes a rename or a new name durable.
pub(crate) fn sync_parent(path: &Path, durability: Durability) -> Result<(), SdkError> {
    let (Durability::Full, Some(parent)) = (durability, path.parent()) else {
        return Ok(());
    };
    File::open(parent).and_then(|d| d.sync_all()).map_err(|e| SdkError::io("syncing a folder", parent, e))
}

/// Takes the folder's lock for as long as the returned file lives.
pub(crate) fn lock(dir: &Path) -> Result<File, SdkError> {
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| SdkError::io("opening the lock", &path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(SdkError::Busy { path: dir.to_path_buf() }),
        Err(fs::TryLockError::Error(e)) => Err(SdkError::io("locking", &path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replace_and_append_keep_what_they_promise() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        assert_eq!(read(&path).unwrap(), None);
        replace(&path, b"one", Durability::Full).unwrap();
        assert_eq!(append(&path, b"two", Durability::Full).unwrap(), 6);
        assert_eq!(read(&path).unwrap().unwrap(), b"onetwo");
        replace(&path, b"x", Durability::Relaxed).unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"x");
        remove(&path).unwrap();
        remove(&path).unwrap();
    }

    #[test]
    fn a_second_process_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        assert!(matches!(lock(dir.path()), Err(SdkError::Busy { .. })));
        drop(held);
        lock(dir.path()).unwrap();
    }

    #[test]
    fn a_full_disk_has_its_own_error() {
        let e = SdkError::io("x", Path::new("/p"), io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(e, SdkError::NoSpace { .. }));
    }
}
