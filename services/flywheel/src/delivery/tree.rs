//! The published file tree of one app in a local folder. Every name is written once (temporary file, fsync, hard
//! link, fsync of the folder); only `metadata/timestamp.json` is replaced, by compare-and-swap under the caller's
//! lease, and last.

use crate::objects::digest_file;
use flywheel_bundle::publish::{Content, PublishPlan, WriteMode, WriteOp};
use flywheel_types::{Digest, Error, ErrorKind};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

/// One app's tree.
#[derive(Debug, Clone)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// A tree at `root`; the folder is made when the first file is written.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Absolute path of a published file, or `None` when the name would leave the tree.
    #[must_use]
    pub fn locate(&self, path: &str) -> Option<PathBuf> {
        let inside = Path::new(path);
        inside.components().all(|c| matches!(c, Component::Normal(_))).then(|| self.root.join(inside))
    }

    /// Bytes of a file; `None` when it is not there.
    ///
    /// # Errors
    /// A text for the log.
    pub fn read(&self, path: &str) -> Result<Option<Vec<u8>>, String> {
        let Some(file) = self.locate(path) else { return Err(format!("`{path}` leaves the tree")) };
        match fs::read(&file) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("{}: {e}", file.display())),
        }
    }

    /// Executes a plan in its order. `blob` names the local file of a digest. A crash at any point leaves the old
    /// state in force.
    ///
    /// # Errors
    /// `Conflict` when somebody published in between, internal on file-system failures or a damaged blob.
    pub fn execute(&self, plan: &PublishPlan, blob: &dyn Fn(Digest) -> PathBuf) -> Result<(), Error> {
        for op in &plan.ops {
            self.write(op, blob).map_err(|e| Error { message: format!("{}: {}", op.path, e.message), ..e })?;
        }
        Ok(())
    }

    fn write(&self, op: &WriteOp, blob: &dyn Fn(Digest) -> PathBuf) -> Result<(), Error> {
        let target = self.locate(&op.path).ok_or_else(|| Error::internal(format!("`{}` leaves the tree", op.path)))?;
        let folder = target.parent().map(Path::to_path_buf).unwrap_or_default();
        fs::create_dir_all(&folder).map_err(Error::internal)?;
        if let WriteMode::CreateOnly = op.mode
            && target.exists()
        {
            return same(&target, &op.content);
        }
        let temp = self.stage(&folder, &op.content, blob)?;
        match op.mode {
            WriteMode::CreateOnly => link_new(&temp, &target)?,
            WriteMode::CompareAndSwap { expected } => {
                let present = fs::read(&target).ok().map(|b| Digest::of(&b));
                if present != expected {
                    return Err(published_in_between());
                }
                fs::rename(&temp, &target).map_err(Error::internal)?;
            }
        }
        File::open(&folder).and_then(|d| d.sync_all()).map_err(Error::internal)
    }

    /// A durable temporary file with the content, in the folder of the target.
    fn stage(
        &self,
        folder: &Path,
        content: &Content,
        blob: &dyn Fn(Digest) -> PathBuf,
    ) -> Result<tempfile::TempPath, Error> {
        let mut temp = tempfile::Builder::new().prefix(".staged-").tempfile_in(folder).map_err(Error::internal)?;
        match content {
            Content::Bytes(bytes) => temp.write_all(bytes).map_err(Error::internal)?,
            Content::Blob { sha256, length } => {
                let mut source =
                    File::open(blob(*sha256)).map_err(|e| Error::internal(format!("blob {sha256}: {e}")))?;
                std::io::copy(&mut source, temp.as_file_mut()).map_err(Error::internal)?;
                let got = digest_file(temp.path())?;
                if got != (*sha256, *length) {
                    return Err(Error::internal(format!("blob {sha256} is damaged: its bytes have digest {}", got.0)));
                }
            }
        }
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        temp.as_file().set_permissions(mode).map_err(Error::internal)?;
        temp.as_file().sync_all().map_err(Error::internal)?;
        Ok(temp.into_temp_path())
    }
}

/// A name that exists already must hold the very same bytes: then the write was done before a crash.
fn same(target: &Path, content: &Content) -> Result<(), Error> {
    let present = digest_file(target)?.0;
    let wanted = match content {
        Content::Bytes(bytes) => Digest::of(bytes),
        Content::Blob { sha256, .. } => *sha256,
    };
    if present == wanted { Ok(()) } else { Err(published_in_between()) }
}

/// A hard link fails when the name exists: create-only without a window.
fn link_new(temp: &Path, target: &Path) -> Result<(), Error> {
    match fs::hard_link(temp, target) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Err(published_in_between()),
        Err(e) => Err(Error::internal(e)),
    }
}

fn published_in_between() -> Error {
    Error::new(
        ErrorKind::Conflict,
        "published_in_between",
        "somebody published in between",
        "the next attempt reads the new state",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_the_tree() {
        let tree = Tree::new("/srv/x".into());
        for bad in ["../x", "/etc/passwd", "a/../../x", "./a"] {
            assert_eq!(tree.locate(bad), None, "{bad}");
        }
        assert_eq!(tree.locate("metadata/1.root.json"), Some("/srv/x/metadata/1.root.json".into()));
    }

    fn op(path: &str, bytes: &[u8], mode: WriteMode) -> WriteOp {
        WriteOp { path: path.into(), content: Content::Bytes(bytes.to_vec()), mode }
    }

    #[test]
    fn names_are_written_once_and_the_timestamp_by_compare_and_swap() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path().to_owned());
        let blob = |_: Digest| PathBuf::new();
        let write = |o: &WriteOp| tree.write(o, &blob);
        write(&op("m/1.json", b"a", WriteMode::CreateOnly)).unwrap();
        write(&op("m/1.json", b"a", WriteMode::CreateOnly)).unwrap();
        let e = write(&op("m/1.json", b"b", WriteMode::CreateOnly)).unwrap_err();
        assert_eq!(e.code, "published_in_between");
        write(&op("m/t.json", b"1", WriteMode::CompareAndSwap { expected: None })).unwrap();
        let e = write(&op("m/t.json", b"2", WriteMode::CompareAndSwap { expected: None })).unwrap_err();
        assert_eq!(e.code, "published_in_between");
        let expected = Some(Digest::of(b"1"));
        write(&op("m/t.json", b"2", WriteMode::CompareAndSwap { expected })).unwrap();
        assert_eq!(tree.read("m/t.json").unwrap().unwrap(), b"2");
        let left: Vec<_> = fs::read_dir(dir.path().join("m")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left.len(), 2, "no staged file is left: {left:?}");
    }
}
