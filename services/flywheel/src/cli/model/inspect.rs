//! `flywheel model inspect`.

use super::show;
use crate::models::refused;
use crate::objects::digest_file;
use anyhow::{Context, Result};
use flywheel_inference::gguf::{Array, Gguf, Value as Meta, shard_path};
use flywheel_inference::model::{Adapter, ModelConfig, base_digest};
use flywheel_inference::quantize::Imatrix;
use flywheel_inference::quantize::npu::NpuPack;
use flywheel_inference::tokenizer::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Longest array that is shown whole.
const MOST_ELEMENTS: usize = 16;
/// Longest line of a metadata value.
const MOST_CHARS: usize = 120;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A GGUF file, the first file of a set of shards, or the folder of a tensor pack.
    file: PathBuf,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.file.is_dir() {
        return pack(args);
    }
    let gguf = Gguf::open(&args.file).map_err(refused).with_context(|| format!("{}", args.file.display()))?;
    let whole = whole(&gguf, &args.file)?;
    show(args.json, &whole, &lines(&whole, &gguf))
}

fn pack(args: &Args) -> Result<()> {
    let pack = NpuPack::open(&args.file).with_context(|| format!("{}", args.file.display()))?;
    let m = &pack.manifest;
    let mut lines = vec![
        format!(
            "tensor pack {:?}: {} tensors, {} bytes, base {}",
            m.profile,
            m.tensors.len(),
            m.weights_bytes,
            m.base_sha256
        ),
        format!("weights sha256 {}", m.weights_sha256),
    ];
    lines.extend(m.tensors.iter().map(|t| {
        format!(
            "{:40} {} × {} at {} bits, groups of {}, {} clipped, relative error {:.4}",
            t.name, t.rows, t.columns, t.bits, t.group_len, t.clipped_weights, t.relative_error
        )
    }));
    show(args.json, &json!({ "kind": "tensor_pack", "manifest": m }), &lines)
}

fn whole(gguf: &Gguf, path: &Path) -> Result<Value> {
    let weights: usize = gguf.tensors().iter().map(|t| t.n_elements()).sum();
    let data: usize = gguf.tensors().iter().map(|t| t.len).sum();
    let mut types: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for t in gguf.tensors() {
        let sums = types.entry(t.ty.name()).or_default();
        *sums = [sums[0] + 1, sums[1] + t.n_elements() as u64, sums[2] + t.len as u64];
    }
    let types: Map<String, Value> = types
        .into_iter()
        .map(|(name, [n, w, b])| (name.to_owned(), json!({ "tensors": n, "weights": w, "bytes": b })))
        .collect();
    let files = files(path, gguf.n_files())
        .into_iter()
        .map(|file| {
            let (digest, bytes) = digest_file(&file)?;
            Ok(json!({ "file": file.file_name().unwrap_or_default().to_string_lossy(), "bytes": bytes, "sha256": digest }))
        })
        .collect::<Result<Vec<Value>>>()?;
    let kind = gguf.optional::<&str>("general.type").ok().flatten().unwrap_or("model");
    let (about, warnings) = about(gguf, kind, path);
    Ok(json!({
        "kind": kind,
        "version": gguf.version(),
        "alignment": gguf.alignment(),
        "size_bytes": gguf.size_bytes(),
        "files": files,
        "weights": weights,
        "bits_per_weight": 8.0 * data as f64 / weights.max(1) as f64,
        "types": types,
        "tensors_sha256": base_digest(gguf),
        kind: about,
        "warnings": warnings,
        "metadata": gguf.metadata().iter().map(|(k, v)| (k.clone(), meta(v))).collect::<Map<_, _>>(),
        "tensors": gguf.tensors().iter().map(|t| json!({
            "name": t.name, "dims": t.dims, "type": t.ty, "offset": t.offset, "bytes": t.len,
        })).collect::<Vec<_>>(),
    }))
}

/// The files of a set, in order.
fn files(path: &Path, count: usize) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match name.strip_suffix(&format!("-00001-of-{count:05}.gguf")) {
        Some(prefix) if count > 1 => (0..count).map(|no| shard_path(&path.with_file_name(prefix), no, count)).collect(),
        _ => vec![path.to_owned()],
    }
}

/// What this kind of file is about, and what will not work with it.
fn about(gguf: &Gguf, kind: &str, path: &Path) -> (Value, Vec<String>) {
    let mut warnings = Vec::new();
    let about = match kind {
        "adapter" => Adapter::from_gguf(gguf).map_err(|e| e.to_string()).map(|a| {
            let rank = a.pairs().map(|(_, _, p)| p.rank).max();
            json!({ "architecture": a.arch.name(), "alpha": a.alpha, "rank": rank, "matrices": a.pairs().count(),
                "base_sha256": a.base_sha256 })
        }),
        "imatrix" => Imatrix::read(path).map_err(|e| e.to_string()).map(|m| {
            json!({ "datasets": m.datasets, "chunks": m.chunks, "chunk_tokens": m.chunk_tokens,
                "matrices": m.tensors().count() })
        }),
        _ => {
            let found = ModelConfig::from_gguf(gguf, &mut warnings);
            let missing = [
                Tokenizer::from_gguf(gguf).err().map(|e| format!("tokenizer: {e}")),
                ChatTemplate::from_gguf(gguf).err().map(|e| format!("chat template: {e}")),
            ];
            warnings.extend(missing.into_iter().flatten());
            found.map_err(|e| e.to_string()).map(|c| {
                json!({
                    "architecture": c.arch.name(), "layers": c.layers, "width": c.width, "heads": c.heads,
                    "kv_heads": c.kv_heads, "head_dim": c.head_dim, "ffn": c.ffn, "vocabulary": c.vocab,
                    "context": c.context, "rope_base": c.rope.base,
                })
            })
        }
    };
    let about = about.unwrap_or_else(|e| {
        warnings.push(format!("this program cannot run it: {e}"));
        Value::Null
    });
    (about, warnings)
}

fn meta(value: &Meta) -> Value {
    match value {
        Meta::U8(v) => json!(v),
        Meta::I8(v) => json!(v),
        Meta::U16(v) => json!(v),
        Meta::I16(v) => json!(v),
        Meta::U32(v) => json!(v),
        Meta::I32(v) => json!(v),
        Meta::U64(v) => json!(v),
        Meta::I64(v) => json!(v),
        Meta::F32(v) => short(*v),
        Meta::F64(v) => json!(v),
        Meta::Bool(v) => json!(v),
        Meta::String(v) => json!(v),
        Meta::Array(a) if a.len() > MOST_ELEMENTS => json!({ "type": value.type_name(), "len": a.len() }),
        Meta::Array(a) => array(a),
    }
}

/// The shortest number that is this one at single precision, not its digits at double precision.
fn short(v: f32) -> Value {
    v.to_string().parse::<f64>().map_or(Value::Null, |v| json!(v))
}

fn array(a: &Array) -> Value {
    match a {
        Array::U8(v) => json!(v),
        Array::I8(v) => json!(v),
        Array::U16(v) => json!(v),
        Array::I16(v) => json!(v),
        Array::U32(v) => json!(v),
        Array::I32(v) => json!(v),
        Array::U64(v) => json!(v),
        Array::I64(v) => json!(v),
        Array::F32(v) => v.iter().map(|v| short(*v)).collect(),
        Array::F64(v) => json!(v),
        Array::Bool(v) => json!(v),
        Array::String(v) => json!(v),
    }
}

fn lines(whole: &Value, gguf: &Gguf) -> Vec<String> {
    let word = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let kind = word(&whole["kind"]);
    let mut out = vec![format!(
        "{kind}: GGUF v{}, {} bytes in {} files, alignment {}",
        gguf.version(),
        gguf.size_bytes(),
        gguf.n_files(),
        gguf.alignment()
    )];
    if let Some(about) = whole[kind.as_str()].as_object() {
        let parts: Vec<String> = about.iter().map(|(k, v)| format!("{k} {}", word(v))).collect();
        out.push(format!("  {}", parts.join(", ")));
    }
    out.push(format!(
        "  {} weights in {} tensors, {:.3} bits per weight",
        whole["weights"],
        gguf.tensors().len(),
        whole["bits_per_weight"].as_f64().unwrap_or(f64::NAN)
    ));
    for (name, sums) in whole["types"].as_object().into_iter().flatten() {
        out.push(format!(
            "  {name:7} {} tensors, {} weights, {} bytes",
            sums["tensors"], sums["weights"], sums["bytes"]
        ));
    }
    for file in whole["files"].as_array().into_iter().flatten() {
        out.push(format!("  sha256 {}  {}", word(&file["sha256"]), word(&file["file"])));
    }
    out.push(format!("  tensors sha256 {}", word(&whole["tensors_sha256"])));
    for warning in whole["warnings"].as_array().into_iter().flatten() {
        out.push(format!("warning: {}", word(warning)));
    }
    out.push("metadata".into());
    for (key, value) in gguf.metadata() {
        let text: String = word(&meta(value)).replace('\n', "\\n").chars().take(MOST_CHARS).collect();
        out.push(format!("  {key} = {text}"));
    }
    out.push("tensors".into());
    for t in gguf.tensors() {
        out.push(format!("  {:40} {:8} {:?}", t.name, t.ty.name(), t.dims));
    }
    out
}
