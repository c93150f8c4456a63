//! Makes the small file of a model: a named mix of types, or the best types under a limit of bytes, calibrated on texts
//! where there are some. The job `requantize` and `flywheel model quantize` are these calls.

use super::refused;
use crate::pipeline::blocking::stopped;
use flywheel_inference::gguf::{Gguf, TensorType};
use flywheel_inference::quantize::npu::NpuProfile;
use flywheel_inference::quantize::{
    Goal, Method, Profile, Progress, QuantizeError, QuantizeOptions, QuantizeReport, TensorRow, TuneOptions,
    TuneReport, quantize, tune,
};
use flywheel_types::Error;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

/// What to make of a float model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Wanted {
    /// The types with the least expected loss under a limit of bytes.
    Auto,
    /// A mix of llama.cpp.
    Named(Profile),
    /// A tensor pack of integers.
    Npu(NpuProfile),
}

impl Wanted {
    /// As people write it, for example `q4_k_m`.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Auto => "auto".into(),
            Self::Named(p) => p.name().to_ascii_lowercase(),
            Self::Npu(p) => format!("npu-int{}", p.bits()),
        }
    }
}

impl std::str::FromStr for Wanted {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            npu if npu.starts_with("npu-") => npu.parse().map(Self::Npu),
            named => named.parse().map(Self::Named).map_err(|_| {
                let known: Vec<String> = Profile::ALL.into_iter().map(|p| Self::Named(p).name()).collect();
                format!("`{s}` is not a profile; known are auto, {}, npu-int4, npu-int6, npu-int8", known.join(", "))
            }),
        }
    }
}
impl TryFrom<String> for Wanted {
    type Error = String;
    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}
impl From<Wanted> for String {
    fn from(w: Wanted) -> Self {
        w.name()
    }
}

/// Sees how far a run is and can stop it.
pub type Watch<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// A finished file.
pub struct Made {
    wanted: Wanted,
    pub size_bytes: u64,
    /// All tensor bytes over all weights, times 8.
    bits_per_weight: f64,
    report: Report,
}

enum Report {
    Plain(QuantizeReport),
    Calibrated { report: TuneReport, texts: usize, tokens: usize },
}

/// Quantises tensor by tensor, weighted where the options have an importance matrix.
///
/// # Errors
/// `Invalid` naming the tensor that cannot be quantised and what to do; [`stopped`].
pub fn plain(base: &Gguf, out: &Path, options: &QuantizeOptions, watch: &mut Watch<'_>) -> Result<Made, Error> {
    let report = quantize(base, out, options, watch).map_err(failed)?;
    Ok(Made {
        wanted: Wanted::Named(options.profile),
        size_bytes: report.size_bytes,
        bits_per_weight: report.bits_per_weight(),
        report: Report::Plain(report),
    })
}

/// Quantises block by block on `texts`: channel scales, compensated rounding, types by expected loss under a budget. A run
/// that was stopped goes on at its first unfinished block when it is called with the same arguments.
///
/// # Errors
/// As [`plain`].
pub fn calibrated(
    base: &Gguf,
    out: &Path,
    texts: &[Vec<u32>],
    options: &TuneOptions,
    watch: &mut Watch<'_>,
) -> Result<Made, Error> {
    let report = tune(base, out, texts, options, watch).map_err(failed)?;
    let wanted = match options.goal {
        Goal::Budget(_) => Wanted::Auto,
        Goal::Profile(profile) => Wanted::Named(profile),
    };
    let tokens = texts.iter().map(Vec::len).sum();
    Ok(Made {
        wanted,
        size_bytes: report.size_bytes,
        bits_per_weight: report.bits_per_weight(),
        report: Report::Calibrated { report, texts: texts.len(), tokens },
    })
}

/// An error of quantisation for people.
pub fn failed(e: QuantizeError) -> Error {
    match e {
        QuantizeError::Cancelled => stopped("quantisation"),
        QuantizeError::Budget { .. } => {
            Error::invalid("budget_too_small", e.to_string(), "allow more bytes (`--budget`, or `lora.budget_bytes`)")
        }
        QuantizeError::AlreadyQuantized { .. } => {
            let hint = "quantise the F16 or F32 model; `--allow-requantize` adds to the error that is there";
            Error::invalid("already_quantized", e.to_string(), hint)
        }
        other => refused(other),
    }
}

impl Made {
    fn rows(&self) -> Vec<&TensorRow> {
        match &self.report {
            Report::Plain(r) => r.tensors.iter().map(|t| &t.row).collect(),
            Report::Calibrated { report, .. } => report.tensors.iter().map(|t| &t.row).collect(),
        }
    }

    /// What people ask about the file: true bits per weight, the types that were chosen, what each step brought.
    #[must_use]
    pub fn summary(&self) -> Value {
        let rows = self.rows();
        let mut matrices: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        // vectors stay F32 whatever is asked for
        for row in rows.iter().filter(|r| r.to != TensorType::F32) {
            matrices.entry(row.to.name()).or_default().push(&row.name);
        }
        let counts =
            |[tensors, weights, bytes]: [u64; 3]| json!({ "tensors": tensors, "weights": weights, "bytes": bytes });
        let types: serde_json::Map<_, _> =
            by_type(&rows).into_iter().map(|(name, sums)| (name.to_owned(), counts(sums))).collect();
        let mut out = json!({
            "profile": self.wanted.name(),
            "size_bytes": self.size_bytes,
            "bits_per_weight": self.bits_per_weight,
            "fallbacks": rows.iter().filter(|r| r.fallback_from.is_some()).count(),
            "types": types,
            "tensor_types": matrices,
        });
        if let (Report::Calibrated { report, texts, tokens }, Value::Object(map)) = (&self.report, &mut out) {
            map.insert("calibration".into(), json!({ "texts": texts, "tokens": tokens }));
            // relative squared error of the outputs on the calibration texts, mean over all matrices, after each step
            map.insert("steps".into(), json!(report.steps()));
            map.insert("methods".into(), json!(methods(report)));
            map.insert("predicted".into(), json!(report.predicted));
        }
        out
    }

    /// [`Made::summary`] with every tensor.
    #[must_use]
    pub fn whole(&self) -> Value {
        let tensors = match &self.report {
            Report::Plain(r) => json!(r.tensors),
            Report::Calibrated { report, .. } => json!(report.tensors),
        };
        let mut out = self.summary();
        if let Value::Object(map) = &mut out {
            map.insert("tensors".into(), tensors);
        }
        out
    }

    /// The summary for a terminal.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let rows = self.rows();
        let total: u64 = rows.iter().map(|r| r.weights).sum();
        let mut out = vec![format!(
            "{}: {} bytes, {:.3} bits per weight",
            self.wanted.name(),
            self.size_bytes,
            self.bits_per_weight
        )];
        for (name, [tensors, weights, _]) in by_type(&rows) {
            let share = 100.0 * weights as f64 / total.max(1) as f64;
            out.push(format!("  {name:7} {tensors:5} tensors  {share:6.2} % of the weights"));
        }
        let fallbacks: Vec<&&TensorRow> = rows.iter().filter(|r| r.fallback_from.is_some()).collect();
        if let Some(first) = fallbacks.first() {
            out.push(format!(
                "  {} tensors have rows that are not whole blocks of the type the profile wants, and got another: {} is {} \
                 instead of {}",
                fallbacks.len(),
                first.name,
                first.to,
                first.fallback_from.map_or("", TensorType::name)
            ));
        }
        if let Report::Calibrated { report, texts, tokens } = &self.report {
            let s = report.steps();
            out.push(format!(
                "  calibrated on {tokens} tokens in {texts} texts; relative squared error of the outputs, mean:"
            ));
            out.push(format!(
                "  nearest levels {:.3e} → weighted by importance {:.3e} → channel scales {:.3e} → compensated {:.3e}",
                s.rounded, s.weighted, s.folded, s.stored
            ));
            if let Some(p) = &report.predicted {
                let same = p.uniform_loss.zip(p.uniform_type);
                let same =
                    same.map_or("no single type fits".into(), |(loss, ty)| format!("{loss:.5} with {ty} throughout"));
                out.push(format!("  expected rise of the loss: {:.5} nats a token ({same})", p.loss));
            }
        }
        out
    }
}

/// Tensors, weights and bytes of each type.
fn by_type(rows: &[&TensorRow]) -> BTreeMap<&'static str, [u64; 3]> {
    let mut out = BTreeMap::new();
    for row in rows {
        let sums = out.entry(row.to.name()).or_insert([0; 3]);
        *sums = [sums[0] + 1, sums[1] + row.weights, sums[2] + row.size_bytes];
    }
    out
}

/// Matrices by how their levels were chosen.
fn methods(report: &TuneReport) -> BTreeMap<&'static str, usize> {
    let mut out = BTreeMap::new();
    for t in &report.tensors {
        let name = match t.method {
            Method::Stored => continue,
            Method::Rounded => "rounded",
            Method::Compensated { .. } => "compensated",
            Method::CompensatedByDiagonal { .. } => "compensated_by_diagonal",
        };
        *out.entry(name).or_insert(0) += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_known_by_name() {
        let name = |s: &str| s.parse::<Wanted>().map(Wanted::name);
        for known in ["auto", "f16", "q4_0", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "npu-int4", "npu-int6", "npu-int8"] {
            assert_eq!(name(known).as_deref(), Ok(known));
        }
        assert_eq!(name("Q4_K_M").as_deref(), Ok("q4_k_m"));
        for unknown in ["", "q3_k", "npu-int5", "AUTO"] {
            let e = name(unknown).unwrap_err();
            assert!(e.contains(&format!("`{unknown}`")) && e.contains("npu-int8"), "{e}");
        }
        assert!(serde_json::from_str::<Wanted>("\"q3_k\"").is_err());
        assert_eq!(serde_json::to_value(Wanted::Auto).unwrap(), json!("auto"));
    }
}
