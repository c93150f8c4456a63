//! The story of the demo: a fleet of simulated phones, the people around it, and what must hold at the end.

mod admin;
mod forgery;
mod heldout;
pub mod kb;
mod mail;
pub mod model;
pub mod probe;
pub mod prompt;
mod repair;
mod stage;
mod story;
mod summary;
mod tamper;
mod world;

use anyhow::{Result, ensure};
use stage::Stage;
use std::path::PathBuf;
pub use summary::Summary;

/// Parts of the story, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Part {
    /// First signed bundle, all phones install it.
    Boot,
    /// A stale chunk is found, frozen, repaired.
    Chunk,
    /// Corrections become a better model, ramped to everybody.
    Improve,
    /// A damaging model is taken back.
    Damage,
}

/// Where the server, the folders and the models are.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[arg(long)]
    pub server: String,
    /// Folder with tokens, keys and the signer's configuration.
    #[arg(long)]
    pub dir: PathBuf,
    /// Folder of the phones' own files; a memory file system is best.
    #[arg(long)]
    pub phones_dir: PathBuf,
    #[arg(long)]
    pub models: PathBuf,
    /// The `flywheel` binary.
    #[arg(long)]
    pub flywheel: PathBuf,
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    #[arg(long, default_value_t = 2600)]
    pub phones: usize,
    #[arg(long)]
    pub summary: PathBuf,
    /// Stop after this part.
    #[arg(long, value_enum, default_value_t = Part::Damage)]
    pub until: Part,
}

/// One line of the time line.
fn say(text: &str) {
    println!("{text}");
}

/// Plays the story; whether everything held.
pub fn run(args: &Args) -> Result<bool> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut out = Summary::default();
    let played = runtime.block_on(play(args.clone(), &mut out));
    if let Err(e) = &played {
        out.error = Some(format!("{e:#}"));
        say(&format!("FAILED: {e:#}"));
    }
    std::fs::write(&args.summary, serde_json::to_vec_pretty(&out.to_json(args, played.is_ok()))?)?;
    Ok(played.is_ok())
}

async fn play(args: Args, out: &mut Summary) -> Result<()> {
    let until = args.until;
    let mut stage = Stage::open(args).await?;
    story::set_up(&mut stage, out).await?;
    story::boot(&mut stage, out).await?;
    out.parts.push(Part::Boot);
    if until >= Part::Chunk {
        story::stale_chunk(&mut stage, out).await?;
        out.parts.push(Part::Chunk);
    }
    if until >= Part::Improve {
        let mut victim = tamper::Victim::open(&stage)?;
        victim.follow(stage.now).await?;
        repair::improve(&mut stage, out).await?;
        ensure!(!out.forgery_moved_gate, "the forged fleet moved a gate");
        out.tamper_refused = victim.attacked(stage.now).await?;
        ensure!(out.tamper_refused, "a tampered bundle was not refused");
        say("a phone refused a tampered bundle and kept its own; a forged fleet moved no gate");
        out.parts.push(Part::Improve);
    }
    if until >= Part::Damage {
        repair::damage(&mut stage, out).await?;
        out.parts.push(Part::Damage);
    }
    Ok(())
}
