//! Replays the committed corpus through the targets, without libFuzzer: what was found once stays fixed.

use flywheel_fuzz::TARGETS;
use std::path::{Path, PathBuf};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut out: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    out.sort();
    out
}

#[test]
fn every_committed_input_holds() {
    let mut failed = Vec::new();
    for target in TARGETS {
        let inputs = files(&corpus().join(target.name));
        assert!(!inputs.is_empty(), "target {} has no seeds", target.name);
        for path in inputs {
            let bytes = std::fs::read(&path).unwrap();
            if std::panic::catch_unwind(|| (target.body)(&bytes)).is_err() {
                failed.push(path);
            }
        }
    }
    assert!(failed.is_empty(), "inputs that fail their target: {failed:#?}");
}

#[test]
fn every_target_survives_nothing_and_its_own_seeds_cut_short() {
    for target in TARGETS {
        (target.body)(&[]);
        for path in files(&corpus().join(target.name)) {
            let bytes = std::fs::read(&path).unwrap();
            for cut in [1, bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
                (target.body)(&bytes[..cut.min(bytes.len())]);
            }
        }
    }
}

#[test]
fn every_target_has_a_driver_and_every_corpus_a_target() {
    let names: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
    for folder in files(&corpus()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        assert!(names.contains(&name), "corpus folder {name} has no target");
    }
    for name in names {
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz_targets/{name}.rs")).is_file(), "{name}");
    }
}
