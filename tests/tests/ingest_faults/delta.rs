//! The log of a Delta table, replayed by the protocol's own rules without a library: which files make up the newest version,
//! and which transactions of a writer put them there.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A file of the newest version.
pub struct DataFile {
    pub bytes: u64,
    pub rows: u64,
}

/// What the log says.
#[derive(Default)]
pub struct DeltaLog {
    pub versions: usize,
    /// Files of the newest version by their path in the table.
    pub files: BTreeMap<String, DataFile>,
    /// Files that any version had.
    pub ever: BTreeSet<String>,
    /// Sequence numbers of the writer's transactions, in their order.
    pub transactions: Vec<i64>,
    /// Versions that joined small files.
    pub joins: usize,
    pub checkpoints: usize,
}

impl DeltaLog {
    /// Reads all of it; entries are numbered without a gap.
    pub fn read(table: &Path) -> Self {
        let mut out = Self::default();
        let names = names(&table.join("_delta_log"));
        out.checkpoints = names.iter().filter(|n| n.ends_with(".checkpoint.parquet")).count();
        let entries: Vec<&String> = names.iter().filter(|n| n.ends_with(".json")).collect();
        for (version, name) in entries.into_iter().enumerate() {
            assert_eq!(*name, format!("{version:020}.json"), "an entry is missing");
            let text = fs::read_to_string(table.join("_delta_log").join(name)).unwrap();
            for line in text.lines() {
                out.apply(&serde_json::from_str(line).unwrap());
            }
            out.versions += 1;
        }
        out
    }

    fn apply(&mut self, action: &Value) {
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        if let Some(add) = action.get("add") {
            let stats: Value = serde_json::from_str(add["stats"].as_str().unwrap()).unwrap();
            let (bytes, rows) = (add["size"].as_u64().unwrap(), stats["numRecords"].as_u64().unwrap());
            self.ever.insert(text(&add["path"]));
            let before = self.files.insert(text(&add["path"]), DataFile { bytes, rows });
            assert!(before.is_none(), "a file was added twice: {add}");
        } else if let Some(remove) = action.get("remove") {
            let before = self.files.remove(remove["path"].as_str().unwrap());
            assert!(before.is_some(), "a file was removed that was not there: {remove}");
        } else if let Some(txn) = action.get("txn") {
            self.transactions.push(txn["version"].as_i64().unwrap());
        } else if action["commitInfo"]["operation"] == "OPTIMIZE" {
            self.joins += 1;
        }
    }

    pub fn rows(&self) -> u64 {
        self.files.values().map(|f| f.rows).sum()
    }

    /// The files are there as the log has them, and no piece of the write-ahead log was committed twice.
    pub fn check(&self, table: &Path) {
        for (path, file) in &self.files {
            let found = fs::metadata(table.join(path)).map(|m| m.len());
            assert_eq!(found.ok(), Some(file.bytes), "{path} of {}", table.display());
        }
        let rises = self.transactions.windows(2).all(|pair| pair[0] < pair[1]);
        assert!(rises, "transactions of {}: {:?}", table.display(), self.transactions);
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut out: Vec<String> = fs::read_dir(folder)
        .map(|entries| entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect())
        .unwrap_or_default();
    out.sort();
    out
}

/// What a kill leaves in a table's folder: files that were being written, and whole files that no version has.
pub fn leftovers(table: &Path) -> BTreeSet<PathBuf> {
    let ever = DeltaLog::read(table).ever;
    let mut out = BTreeSet::new();
    let mut folders = vec![table.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let inside = path.strip_prefix(table).unwrap().to_str().unwrap().to_owned();
            let data = inside.ends_with(".parquet") && !inside.starts_with("_delta_log");
            if inside.contains('#') || (data && !ever.contains(&inside)) {
                out.insert(path);
            }
        }
    }
    out
}
