//! Speed of one GGUF file: load time, prefill, decoding alone and eight together. `cargo xtask bench decode` runs it
//! beside stock llama.cpp.
#![allow(clippy::print_stdout, reason = "a program that prints figures")]
use flywheel_inference::eval::{Probes, speed};
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::Decoder;
use flywheel_inference::tokenizer::Tokenizer;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for path in std::env::args().skip(1) {
        let start = Instant::now();
        let gguf = Gguf::open(std::path::Path::new(&path))?;
        let t_open = start.elapsed().as_secs_f64();
        let tok = Tokenizer::from_gguf(&gguf)?;
        let t_tok = start.elapsed().as_secs_f64();
        let model = Decoder::load(&gguf)?;
        let load = start.elapsed().as_secs_f64();
        drop(tok);
        let (mut best_p, mut best_d, mut best_8) = (0.0f64, 0.0f64, 0.0f64);
        for _ in 0..3 {
            let mut probes = Probes { now: &mut || start.elapsed(), peak_rss_bytes: &mut || None };
            let s = speed(&model, 1, 512, 33, &mut probes)?;
            best_p = best_p.max(s.prefill_tokens_per_s);
            best_d = best_d.max(s.decode_tokens_per_s);
            let s = speed(&model, 8, 64, 17, &mut probes)?;
            best_8 = best_8.max(s.decode_tokens_per_s);
        }
        println!("{path} open {t_open:.3} tok {t_tok:.3} load {load:.3} prefill {best_p:.1} decode {best_d:.1} x8 {best_8:.1}");
    }
    Ok(())
}
