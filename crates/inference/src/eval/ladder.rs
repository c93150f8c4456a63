//! The ladder of a model: what every size of its file costs in quality and gives in speed, in one call.

use super::{
    Base, Divergence, PairedDivergence, PositionScores, Probes, RecordedBase, SpeedReport, plot, position_scores,
    record_base, speed,
};
use crate::gguf::Gguf;
use crate::model::{Decoder, ModelError};
use crate::quantize::{Profile, QuantizeError, QuantizeOptions, quantize};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// Who made a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Maker {
    Ours,
    /// `llama-quantize`.
    Stock,
}

/// A file to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LadderFile {
    /// For tables and plots, for example `Q4_0`.
    pub label: String,
    pub maker: Maker,
    pub path: PathBuf,
}

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub struct LadderOptions {
    /// Tokens of a window, see [`super::divergence`].
    pub window: usize,
    /// Prompt and new tokens of the speed measurement, one sequence.
    pub prompt: usize,
    pub new: usize,
    /// Make files also from a base that is already quantised; its error is then in all of them.
    pub allow_requantize: bool,
}

/// Clock and memory of this process. A peak that cannot be set back is that of all models so far.
pub struct LadderProbes<'a> {
    pub probes: Probes<'a>,
    /// Sets the peak back to what is in use now; whether that was possible.
    pub reset_peak: &'a mut dyn FnMut() -> bool,
}

/// One file of the ladder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LadderRow {
    pub label: String,
    pub maker: Maker,
    pub file_bytes: u64,
    /// All tensor bytes over all weights.
    pub bits_per_weight: f64,
    /// Tensors of each type.
    pub types: BTreeMap<String, usize>,
    /// Against the base; its own row has 0.
    pub divergence: Divergence,
    /// Against the last stock file above it that is not smaller, if this file is ours.
    pub against_stock: Option<(String, PairedDivergence)>,
    /// Opening, checking and unpacking.
    pub load_ms: f64,
    /// Peak while loading and running this file; `None` where it cannot be told apart.
    pub peak_rss_bytes: Option<u64>,
    pub speed: SpeedReport,
}

/// Everything measured; the first row is the base.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ladder {
    /// Tokens scored.
    pub tokens: usize,
    pub window: usize,
    pub rows: Vec<LadderRow>,
}

/// Why there is no ladder.
#[derive(Debug, thiserror::Error)]
pub enum LadderError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
}

/// Makes a file of `base` in each of `profiles` in `folder`, named after its profile.
///
/// # Errors
/// [`QuantizeError`].
pub fn ladder_files(
    base: &Gguf,
    profiles: &[Profile],
    options: LadderOptions,
    folder: &Path,
) -> Result<Vec<LadderFile>, LadderError> {
    let mut files = Vec::with_capacity(profiles.len());
    for profile in profiles {
        let path = folder.join(format!("{profile}.gguf"));
        let how = QuantizeOptions { allow_requantize: options.allow_requantize, ..QuantizeOptions::new(*profile) };
        quantize(base, &path, &how, &mut |_| ControlFlow::Continue(()))?;
        files.push(LadderFile { label: profile.name().to_owned(), maker: Maker::Ours, path });
    }
    Ok(files)
}

/// The ladder of one model in one call: `base` is written as F16 and in each of `profiles` (`[Q8_0, Q4_0]` are INT8 and
/// INT4) into `folder`, and all are measured against F16.
///
/// # Errors
/// As [`ladder`].
pub fn model_ladder(
    base: &Gguf,
    profiles: &[Profile],
    tokens: &[u32],
    options: LadderOptions,
    folder: &Path,
    probes: &mut LadderProbes<'_>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Ladder, LadderError> {
    let float = ladder_files(base, &[Profile::F16], options, folder)?;
    let files = ladder_files(base, profiles, options, folder)?;
    ladder(&float[0], &files, tokens, options, folder, probes, watch)
}

/// Measures `base` and every file against it on `tokens`; `scratch` takes the base's predictions, two bytes a token of the
/// vocabulary and position. One model is in memory at a time. `watch` sees rows done and their number.
///
/// # Errors
/// Those of loading, [`position_scores`] and [`speed`]; [`ModelError::Cancelled`].
pub fn ladder(
    base: &LadderFile,
    files: &[LadderFile],
    tokens: &[u32],
    options: LadderOptions,
    scratch: &Path,
    probes: &mut LadderProbes<'_>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Ladder, LadderError> {
    let record_path = scratch.join("base-predictions");
    let mut go = |_: usize, _: usize| ControlFlow::Continue(());
    let mut record = None;
    let mut scores: Vec<PositionScores> = Vec::new();
    let mut rows: Vec<LadderRow> = Vec::new();
    for file in [base].into_iter().chain(files) {
        let (gguf, model, load_ms, alone) = load(file, probes)?;
        let of_base = match &record {
            None => {
                record_base(&model, tokens, options.window, &record_path, &mut go)?;
                PositionScores::of_base(record.insert(RecordedBase::open(&record_path)?))?
            }
            // Activations as they are: what is compared is the weights.
            Some(record) => position_scores(Base::Recorded(record), &model.exact(), tokens, options.window, &mut go)?,
        };
        let speed = speed(&model, 1, options.prompt, options.new, &mut probes.probes)?;
        let mut row = LadderRow {
            label: file.label.clone(),
            maker: file.maker,
            file_bytes: gguf.size_bytes(),
            bits_per_weight: bits_per_weight(&gguf),
            types: types(&gguf),
            divergence: of_base.summary(),
            against_stock: None,
            load_ms,
            peak_rss_bytes: speed.peak_rss_bytes.filter(|_| alone),
            speed,
        };
        let peer = |r: &&LadderRow| r.maker == Maker::Stock && r.file_bytes >= row.file_bytes;
        let peer = rows.iter().skip(1).filter(peer).min_by_key(|r| r.file_bytes);
        if let Some(stock) = peer.filter(|_| file.maker == Maker::Ours)
            && let Some(i) = rows.iter().position(|r| std::ptr::eq(r, stock))
        {
            row.against_stock = Some((stock.label.clone(), PositionScores::compare(&scores[i], &of_base)?));
        }
        rows.push(row);
        scores.push(of_base);
        if watch(rows.len(), files.len() + 1).is_break() {
            return Err(ModelError::Cancelled.into());
        }
    }
    Ok(Ladder { tokens: rows.first().map_or(0, |r| r.divergence.base.tokens), window: options.window, rows })
}

/// The model, how long it took to load, and whether the peak of memory is its own.
fn load(file: &LadderFile, probes: &mut LadderProbes<'_>) -> Result<(Gguf, Decoder, f64, bool), ModelError> {
    let alone = (probes.reset_peak)();
    let start = (probes.probes.now)();
    let gguf = Gguf::open(&file.path)?;
    let model = Decoder::load(&gguf)?;
    let load_ms = (probes.probes.now)().saturating_sub(start).as_secs_f64() * 1e3;
    Ok((gguf, model, load_ms, alone))
}

fn bits_per_weight(gguf: &Gguf) -> f64 {
    let (bytes, weights) =
        gguf.tensors().iter().fold((0.0, 0.0), |(b, w), t| (b + t.len as f64, w + t.n_elements() as f64));
    8.0 * bytes / f64::max(weights, 1.0)
}

fn types(gguf: &Gguf) -> BTreeMap<String, usize> {
    gguf.tensors().iter().fold(BTreeMap::new(), |mut counts, tensor| {
        *counts.entry(tensor.ty.name().to_owned()).or_default() += 1;
        counts
    })
}

impl Ladder {
    /// A table, one file a line.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = String::from(
            "| file | made by | MB | bits/weight | PPL | KLD mean (95 %) | KLD 99 % | KLD 99.9 % | KLD max | same top-1 | \
             RMS Δp | load ms | TTFT ms | prefill tok/s | decode tok/s | peak RSS MB |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in &self.rows {
            let d = &row.divergence;
            let kld = d.intervals.map_or_else(
                || format!("{:.5}", d.kld),
                |i| format!("{:.5} ({:.5} to {:.5})", d.kld, i.kld.low, i.kld.high),
            );
            let rss = row.peak_rss_bytes.map_or_else(|| "not known".into(), |b| format!("{:.0}", b as f64 / 1e6));
            let maker = if row.maker == Maker::Ours { "ours" } else { "stock" };
            // Writing into a string cannot fail.
            let _ = writeln!(
                out,
                "| {} | {maker} | {:.1} | {:.2} | {:.3} | {kld} | {:.4} | {:.4} | {:.3} | {:.2} % | {:.2} % | {:.0} | {:.0} | {:.0} | {:.1} | {rss} |",
                row.label.replace('|', "\\|"),
                row.file_bytes as f64 / 1e6,
                row.bits_per_weight,
                d.other.perplexity,
                d.kld_p99,
                d.kld_p999,
                d.kld_max,
                100.0 * d.top1,
                100.0 * d.dp_rms,
                row.load_ms,
                row.speed.first_token_ms,
                row.speed.prefill_tokens_per_s,
                row.speed.decode_tokens_per_s,
            );
        }
        let _ = writeln!(out, "\n{} tokens scored in windows of {}.", self.tokens, self.window);
        for (label, stock, p) in
            self.rows.iter().filter_map(|r| r.against_stock.as_ref().map(|(s, p)| (&r.label, s, p)))
        {
            let interval = p.kld_ratio.interval.map_or(String::new(), |i| format!(" ({:.3} to {:.3})", i.low, i.high));
            let _ = writeln!(
                out,
                "{label} (ours) has {:.3} of the mean KLD of {stock} (stock){interval}.",
                p.kld_ratio.value
            );
        }
        out
    }

    /// A plot of mean KLD, logarithmic, against bytes of the file: one line of points for stock files and one for ours.
    #[must_use]
    pub fn svg(&self) -> String {
        let points = self.rows.iter().skip(1).map(|row| plot::Point {
            label: row.label.clone(),
            series: usize::from(row.maker == Maker::Stock),
            bytes: row.file_bytes as f64,
            kld: row.divergence.kld,
            interval: row.divergence.intervals.map(|i| i.kld),
        });
        plot::svg(&["ours", "stock"], &points.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Arch;
    use crate::model::tests::{some_tokens, tiny_file};
    use std::time::Duration;

    #[test]
    fn a_ladder_is_measured_written_and_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let options = LadderOptions { window: 20, prompt: 8, new: 4, allow_requantize: false };
        let file = tiny_file(Arch::Llama);
        let profiles = [Profile::F16, Profile::Q8_0, Profile::Q4_0];
        let mut files = ladder_files(&file, &profiles, options, folder.path()).unwrap();
        // the same file once more as if stock had made it
        files.insert(2, LadderFile { label: "Q4_0 <stock>".into(), maker: Maker::Stock, path: files[2].path.clone() });
        let (mut ticks, resets) = (0, std::cell::Cell::new(0));
        let mut probes = LadderProbes {
            probes: Probes {
                now: &mut || {
                    ticks += 1;
                    Duration::from_millis(ticks * 10)
                },
                peak_rss_bytes: &mut || Some(7_000_000),
            },
            reset_peak: &mut || {
                resets.set(resets.get() + 1);
                true
            },
        };
        let tokens = some_tokens(200, 1);
        let mut go = |_: usize, _: usize| ControlFlow::Continue(());
        let base = files.remove(0);
        let ladder = ladder(&base, &files, &tokens, options, folder.path(), &mut probes, &mut go).unwrap();
        let labels: Vec<&str> = ladder.rows.iter().map(|r| r.label.as_str()).collect();
        assert_eq!((labels, ladder.tokens, resets.get()), (vec!["F16", "Q8_0", "Q4_0 <stock>", "Q4_0"], 100, 4));
        let [f16, q8, _, q4] = &ladder.rows[..] else { panic!() };
        assert_eq!((f16.divergence.kld, f16.divergence.top1, f16.load_ms), (0.0, 1.0, 10.0));
        // rows of 24 and 40 are no blocks of 32: only the output projections can be quantised
        assert_eq!(q8.types, BTreeMap::from([("F16".into(), 13), ("F32".into(), 5), ("Q8_0".into(), 2)]));
        assert!(q8.file_bytes < f16.file_bytes && q8.bits_per_weight < f16.bits_per_weight);
        assert!(q8.divergence.kld < q4.divergence.kld && q4.peak_rss_bytes == Some(7_000_000));
        let (stock, pair) = q4.against_stock.clone().unwrap_or_else(|| panic!("{ladder:?}"));
        assert_eq!((stock.as_str(), pair.kld.value, pair.kld_ratio.value), ("Q4_0 <stock>", 0.0, 1.0));

        let table = ladder.markdown();
        assert_eq!(table.lines().filter(|l| l.starts_with('|')).count(), 2 + 4, "{table}");
        assert!(table.contains("Q4_0 (ours) has 1.000 of the mean KLD of Q4_0 <stock> (stock)"), "{table}");
        let json = serde_json::to_value(&ladder).unwrap();
        assert_eq!(json["rows"][1]["divergence"]["kld"], q8.divergence.kld);
        let svg = ladder.svg();
        assert_eq!(svg.matches("<circle").count(), 3 + 2, "points and legend");
        let one_call =
            model_ladder(&file, &profiles[1..], &tokens, options, folder.path(), &mut probes, &mut go).unwrap();
        assert_eq!(one_call.rows[2].divergence, q4.divergence);
        assert!(svg.contains("Q4_0 &lt;stock&gt;") && svg.contains(">stock<") && !svg.contains("NaN"), "{svg}");
    }
}
