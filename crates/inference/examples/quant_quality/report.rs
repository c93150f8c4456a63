//! Figures of a case, and whether its bars are cleared.

use crate::Result;
use crate::cases::Case;
use crate::files::{ALL_STEPS, BUDGET, SAME_TEXT, Scored};
use crate::texts::SCORED;
use flywheel_inference::eval::{Interval, PositionScores};
use serde::Serialize;

#[derive(Serialize)]
pub struct Report {
    case: &'static str,
    /// Least share by which the divergence is to be lower.
    wanted: f64,
    /// Whether each of ours does that on the first text, with no more bytes and an interval that excludes none at all.
    met: Vec<(String, bool)>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    label: String,
    bytes: u64,
    seconds: f64,
    texts: Vec<Figures>,
}

#[derive(Serialize)]
struct Figures {
    text: &'static str,
    base_perplexity: f64,
    perplexity: f64,
    kld: f64,
    kld_p99: f64,
    top1: f64,
    /// Mean divergence over that of stock with the same calibration text, minus one; paired over windows.
    change: f64,
    interval: Option<Interval>,
    /// The same over stock with the calibration text that is best for this text.
    change_from_best: f64,
}

pub fn of(case: &Case, files: &[Scored]) -> Result<Report> {
    let same = files.iter().find(|f| f.file.label == SAME_TEXT).ok_or("no file to compare with")?;
    let mean = |s: &PositionScores| s.kld().iter().sum::<f64>() / s.kld().len() as f64;
    let mut rows = Vec::new();
    for f in files {
        let mut texts = Vec::new();
        for (i, scores) in f.scores.iter().enumerate() {
            let stock = files.iter().filter(|s| s.file.label.starts_with("stock"));
            let best = stock.map(|s| mean(&s.scores[i])).fold(f64::INFINITY, f64::min);
            let (own, ratio) = (scores.summary(), PositionScores::compare(&same.scores[i], scores)?.kld_ratio);
            texts.push(Figures {
                text: SCORED[i],
                base_perplexity: own.base.perplexity,
                perplexity: own.other.perplexity,
                kld: own.kld,
                kld_p99: own.kld_p99,
                top1: own.top1,
                change: ratio.value - 1.0,
                interval: ratio.interval.map(|r| Interval { low: r.low - 1.0, high: r.high - 1.0 }),
                change_from_best: own.kld / best - 1.0,
            });
        }
        rows.push(Row { label: f.file.label.clone(), bytes: f.file.bytes, seconds: f.file.seconds, texts });
    }
    let judged = rows.iter().filter(|r| [ALL_STEPS, BUDGET].contains(&r.label.as_str()));
    let met = |r: &Row| {
        let first = &r.texts[0];
        let sure = first.interval.is_some_and(|i| i.high < 0.0);
        (r.label.clone(), first.change <= -case.wanted && sure && r.bytes <= same.file.bytes)
    };
    Ok(Report { case: case.name, wanted: case.wanted, met: judged.map(met).collect(), rows })
}

/// A table of one case.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("### {}\n\n| file | bytes |", report.case);
    for text in SCORED {
        out += &format!(" {text}: PPL | KLD | p99 | top-1 % | against stock | stock's best |");
    }
    out += &format!("\n|---|---|{}\n", "---|".repeat(6 * SCORED.len()));
    for row in &report.rows {
        out += &format!("| {} | {} |", row.label, row.bytes);
        for t in &row.texts {
            let interval =
                t.interval.map_or(String::new(), |i| format!(" [{:+.1}, {:+.1}]", 100.0 * i.low, 100.0 * i.high));
            out += &format!(
                " {:.3} | {:.5} | {:.3} | {:.1} | {:+.1} %{interval} | {:+.1} % |",
                t.perplexity,
                t.kld,
                t.kld_p99,
                100.0 * t.top1,
                100.0 * t.change,
                100.0 * t.change_from_best
            );
        }
        out += "\n";
    }
    let base: Vec<String> = report
        .rows
        .first()
        .map_or(Vec::new(), |r| r.texts.iter().map(|t| format!("{:.3}", t.base_perplexity)).collect());
    out += &format!("\nBase: PPL {}. Wanted: {:.0} % less; ", base.join(" and "), 100.0 * report.wanted);
    for (label, met) in &report.met {
        out += &format!("{label}: {}; ", if *met { "met" } else { "NOT met" });
    }
    out
}
