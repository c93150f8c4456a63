//! `flywheel model prune`.

use super::progress::{Bar, Session};
use super::texts::TextArgs;
use super::{show, write, write_json};
use crate::cli::Usage;
use crate::models::{open, refused};
use anyhow::{Result, bail};
use flywheel_inference::eval::Divergence;
use flywheel_inference::model::{Decoder, Mask};
use flywheel_inference::prune::{DamageReport, PruneOptions, choose_groups, choose_layers, export, measure};
use serde_json::json;
use std::path::PathBuf;

const EXAMPLES: &str = "\
  flywheel model prune model.gguf --text sample.txt --report damage.md
  flywheel model prune f16.gguf --text sample.txt --drop-layers 2 --out smaller.gguf";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    model: PathBuf,
    #[command(flatten)]
    texts: TextArgs,
    /// Tokens of a window; the second half of each is scored.
    #[arg(long, default_value_t = 256)]
    window: usize,
    /// Write what every part is worth: Markdown, or JSON for a name that ends in `.json`.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Leave out so many layers, chosen one after another.
    #[arg(long, value_name = "N", requires = "out")]
    drop_layers: Option<usize>,
    /// Leave out so many head groups of every layer.
    #[arg(long, value_name = "N", requires = "out")]
    drop_groups: Option<usize>,
    /// Model to make.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    if args.texts.files.is_empty() {
        bail!(Usage("parts are measured on texts: --text FILE".into()));
    }
    if args.out.is_some() && args.drop_layers.is_none() && args.drop_groups.is_none() {
        bail!(Usage("--out needs --drop-layers or --drop-groups".into()));
    }
    let gguf = open(&args.model)?;
    let tokens = args.texts.read(&gguf, args.window)?.joined();
    let model = Decoder::load(&gguf).map_err(refused)?;
    let options = PruneOptions { tokens: &tokens, window: args.window };
    let (mut mask, mut lines) = (Mask::default(), Vec::new());
    let mut whole = json!({ "windows": tokens.len() / args.window.max(1) });
    if args.report.is_some() || args.out.is_none() || args.drop_groups.is_some() {
        let damage = damage(&model, options, session)?;
        if let Some(count) = args.drop_groups {
            mask = choose_groups(&damage, model.config().layers, count).map_err(refused)?;
        }
        match &args.report {
            Some(path) if path.extension().is_some_and(|e| e == "json") => write_json(path, &json!(damage))?,
            Some(path) => write(path, damage.markdown().as_bytes())?,
            None => lines.extend(damage.markdown().lines().map(str::to_owned)),
        }
        whole["damage"] = json!(damage);
    }
    let shown =
        |d: &Divergence| format!("KLD {:.5}, same top-1 {:.2} %, PPL {:.3}", d.kld, 100.0 * d.top1, d.other.perplexity);
    if let Some(count) = args.drop_layers {
        let mut bar = Bar::new(session, "choosing layers: run");
        let chosen = choose_layers(&model, count, options, &mut |done, of| bar.step(done, of, "")).map_err(refused);
        drop(bar);
        let chosen = chosen?;
        lines.extend(chosen.iter().map(|(layer, d)| format!("without layer {layer}: {}", shown(d))));
        whole["layers"] =
            json!(chosen.iter().map(|(layer, d)| json!({ "layer": layer, "divergence": d })).collect::<Vec<_>>());
        mask.layers.extend(chosen.iter().map(|(layer, _)| *layer));
    }
    if let Some(out) = &args.out {
        session.check()?;
        let made = export(&gguf, &mask, out).map_err(refused)?;
        lines.push(format!(
            "{} of {} weights in {} layers with {} heads, {} bytes",
            made.weights_after, made.weights_before, made.layers, made.heads, made.size_bytes
        ));
        whole["made"] = json!({
            "size_bytes": made.size_bytes, "layers": made.layers, "heads": made.heads, "kv_heads": made.kv_heads,
            "weights_before": made.weights_before, "weights_after": made.weights_after,
        });
    }
    show(args.json, &whole, &lines)
}

fn damage(model: &Decoder, options: PruneOptions<'_>, session: &Session) -> Result<DamageReport> {
    let mut bar = Bar::new(session, "measuring parts: run");
    Ok(measure(model, options, &mut |done, of| bar.step(done, of, "")).map_err(refused)?)
}
