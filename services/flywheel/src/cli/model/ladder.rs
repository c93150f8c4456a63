//! The ladder of a model: what every size of its file costs in quality and gives in speed.

use super::progress::{Bar, Session};
use super::values::labelled;
use super::write;
use crate::models::quantized::{Wanted, failed};
use crate::models::refused;
use anyhow::{Context, Result};
use flywheel_inference::eval::{
    Ladder, LadderError, LadderFile, LadderOptions, LadderProbes, Maker, Probes, ladder, ladder_files,
};
use flywheel_inference::gguf::Gguf;
use flywheel_inference::quantize::Profile;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What is in the ladder.
#[derive(Debug, clap::Args)]
pub struct LadderArgs {
    /// Make a file of the model in every profile and measure all of them against the model.
    #[arg(long)]
    pub ladder: bool,
    /// Profiles of the ladder.
    #[arg(long, value_name = "PROFILES", value_delimiter = ',', default_value = "q8_0,q4_0", value_parser = named)]
    profile: Vec<Profile>,
    /// Another file for the ladder; may be repeated.
    #[arg(long = "file", value_name = "LABEL=FILE", value_parser = labelled, requires = "ladder")]
    more: Vec<(String, PathBuf)>,
    /// A file that llama-quantize made; ours are compared with the smallest one that is not smaller.
    #[arg(long, value_name = "LABEL=FILE", value_parser = labelled, requires = "ladder")]
    stock: Vec<(String, PathBuf)>,
    /// Make the files also of a model that is quantised already.
    #[arg(long, requires = "ladder")]
    allow_requantize: bool,
    /// Write PREFIX.md, PREFIX.json and PREFIX.svg.
    #[arg(long, value_name = "PREFIX", requires = "ladder")]
    save: Option<PathBuf>,
    /// Folder for the files and the base's predictions (two bytes a token of the vocabulary and position); a temporary one
    /// when left out.
    #[arg(long, value_name = "FOLDER", requires = "ladder")]
    scratch: Option<PathBuf>,
}

fn named(text: &str) -> Result<Profile, String> {
    match text.parse::<Wanted>()? {
        Wanted::Named(profile) => Ok(profile),
        other => Err(format!("`{}` has no place in a ladder of profiles; add its file with --file", other.name())),
    }
}

/// Tokens of a window, of the prompt and new ones.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub window: usize,
    pub prompt: usize,
    pub new: usize,
}

/// Makes the files, measures all, and saves what was asked for.
pub fn run(
    args: &LadderArgs,
    path: &Path,
    gguf: &Gguf,
    tokens: &[u32],
    sizes: Sizes,
    session: &Session,
) -> Result<Ladder> {
    let temporary = tempfile::tempdir()?;
    let folder = args.scratch.as_deref().unwrap_or(temporary.path());
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let Sizes { window, prompt, new } = sizes;
    let options = LadderOptions { window, prompt, new, allow_requantize: args.allow_requantize };
    let file =
        |label: &str, maker: Maker, path: &Path| LadderFile { label: label.to_owned(), maker, path: path.to_owned() };
    let stock = args.stock.iter().map(|(label, path)| file(label, Maker::Stock, path));
    let mut files: Vec<LadderFile> = stock.collect();
    let mut bar = Bar::new(session, "making file");
    for (i, profile) in args.profile.iter().enumerate() {
        let _ = bar.step(i, args.profile.len(), profile.name());
        session.check()?;
        files.extend(ladder_files(gguf, &[*profile], options, folder).map_err(error)?);
    }
    drop(bar);
    files.extend(args.more.iter().map(|(label, path)| file(label, Maker::Ours, path)));
    let base = file(common_type(gguf), Maker::Ours, path);
    let start = Instant::now();
    let mut probes = LadderProbes {
        probes: Probes { now: &mut || start.elapsed(), peak_rss_bytes: &mut peak_rss_bytes },
        reset_peak: &mut reset_peak,
    };
    let mut bar = Bar::new(session, "measuring file");
    let _ = bar.step(0, files.len() + 1, &base.label);
    let made = ladder(&base, &files, tokens, options, folder, &mut probes, &mut |done, of| bar.step(done, of, ""));
    drop(bar);
    let made = made.map_err(error)?;
    if let Some(prefix) = &args.save {
        let to = |ending: &str| {
            let mut name = prefix.clone().into_os_string();
            name.push(ending);
            PathBuf::from(name)
        };
        write(&to(".md"), made.markdown().as_bytes())?;
        write(&to(".svg"), made.svg().as_bytes())?;
        super::write_json(&to(".json"), &serde_json::json!(made))?;
    }
    Ok(made)
}

fn error(e: LadderError) -> flywheel_types::Error {
    match e {
        LadderError::Quantize(e) => failed(e),
        LadderError::Model(e) => refused(e),
    }
}

/// The type that most weights have.
fn common_type(gguf: &Gguf) -> &'static str {
    let mut weights: BTreeMap<&'static str, usize> = BTreeMap::new();
    for t in gguf.tensors() {
        *weights.entry(t.ty.name()).or_default() += t.n_elements();
    }
    weights.into_iter().max_by_key(|(_, n)| *n).map_or("base", |(name, _)| name)
}

/// Peak resident memory of this process (`VmHWM`), where the system tells.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

/// Sets the peak back to what is in use now; whether that was possible.
fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}
