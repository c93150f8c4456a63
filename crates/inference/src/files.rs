//! Files that appear only when complete.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

/// Writes `path` through a temporary file beside it: written, flushed to the disk, renamed. After an error the old file or
/// none is there. `io_error` makes the caller's error of what the operating system says.
pub(crate) fn replace<E>(
    path: &Path,
    io_error: &dyn Fn(io::Error) -> E,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.part", std::process::id()));
    let temp = path.with_file_name(name);
    let file = File::create(&temp).map_err(io_error)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let result = write(&mut out).and_then(|()| {
        let done = out.into_inner().map_err(io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        done.and_then(|()| fs::rename(&temp, path)).map_err(io_error)
    });
    if result.is_err() {
        // Best effort: the error that led here is the one worth reporting.
        let _ = fs::remove_file(&temp);
    }
    result
}
