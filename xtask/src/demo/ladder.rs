//! The ladder of the demo's tuned model: the float model, INT8, INT4, and the file that went to the fleet, measured on the
//! held-out questions.

use super::Place;
use crate::process::run_quiet;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// Tokens of a window, and about all of them: eight windows, the fewest that have an interval.
const WINDOW: &str = "256";
const TOKENS: &str = "2600";

/// What was measured.
pub struct Measured {
    table: String,
    /// Path without the endings `.md`, `.json` and `.svg`.
    prefix: PathBuf,
}

/// Measures when the scenario came to a tuned model.
pub fn measure(place: &Place, summary: &Value) -> Result<Option<Measured>> {
    let (Some(candidate), Some(merged)) = (summary["candidate_gguf"].as_str(), summary["merged_gguf"].as_str()) else {
        return Ok(None);
    };
    let prefix = place.models.join("demo-ladder");
    let mut command = place.program("flywheel");
    command.args([
        "model",
        "eval",
        merged,
        "--ladder",
        "--profile",
        "q8_0,q4_0",
        "--window",
        WINDOW,
        "--max-tokens",
        TOKENS,
    ]);
    command.arg("--text").arg(place.dir.join("heldout.jsonl"));
    command.arg("--file").arg(format!("fleet={candidate}"));
    command.arg("--save").arg(&prefix).arg("--scratch").arg(place.dir.join("ladder"));
    run_quiet("measuring the sizes of the tuned model", &mut command)?;
    let table = prefix.with_extension("md");
    let table = fs::read_to_string(&table).with_context(|| format!("cannot read {}", table.display()))?;
    Ok(Some(Measured { table, prefix }))
}

impl Measured {
    #[expect(clippy::print_stdout, reason = "the demo's last lines")]
    pub fn print(&self) {
        println!(
            "\nthe sizes of the tuned model on held-out questions (`fleet` is what the phones run):\n\n{}",
            self.table
        );
        println!("as a plot: {}", self.prefix.with_extension("svg").display());
    }
}
