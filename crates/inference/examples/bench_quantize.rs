//! Speed of plain quantisation, for `cargo xtask bench quant`, which runs stock llama.cpp (`tests/interop/referee.py`) on the same
//! files.
//!
//! `bench_quantize make FOLDER` writes `base.gguf`, a random F32 llama of 103 M weights whose rows are whole k-quant blocks, and
//! `base.imatrix` of a few random texts. `bench_quantize BASE OUT PROFILE --json REPORT [--imatrix FILE | --no-search]` quantises once; REPORT gets the
//! seconds from opening the base to the finished file.

use flywheel_inference::calibrate::calibrate;
use flywheel_inference::gguf::{self, Gguf};
use flywheel_inference::model::{Arch, ModelConfig, RopeConfig};
use flywheel_inference::quantize::{Imatrix, QuantizeOptions, quantize};
use flywheel_inference::tokenizer::learn_bpe;
use flywheel_inference::train::random_model;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str =
    "bench_quantize make FOLDER | bench_quantize BASE OUT PROFILE --json REPORT [--imatrix FILE | --no-search]";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    match args.as_slice() {
        [make, folder] if make == "make" => base(Path::new(folder)),
        [from, to, profile, ..] => {
            let imatrix = option("--imatrix").map(|f| Imatrix::read(Path::new(f))).transpose()?;
            let search = !args.iter().any(|a| a == "--no-search");
            let options = QuantizeOptions { imatrix, search, ..QuantizeOptions::new(profile.parse()?) };
            let start = Instant::now();
            quantize(&Gguf::open(Path::new(from))?, Path::new(to), &options, &mut |_| ControlFlow::Continue(()))?;
            let report = serde_json::json!({ "seconds": start.elapsed().as_secs_f64() });
            Ok(std::fs::write(option("--json").ok_or(USAGE)?, report.to_string())?)
        }
        _ => Err(USAGE.into()),
    }
}

fn base(folder: &Path) -> Result<()> {
    let config = ModelConfig {
        arch: Arch::Llama,
        layers: 8,
        width: 1024,
        heads: 16,
        kv_heads: 16,
        head_dim: 64,
        ffn: 2816,
        vocab: 260,
        context: 512,
        rms_eps: 1e-5,
        rope: RopeConfig { base: 10_000.0, dims: 64, linear_factor: 1.0, yarn: None },
        latent: None,
        experts: None,
    };
    let mut metadata = config.metadata("speed");
    metadata.extend(learn_bpe(&["aa aa aa ab ab ab ba ba"], config.vocab, "gpt-2")?);
    let file = folder.join("base.gguf");
    gguf::write(&file, &metadata, random_model(&config, 1)?)?;
    let texts: Vec<Vec<u32>> = (0..4u32).map(|t| (0..256u32).map(|i| (t * 101 + i * 37) % 256).collect()).collect();
    let found = calibrate(&Gguf::open(&file)?, &texts, &mut |_, _| ControlFlow::Continue(()))?;
    found.imatrix(vec!["random".into()])?.write(&folder.join("base.imatrix"))?;
    Ok(())
}
