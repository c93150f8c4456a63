//! Stock llama.cpp, run by `tests/interop/referee.py`.

use crate::Result;
use flywheel_inference::eval::PositionScores;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const NAME: &str = "llama.cpp of @node-llama-cpp/linux-x64@3.21.1";
/// Windows of 256 tokens that are scored, of each the second half.
const WINDOWS: usize = 16;

/// Scores of one file, in the referee's words.
#[derive(Deserialize)]
struct Row {
    window: usize,
    kld: Vec<f64>,
    base_nll: Vec<f64>,
    nll: Vec<f64>,
    same_top: Vec<bool>,
}

fn referee() -> Result<Command> {
    let python = std::env::var_os("PYTHON").ok_or("PYTHON names no Python with numpy")?;
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/referee.py"));
    Ok(command)
}

fn run(command: &mut Command) -> Result<()> {
    match command.status()? {
        status if status.success() => Ok(()),
        status => Err(format!("the referee failed with {status}").into()),
    }
}

/// What `llama-quantize --imatrix` makes.
pub fn quantize(base: &Path, out: &Path, file_type: u32, imatrix: Option<&Path>) -> Result<()> {
    let mut command = referee()?;
    command.arg("quantize").args([base, out]).arg(file_type.to_string());
    if let Some(imatrix) = imatrix {
        command.arg("--imatrix").arg(imatrix);
    }
    run(&mut command)
}

/// Scores of `files` against `base` on a text; kept in `json`.
pub fn score(base: &Path, files: &[PathBuf], text: &Path, json: &Path) -> Result<Vec<PositionScores>> {
    if !json.exists() {
        let part = json.with_extension("part");
        let mut command = referee()?;
        command.arg("score").arg(base).args(files).arg("--text").arg(text).arg("--json").arg(&part);
        run(command.args(["--windows", &WINDOWS.to_string()]))?;
        std::fs::rename(part, json)?;
    }
    let rows: Vec<Row> = serde_json::from_slice(&std::fs::read(json)?)?;
    let scores = |r: Row| PositionScores::of_other_engine(r.window / 2, r.kld, r.base_nll, r.nll, r.same_top);
    Ok(rows.into_iter().map(scores).collect::<std::result::Result<_, _>>()?)
}
