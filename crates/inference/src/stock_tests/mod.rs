//! Tests beside stock llama.cpp, which `tests/interop/parity.py` loads as a library. They say so and pass where Python,
//! NumPy or the library are absent.

mod deepseek;
mod deepseek_convert;
mod dequantize;
mod files;
mod importance;
mod largest;
mod llama_convert;
mod logits;

use crate::model::Decoder;
use serde::Deserialize;
use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

/// How our logits differ from those of stock on the same file and tokens.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Difference {
    pub positions: usize,
    /// Mean and largest KL(stock ‖ ours), nats.
    pub kld: f64,
    pub kld_max: f64,
    /// Share of positions with the same most likely token.
    pub top1: f64,
    /// Largest difference of log-probabilities among tokens above 1 %.
    pub worst: f64,
    /// The most likely token after each window: stock's and ours.
    pub last: Vec<[u32; 2]>,
}

/// Tokens, and the first position whose logits are compared.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    pub tokens: Vec<u32>,
    pub first: usize,
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/parity.py")
}

fn interpreter() -> OsString {
    std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into())
}

fn python(args: &[&str]) -> Command {
    let mut command = Command::new(interpreter());
    command.arg(script()).args(args);
    command
}

/// Whether stock can be asked here; a printed line where not. The library is fetched once.
pub(crate) fn there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| {
        let referee = script().with_file_name("referee.py");
        let mut fetch = Command::new(interpreter());
        let asked = fetch.arg(referee).arg("fetch").stdout(Stdio::null()).stderr(Stdio::null()).status();
        let there = asked.is_ok_and(|s| s.success());
        if !there {
            println!("skipped: stock llama.cpp is absent (needs npm, and a Python with NumPy that PYTHON names)");
        }
        there
    })
}

/// Asks stock for the logits of `model` on `windows` and compares ours; `None` where stock is absent.
pub(crate) fn compare(model: &Path, ours: &Decoder, windows: &[Window]) -> Option<Difference> {
    if !there() {
        return None;
    }
    let longest = windows.iter().map(|w| w.tokens.len()).max().unwrap_or(1).to_string();
    let mut child = python(&["logits"])
        .arg(model)
        .args(["--window", &longest])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    for window in windows {
        send(&mut child, ours, window);
    }
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "stock llama.cpp could not run {}", model.display());
    Some(serde_json::from_slice(&out.stdout).unwrap())
}

fn send(child: &mut Child, ours: &Decoder, window: &Window) {
    let pipe = child.stdin.as_mut().unwrap();
    let mut put = |bytes: &[u8]| pipe.write_all(bytes).expect("parity.py reads what it is given");
    put(&(window.tokens.len() as u32).to_le_bytes());
    put(&(window.first as u32).to_le_bytes());
    window.tokens.iter().for_each(|t| put(&t.to_le_bytes()));
    ours.visit_logits(&window.tokens, window.first..window.tokens.len(), &mut |_, row| {
        put(&row.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        Ok(())
    })
    .unwrap();
}

/// Windows of a text, the first quarter of each unscored, until `positions` are scored.
pub(crate) fn windows(tokens: &[u32], len: usize, positions: usize) -> Vec<Window> {
    let first = len / 4;
    let n = positions.div_ceil(len - first);
    tokens.chunks_exact(len).take(n).map(|t| Window { tokens: t.to_vec(), first }).collect()
}
