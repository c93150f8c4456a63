//! Trains the small F32 model that K-quants are measured on (its recipe is in `crates/inference/examples/tiny_model`).

use crate::{model, process};
use anyhow::Result;
use std::path::PathBuf;

/// Arguments of `cargo xtask model`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    which: Option<Which>,
}

#[derive(clap::Subcommand)]
enum Which {
    /// Train the small F32 model into the cache folder (up to an hour on two cores; goes on where it was interrupted).
    Tiny {
        /// Folder with the texts [default: ../shared/data beside the repository].
        #[arg(long, env = "FLYWHEEL_DATA")]
        data: Option<PathBuf>,
    },
}

impl Args {
    /// Trains the small model if that was asked for; whether it was.
    pub fn run(&self) -> Result<bool> {
        let Some(Which::Tiny { data }) = &self.which else { return Ok(false) };
        let data = data.clone().unwrap_or_else(|| process::root().join("../shared/data"));
        if data.join("text").is_dir() {
            let out = model::folder()?.join("tiny");
            let mut program = process::cargo();
            program.args(["run", "--quiet", "--package", "flywheel-inference", "--example", "tiny_model", "--"]);
            process::run("training the small model", program.arg(std::path::absolute(data)?).arg(out))?;
        } else {
            println!("skipped: {} has no texts; name the folder with --data", data.display());
        }
        Ok(true)
    }
}
