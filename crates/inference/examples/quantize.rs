//! Quantises a GGUF file: `quantize IN.gguf OUT.gguf PROFILE [--requantize] [--imatrix FILE.gguf]`.
#![expect(clippy::print_stdout, reason = "a command-line program prints its report")]

use flywheel_inference::{
    gguf::Gguf,
    quantize::{Imatrix, QuantizeOptions, quantize},
};
use std::{error::Error, ops::ControlFlow, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, profile, rest @ ..] = args.as_slice() else {
        return Err("usage: quantize IN.gguf OUT.gguf PROFILE [--requantize] [--imatrix FILE.gguf]".into());
    };
    let mut options = QuantizeOptions::new(profile.parse()?);
    let mut rest = rest.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--requantize" => options.allow_requantize = true,
            "--imatrix" => {
                let file = rest.next().ok_or("--imatrix needs a file")?;
                options.imatrix = Some(Imatrix::read(Path::new(file))?);
            }
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    let base = Gguf::open(Path::new(input))?;
    let report = quantize(&base, Path::new(output), &options, &mut |_| ControlFlow::Continue(()))?;
    println!("{report}");
    for t in &report.tensors {
        let fallback = t.fallback_from.map(|w| format!(" (wanted {w})")).unwrap_or_default();
        println!("{:40} {:5} -> {:5}{fallback} error {:.4}", t.name, t.from, t.to, t.relative_error);
    }
    Ok(())
}
