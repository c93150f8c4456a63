//! `flywheel model …`: every subcommand of the real binary on small generated models, and on SmolLM2 where it is.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too; a skipped test says so"
)]

mod convert;
mod measure;
mod quantize;
mod real;
mod tiny;
mod train;

use flywheel_inference::gguf::Gguf;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tiny::{Tiny, prose};

/// What a run of the binary came to.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// A folder with a tiny model, `base.gguf`, and a text, `text.txt`.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new(model: Tiny) -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        model.write(&place.at("base.gguf"));
        fs::write(place.at("text.txt"), prose(8000)).unwrap();
        place
    }
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn command(&self, arguments: &str) -> Command {
        let mut c = Command::new(flywheel_tests::binary().unwrap());
        c.arg("model").args(arguments.split(' ')).current_dir(self.dir.path());
        c.stdin(Stdio::null());
        c
    }
    /// Runs `flywheel model` in the folder; no argument has a space in it.
    fn run(&self, arguments: &str) -> Ran {
        let out = self.command(arguments).output().unwrap();
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        Ran { code: out.status.code(), out: text(&out.stdout), err: text(&out.stderr) }
    }
    /// A run that succeeds.
    fn ok(&self, arguments: &str) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments}: {ran:?}");
        ran
    }
    /// A run that fails with this code and says this.
    fn fails(&self, code: i32, arguments: &str, says: &str) {
        let ran = self.run(arguments);
        assert!(ran.code == Some(code) && ran.err.contains(says), "{arguments}: {ran:?}");
        assert_eq!(ran.out, "", "{arguments}");
    }
    fn open(&self, name: &str) -> Gguf {
        Gguf::open(&self.at(name)).unwrap()
    }
    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.at(name)).unwrap()
    }
    /// Names in the folder, for tests that look for what was left behind.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn sha256(path: &Path) -> String {
    hex::encode(Sha256::digest(fs::read(path).unwrap()))
}

#[test]
fn inspect_tells_sizes_types_digests_and_what_will_not_work() {
    let model = Tiny::default();
    let place = Place::new(model);
    let seen = place.ok("inspect base.gguf --json").json();
    let matrices: u64 = model.specs().iter().filter(|s| s.dims.len() > 1).map(|s| s.dims.iter().product::<u64>()).sum();
    let vectors = model.weights() - matrices;
    assert_eq!(seen["weights"], json!(model.weights()));
    let bits = (16 * matrices + 32 * vectors) as f64 / model.weights() as f64;
    assert!((seen["bits_per_weight"].as_f64().unwrap() - bits).abs() < 1e-9, "{}", seen["bits_per_weight"]);
    assert_eq!(seen["types"]["F16"], json!({ "tensors": 15, "weights": matrices, "bytes": 2 * matrices }));
    assert_eq!(seen["types"]["F32"], json!({ "tensors": 5, "weights": vectors, "bytes": 4 * vectors }));
    assert_eq!(seen["files"][0]["sha256"], json!(sha256(&place.at("base.gguf"))));
    assert_eq!(seen["tensors_sha256"], json!(flywheel_inference::model::base_digest(&place.open("base.gguf"))));
    assert_eq!(seen["model"]["layers"], 2);
    assert_eq!(seen["warnings"], json!([]));
    assert_eq!(seen["tensors"].as_array().unwrap().len(), 20);
    assert_eq!(seen["metadata"]["llama.context_length"], 1024);
    assert_eq!(seen["metadata"]["tokenizer.ggml.tokens"], json!({ "type": "array of string", "len": 259 }));
    let shown = place.ok("inspect base.gguf").out;
    assert!(
        shown.contains(&format!("{bits:.3} bits per weight")) && shown.contains("blk.1.ffn_down.weight"),
        "{shown}"
    );

    Tiny { pre: "my-own", ..model }.write(&place.at("other.gguf"));
    let warned = place.ok("inspect other.gguf --json").json();
    let warning = warned["warnings"][0].as_str().unwrap();
    assert!(warning.contains("pre-tokenizer `my-own` is not known"), "{warning}");
    assert!(place.ok("inspect other.gguf").out.contains("warning: tokenizer: pre-tokenizer `my-own`"));
}

#[test]
fn failures_and_wrong_command_lines_have_their_codes() {
    let place = Place::new(Tiny::default());
    let whole = place.bytes("base.gguf");
    fs::write(place.at("broken.gguf"), &whole[..whole.len() - 100]).unwrap();
    place.fails(1, "inspect broken.gguf", "truncated");
    place.fails(1, "inspect absent.gguf", "absent.gguf");
    place.fails(1, "chat broken.gguf --prompt hi", "truncated");
    place.fails(2, "inspect", "Usage: flywheel model inspect");
    place.fails(2, "quantize base.gguf out.gguf --profile q9", "`q9` is not a profile; known are auto");
    place.fails(2, "quantize base.gguf out.gguf --profile auto --text text.txt", "--budget");
    place.fails(2, "quantize base.gguf out.gguf --profile auto --budget 1MB", "--text");
    place.fails(2, "quantize base.gguf out.gguf --profile q4_0 --budget 1MB", "--budget is for --profile auto");
    place.fails(2, "quantize base.gguf base.gguf --profile q4_0", "another file");
    place.fails(2, "shard base.gguf out --max-size 12parsecs", "not a size");
    place.fails(2, "train base.gguf text.txt out.gguf --targets q,x", "`x` is none of");
    place.fails(2, "eval base.gguf", "nothing to measure");
    place.fails(2, "eval base.gguf --ladder --speed --text text.txt", "cannot be used with");
    place.fails(2, "chat base.gguf --prompt hi --top-p 0", "top_p 0 must be above 0");
    place.fails(2, "prune base.gguf", "--text");
    place.fails(2, "calibrate base.gguf --out i.gguf", "--text");
    assert_eq!(place.names(), ["base.gguf", "broken.gguf", "text.txt"], "nothing was written");
    for command in ["inspect", "convert", "calibrate", "quantize", "train", "merge", "eval", "chat", "shard", "prune"] {
        let help = place.ok(&format!("{command} --help")).out;
        assert!(help.contains(&format!("Usage: flywheel model {command}")) && help.len() > 200, "{help}");
    }
}

#[test]
fn shards_are_small_and_join_to_the_same_file() {
    let place = Place::new(Tiny::default());
    let made = place.ok("shard base.gguf part --max-size 100kB --json").json();
    let files = made["files"].as_array().unwrap();
    assert!(files.len() > 2, "{made}");
    for file in files {
        let size = fs::metadata(place.at(file["file"].as_str().unwrap())).unwrap().len();
        assert!(size <= 100_000 && json!(size) == file["bytes"], "{file}");
    }
    let first = format!("part-00001-of-{:05}.gguf", files.len());
    let whole = place.ok(&format!("inspect {first} --json")).json();
    assert_eq!(
        (&whole["weights"], whole["files"].as_array().unwrap().len()),
        (&json!(Tiny::default().weights()), files.len())
    );
    place.ok(&format!("shard {first} joined.gguf --join"));
    assert_eq!(place.bytes("joined.gguf"), place.bytes("base.gguf"));
    place.fails(2, "shard base.gguf joined.gguf --join", "one file already");
    place.fails(1, "shard base.gguf tiny --max-size 1kB", "the metadata alone takes");
    fs::remove_file(place.at(&format!("part-00002-of-{:05}.gguf", files.len()))).unwrap();
    place.fails(1, &format!("inspect {first}"), "shard 2 of");
}
