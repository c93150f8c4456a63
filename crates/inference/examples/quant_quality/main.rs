//! Quality of quantised files against `llama-quantize --imatrix` at no more bytes, judged by stock llama.cpp
//! (`tests/interop/referee.py`) on texts that were not used for calibration.
//!
//! `quant_quality [--json FILE] [--folder FOLDER] [--case PART OF A NAME]`. `PYTHON` names a Python with numpy,
//! `FLYWHEEL_MODELS` and `FLYWHEEL_DATA` the models and texts. Finished cases are kept in the folder.
#![expect(clippy::print_stdout, reason = "a command-line program prints its report")]

mod cases;
mod files;
mod judge;
mod report;
mod texts;

use serde_json::json;
use std::{error::Error, fs, path::PathBuf};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let (mut to, mut folder, mut only) = (None, None, String::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--json" => to = Some(PathBuf::from(value)),
            "--folder" => folder = Some(PathBuf::from(value)),
            "--case" => only = value,
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("flywheel-quant-quality"));
    fs::create_dir_all(&folder)?;
    let texts = texts::Texts::write(&folder)?;
    let mut found = Vec::new();
    for case in cases::CASES.iter().filter(|c| c.name.contains(&only)) {
        let Some(base) = cases::base(case, &folder)? else {
            println!("skipped: {} (no model; `cargo xtask model` fetches or trains it)", case.name);
            continue;
        };
        let scores = files::scores(case, &base, &texts, &folder)?;
        let report = report::of(case, &scores)?;
        println!("{}", report::markdown(&report));
        found.push(report);
    }
    if let Some(to) = to {
        let json = json!({ "judge": judge::NAME, "calibration": texts.described(), "cases": found });
        fs::write(to, serde_json::to_string_pretty(&json)? + "\n")?;
    }
    Ok(())
}
