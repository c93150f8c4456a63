//! Duplicate state on disk, written before log segments are freed: `dedup.snap` (installs, rewritten through a
//! temporary file) and `keys-<day>.bin` (keys of other clients, appended). Loading both and replaying the log that
//! is left gives the whole state again; entries that are in two places are harmless.

use super::log::sync_folder;
use crate::dedup::{BatchKey, DedupState};
use crate::error::TelemetryError;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"FLYDUP01";

fn snap_path(folder: &Path) -> PathBuf {
    folder.join("dedup.snap")
}
fn day_path(folder: &Path, day: i32) -> PathBuf {
    folder.join(format!("keys-{day}.bin"))
}

/// Writes the state as of log record `seq` or later.
pub(crate) fn save(folder: &Path, state: &mut DedupState, seq: u64, today: i32) -> Result<(), TelemetryError> {
    let mut by_day: BTreeMap<i32, Vec<u8>> = BTreeMap::new();
    for key in state.unsaved() {
        if let BatchKey::Opaque { day, .. } = key {
            key.encode(by_day.entry(*day).or_default());
        }
    }
    for (day, bytes) in by_day {
        let path = day_path(folder, day);
        append_entries(&path, &bytes).map_err(|e| TelemetryError::io("cannot append to", path, e))?;
    }
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&seq.to_le_bytes());
    state.encode_installs(&mut out);
    out.extend_from_slice(&crc32fast::hash(&out).to_le_bytes());
    let (path, temp) = (snap_path(folder), folder.join("dedup.snap.tmp"));
    let write = || {
        let mut file = File::create(&temp)?;
        file.write_all(&out)?;
        file.sync_all()?;
        std::fs::rename(&temp, &path)
    };
    write().map_err(|e| TelemetryError::io("cannot write", &path, e))?;
    sync_folder(folder)?;
    state.saved();
    for day in state.expire(today) {
        let path = day_path(folder, day);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(TelemetryError::io("cannot delete", path, e));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Appends after the last whole entry: a torn tail of an earlier crash must not shift what follows.
fn append_entries(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let len = file.metadata()?.len();
    file.set_len(len - len % BatchKey::ENCODED as u64)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Reads the state; returns it with the log record it covers (0 when there is no snapshot yet).
pub(crate) fn load(folder: &Path) -> Result<(DedupState, u64), TelemetryError> {
    let mut state = DedupState::default();
    let path = snap_path(folder);
    let seq = match std::fs::read(&path) {
        Ok(bytes) => parse(&bytes, &mut state).ok_or_else(|| TelemetryError::Damaged {
            path,
            offset: 0,
            detail: "not a duplicate snapshot, or its checksum differs; restore it from a back-up, or delete it and \
                     accept that retries of batches before the oldest log segment are stored again"
                .to_owned(),
        })?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => 0,
        Err(e) => return Err(TelemetryError::io("cannot read", path, e)),
    };
    for entry in std::fs::read_dir(folder).map_err(|e| TelemetryError::io("cannot list", folder, e))? {
        let path = entry.map_err(|e| TelemetryError::io("cannot list", folder, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if !(name.starts_with("keys-") && name.ends_with(".bin")) {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(|e| TelemetryError::io("cannot read", &path, e))?;
        for key in bytes.chunks_exact(BatchKey::ENCODED).filter_map(BatchKey::decode) {
            state.load(&key);
        }
    }
    Ok((state, seq))
}

fn parse(bytes: &[u8], state: &mut DedupState) -> Option<u64> {
    let (body, crc) = bytes.split_last_chunk::<4>()?;
    if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
        return None;
    }
    let (seq, rest) = body.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    state.decode_installs(rest)?;
    Some(u64::from_le_bytes(*seq))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dedup::Seen;
    use flywheel_types::{AppId, InstallId};

    #[test]
    fn state_survives_and_old_days_leave() {
        let dir = tempfile::tempdir().unwrap();
        let app = AppId::new("a").unwrap();
        let seq = BatchKey::seq(&app, &InstallId::of_public_key(&[1; 32]), 1);
        let old = BatchKey::opaque(&app, b"k", None, b"old", 100);
        let new = BatchKey::opaque(&app, b"k", None, b"new", 110);
        let mut state = DedupState::default();
        for k in [&seq, &old, &new] {
            state.insert(k);
        }
        save(dir.path(), &mut state, 7, 110).unwrap();
        // A torn append of an earlier crash.
        let torn = day_path(dir.path(), 110);
        File::options().append(true).open(&torn).unwrap().write_all(&[9; 5]).unwrap();
        let newer = BatchKey::opaque(&app, b"k", None, b"newer", 110);
        state.insert(&newer);
        save(dir.path(), &mut state, 8, 110).unwrap();
        let (again, at) = load(dir.path()).unwrap();
        assert_eq!(at, 8);
        for k in [&seq, &old, &new, &newer] {
            assert_eq!(again.check(k), Seen::Duplicate);
        }
        save(dir.path(), &mut state, 9, 115).unwrap();
        let (again, _) = load(dir.path()).unwrap();
        assert_eq!(again.check(&old), Seen::Fresh);
        assert_eq!(again.check(&new), Seen::Duplicate);
        assert!(!day_path(dir.path(), 100).exists());
    }

    #[test]
    fn a_damaged_snapshot_is_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &mut DedupState::default(), 1, 1).unwrap();
        let path = snap_path(dir.path());
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[9] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let e = load(dir.path()).unwrap_err().to_string();
        assert!(e.contains("back-up"), "{e}");
    }
}
