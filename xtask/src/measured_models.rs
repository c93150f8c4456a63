//! `cargo xtask model tiny | large`: models that only measurements need. The small F32 model that K-quants are measured on is
//! trained here (its recipe is in `crates/inference/examples/tiny_model`), the one of the phones' class is fetched.

use crate::{large, model, process};
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
    /// Fetch the 1.5B model of `bench large` (1.1 GB).
    Large,
}

impl Args {
    /// Makes the model that was asked for; `false` if none was.
    pub fn run(&self) -> Result<bool> {
        match &self.which {
            None => return Ok(false),
            Some(Which::Large) => println!("the model is {}", large::ensure()?.display()),
            Some(Which::Tiny { data }) => train(data.clone())?,
        }
        Ok(true)
    }
}

fn train(data: Option<PathBuf>) -> Result<()> {
    let data = data.unwrap_or_else(|| process::root().join("../shared/data"));
    if !data.join("text").is_dir() {
        println!("skipped: {} has no texts; name the folder with --data", data.display());
        return Ok(());
    }
    let out = model::folder()?.join("tiny");
    let mut program = process::cargo();
    program.args(["run", "--quiet", "--package", "flywheel-inference", "--example", "tiny_model", "--"]);
    process::run("training the small model", program.arg(std::path::absolute(data)?).arg(out))
}
