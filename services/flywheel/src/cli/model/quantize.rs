//! `flywheel model quantize`.

use super::progress::{Bar, Session};
use super::texts::{TextArgs, Texts};
use super::values::{bytes, tensor_type};
use super::{show, write_json};
use crate::cli::Usage;
use crate::models::quantized::{Made, Wanted, calibrated, failed, plain};
use crate::models::{open, refused};
use anyhow::{Context, Result};
use flywheel_inference::calibrate::calibrate;
use flywheel_inference::gguf::{Gguf, TensorType};
use flywheel_inference::quantize::npu::{self, Grouping, NpuOptions, NpuProfile};
use flywheel_inference::quantize::{Goal, Imatrix, Profile, QuantizeOptions, TuneOptions};
use serde_json::json;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Profiles: auto (the best types under --budget, chosen on --text), f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k_s, q4_k_m,
q5_k_s, q5_k_m, q6_k (the mixes of llama-quantize), npu-int4, npu-int6, npu-int8 (a folder with a tensor pack).

With --text, scales are folded (AWQ) and rounding is compensated (GPTQ) block by block; the finished blocks are kept beside
OUT until it is whole, so that a run that was stopped goes on when it is started again with the same arguments.

  flywheel model quantize f16.gguf q4.gguf --profile q4_k_m --text calibration.txt
  flywheel model quantize f16.gguf best.gguf --profile auto --budget 95MB --text samples.jsonl --report report.json
  flywheel model quantize f16.gguf pack/ --profile npu-int4 --group 128 --imatrix imatrix.gguf";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The float model.
    model: PathBuf,
    /// File to make; a new folder for a tensor pack.
    out: PathBuf,
    /// What to make, see below.
    #[arg(long)]
    profile: Wanted,
    /// Most bytes of the file, for `auto`.
    #[arg(long, value_parser = bytes, required_if_eq("profile", "auto"))]
    budget: Option<u64>,
    #[command(flatten)]
    texts: TextArgs,
    /// Tokens of a piece of plain text; each piece stands for itself.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
    /// Importance matrix (GGUF or imatrix.dat) instead of texts.
    #[arg(long, value_name = "FILE", conflicts_with = "files")]
    imatrix: Option<PathBuf>,
    /// Type of one tensor, whatever the profile says; may be repeated.
    #[arg(long = "type", value_name = "TENSOR=TYPE", value_parser = tensor_type)]
    types: Vec<(String, TensorType)>,
    /// Least type of one tensor under a budget; may be repeated.
    #[arg(long = "floor", value_name = "TENSOR=TYPE", value_parser = tensor_type, requires = "budget")]
    floors: Vec<(String, TensorType)>,
    /// Refuse instead of falling back where rows are not whole blocks of a type.
    #[arg(long)]
    strict_types: bool,
    /// Accept a model that is quantised already; its error stays in the result.
    #[arg(long)]
    allow_requantize: bool,
    /// Give input channels without importance the mean one instead of refusing the importance matrix.
    #[arg(long, requires = "imatrix")]
    fill_importance: bool,
    /// Take the scale of the largest magnitude of a block, as llama-quantize does for formats with blocks of 32 and without
    /// importance: several times faster and less exact.
    #[arg(long, conflicts_with_all = ["files", "imatrix", "budget", "group"])]
    no_search: bool,
    /// Do not fold channel scales.
    #[arg(long, requires = "files")]
    no_fold: bool,
    /// Do not compensate rounding errors.
    #[arg(long, requires = "files")]
    no_compensation: bool,
    /// Columns of a row that share a scale in a tensor pack; a whole row when left out.
    #[arg(long, value_name = "COLUMNS")]
    group: Option<usize>,
    /// Write the whole report, with every tensor, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    args.check()?;
    let gguf = open(&args.model)?;
    match args.profile {
        Wanted::Npu(profile) => pack(args, &gguf, profile, session),
        Wanted::Auto => tuned(args, &gguf, Goal::Budget(args.budget.unwrap_or_default()), session),
        Wanted::Named(profile) if args.texts.files.is_empty() => unturned(args, &gguf, profile, session),
        Wanted::Named(profile) => tuned(args, &gguf, Goal::Profile(profile), session),
    }
}

impl Args {
    fn check(&self) -> Result<(), Usage> {
        let no = |what: &str| Err(Usage(what.to_owned()));
        let (auto, npu) = (self.profile == Wanted::Auto, matches!(self.profile, Wanted::Npu(_)));
        if self.model == self.out {
            return no("OUT must be another file than MODEL");
        }
        if auto && self.texts.files.is_empty() {
            return no("--profile auto chooses types on texts: --text FILE");
        }
        if self.budget.is_some() && !auto {
            return no("--budget is for --profile auto: a named profile has the size it has");
        }
        if npu
            && (!self.types.is_empty() || self.strict_types || self.no_search || self.no_fold || self.no_compensation)
        {
            return no(
                "a tensor pack has one width: --type, --strict-types, --no-search, --no-fold and --no-compensation do not go with it",
            );
        }
        if self.group.is_some() && !npu {
            return no("--group is for the npu profiles");
        }
        Ok(())
    }
}

/// Calibrated, block by block.
fn tuned(args: &Args, gguf: &Gguf, goal: Goal, session: &Session) -> Result<()> {
    let texts = args.texts.read(gguf, args.chunk)?;
    let options = TuneOptions {
        fold: !args.no_fold,
        compensate: !args.no_compensation,
        overrides: args.types.iter().cloned().collect(),
        floors: args.floors.iter().cloned().collect(),
        allow_requantize: args.allow_requantize,
        strict_types: args.strict_types,
        datasets: texts.names.clone(),
        ..TuneOptions::new(goal)
    };
    let mut bar = Bar::new(session, "quantising block");
    let made = calibrated(gguf, &args.out, &texts.texts, &options, &mut |p| bar.step(p.done, p.total, p.tensor));
    drop(bar);
    shown(args, &made?)
}

/// Tensor by tensor.
fn unturned(args: &Args, gguf: &Gguf, profile: Profile, session: &Session) -> Result<()> {
    let options = QuantizeOptions {
        imatrix: imatrix(args)?,
        overrides: args.types.iter().cloned().collect(),
        fill_zero_importance: args.fill_importance,
        allow_requantize: args.allow_requantize,
        strict_types: args.strict_types,
        search: !args.no_search,
        ..QuantizeOptions::new(profile)
    };
    let mut bar = Bar::new(session, "quantising tensor");
    let made = plain(gguf, &args.out, &options, &mut |p| bar.step(p.done, p.total, p.tensor));
    drop(bar);
    shown(args, &made?)
}

fn imatrix(args: &Args) -> Result<Option<Imatrix>> {
    let read = |path: &PathBuf| Imatrix::read(path).map_err(refused).with_context(|| format!("{}", path.display()));
    args.imatrix.as_ref().map(read).transpose()
}

fn shown(args: &Args, made: &Made) -> Result<()> {
    if let Some(path) = &args.report {
        write_json(path, &made.whole())?;
    }
    show(args.json, &made.summary(), &made.lines())
}

/// A tensor pack for NPUs.
fn pack(args: &Args, gguf: &Gguf, profile: NpuProfile, session: &Session) -> Result<()> {
    let imatrix = if args.texts.files.is_empty() {
        imatrix(args)?
    } else {
        let Texts { texts, names } = args.texts.read(gguf, args.chunk)?;
        let mut bar = Bar::new(session, "calibrating block");
        let found = calibrate(gguf, &texts, &mut |done, of| bar.step(done, of, "")).map_err(refused)?;
        Some(found.imatrix(names).map_err(refused)?)
    };
    let grouping = args.group.map_or(Grouping::Channel, Grouping::Columns);
    let mut bar = Bar::new(session, "packing tensor");
    let options = NpuOptions { profile, grouping, imatrix };
    let made = npu::export(gguf, &args.out, &options, &mut |p| bar.step(p.done, p.total, p.tensor)).map_err(failed);
    drop(bar);
    let manifest = made?;
    if let Some(path) = &args.report {
        write_json(path, &json!(manifest))?;
    }
    let weights: usize = manifest.tensors.iter().map(|t| t.rows * t.columns).sum();
    let bits = 8.0 * manifest.weights_bytes as f64 / weights.max(1) as f64;
    let clipped: u64 = manifest.tensors.iter().map(|t| t.clipped_weights).sum();
    let whole = json!({
        "profile": Wanted::Npu(profile).name(), "weights_bytes": manifest.weights_bytes, "bits_per_weight": bits,
        "clipped_weights": clipped, "weights_sha256": manifest.weights_sha256, "base_sha256": manifest.base_sha256,
        "tensors": manifest.tensors.len(),
    });
    let line = format!(
        "{}: {} tensors, {} bytes, {bits:.3} bits per weight, {clipped} weights beyond the range of their group",
        Wanted::Npu(profile).name(),
        manifest.tensors.len(),
        manifest.weights_bytes
    );
    show(args.json, &whole, &[line])
}
