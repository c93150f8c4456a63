//! Makes files of history for the benchmark of imports: answers of phones over some weeks as Parquet, and judgements about them
//! and device events as JSON lines. The same arguments make the same bytes.
#![allow(clippy::print_stdout, reason = "a program for the command line")]

use anyhow::{Context, Result};
use arrow::array::{
    ArrayRef, BooleanBuilder, Float64Builder, Int32Builder, Int64Builder, ListBuilder, RecordBatch, StringBuilder,
    TimestampMicrosecondBuilder,
};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// First moment, microseconds: 2026-01-01.
const START_US: i64 = 1_767_225_600_000_000;
const DAY_US: i64 = 86_400_000_000;
/// Days the rows are spread over, in order.
const DAYS: u64 = 28;
/// Rows encoded at once.
const BATCH: u64 = 16_384;
const TEMPLATES: [&str; 6] = ["faq@1", "faq@2", "returns@1", "recipes@4", "travel@1", "smalltalk@2"];
const CLASSES: [&str; 4] = ["high-8gb", "mid-6gb", "low-4gb", "tablet"];

/// Numbers that look random and come again (SplitMix64).
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn id(row: u64) -> String {
    format!("{:016x}-{row:012}", mix(row))
}

fn at(row: u64, rows: u64) -> i64 {
    let span = DAYS * DAY_US.unsigned_abs();
    START_US + i64::try_from(u128::from(span) * u128::from(row) / u128::from(rows.max(1))).unwrap_or(0)
}

/// Rows `from..to` of all `rows`.
fn answers(from: u64, to: u64, rows: u64) -> Result<RecordBatch> {
    let mut text: [StringBuilder; 7] = Default::default();
    let (mut when, mut ttft, mut speed) =
        (TimestampMicrosecondBuilder::new(), Float64Builder::new(), Float64Builder::new());
    let (mut tokens, mut phase, mut cold) = (Int64Builder::new(), Int32Builder::new(), BooleanBuilder::new());
    let (mut chunks, mut scores) = (ListBuilder::new(StringBuilder::new()), ListBuilder::new(Float64Builder::new()));
    for row in from..to {
        let r = mix(row ^ 0xabcd);
        let pick = |n: usize, shift: u32| (r >> shift) as usize % n;
        let values = [
            id(row),
            TEMPLATES[pick(6, 3)].to_owned(),
            format!("{:064x}", pick(5, 7)),
            CLASSES[pick(4, 11)].to_owned(),
            format!("{:064x}", mix(r % 50_000)),
            ["de-DE", "en-GB", "fr-FR", "zh-CN"][pick(4, 15)].to_owned(),
            ["2.1.0", "2.2.0", "2.3.1"][pick(3, 19)].to_owned(),
        ];
        for (builder, value) in text.iter_mut().zip(&values) {
            builder.append_value(value);
        }
        when.append_value(at(row, rows));
        ttft.append_value(80.0 + (r % 4000) as f64 / 10.0);
        speed.append_value(6.0 + (r % 900) as f64 / 100.0);
        tokens.append_value((r % 700) as i64);
        phase.append_option(r.is_multiple_of(3).then_some(1));
        cold.append_value(r.is_multiple_of(20));
        for rank in 0..3 {
            chunks.values().append_value(format!("kb-{}", (r >> (rank * 8)) % 5000));
            scores.values().append_value(0.9 - rank as f64 / 10.0);
        }
        chunks.append(true);
        scores.append(true);
    }
    let names = ["interaction_id", "template_id", "bundle", "device_class", "install_id", "locale", "app_version"];
    let mut columns: Vec<(&str, ArrayRef)> = Vec::new();
    for (name, mut builder) in names.into_iter().zip(text) {
        columns.push((name, Arc::new(builder.finish())));
    }
    columns.push(("received_at", Arc::new(when.finish().with_timezone("UTC"))));
    columns.push(("ttft_ms", Arc::new(ttft.finish())));
    columns.push(("decode_tokens_per_s", Arc::new(speed.finish())));
    columns.push(("output_tokens", Arc::new(tokens.finish())));
    columns.push(("phase", Arc::new(phase.finish())));
    columns.push(("cold_start", Arc::new(cold.finish())));
    columns.push(("chunk_ids", Arc::new(chunks.finish())));
    columns.push(("chunk_scores", Arc::new(scores.finish())));
    Ok(RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, a)| (n, a, true)))?)
}

/// `rows` answers in `files` files.
fn parquet(folder: &Path, rows: u64, files: u64) -> Result<()> {
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
    for file in 0..files {
        let (begin, end) = (rows * file / files, rows * (file + 1) / files);
        let schema = answers(0, 1, rows)?.schema();
        let out = File::create(folder.join(format!("answers-{file:03}.parquet")))?;
        let mut writer = ArrowWriter::try_new(out, schema, Some(properties.clone()))?;
        for from in (begin..end).step_by(usize::try_from(BATCH)?) {
            writer.write(&answers(from, end.min(from + BATCH), rows)?)?;
        }
        writer.close()?;
    }
    Ok(())
}

/// `rows` events: judgements about every answer in turn, and a device event after ten of them.
fn lines(folder: &Path, rows: u64, answers: u64, files: u64) -> Result<()> {
    for file in 0..files {
        let mut out = BufWriter::new(File::create(folder.join(format!("events-{file:03}.jsonl")))?);
        for row in rows * file / files..rows * (file + 1) / files {
            let r = mix(row ^ 0x1234);
            let when = chrono::DateTime::from_timestamp_micros(at(row, rows)).context("a time out of range")?;
            let when = when.to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
            let install = format!("{:064x}", mix(r % 50_000));
            if row % 11 == 10 {
                let event = ["confirmed", "crashed", "out_of_memory", "installed"][(r >> 5) as usize % 4];
                writeln!(
                    out,
                    r#"{{"kind":"device","at":"{when}","event":"{event}","install_id":"{install}","device":{{"class":"mid-6gb"}}}}"#
                )?;
            } else {
                let label = ["accepted", "accepted", "rejected", "edited"][(r >> 5) as usize % 4];
                let answer = id(r % answers.max(1));
                writeln!(
                    out,
                    r#"{{"kind":"feedback","interaction_id":"{answer}","at":"{when}","label":"{label}","install_id":"{install}"}}"#
                )?;
            }
        }
        out.flush()?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (mut folder, mut rows, mut files) = (PathBuf::new(), 10_000u64, 4u64);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--folder" => folder = value.into(),
            "--rows" => rows = value.parse()?,
            "--files" => files = value.parse()?,
            other => anyhow::bail!("unknown option {other}"),
        }
    }
    let (answers, events) = (rows - rows / 2, rows / 2);
    std::fs::create_dir_all(folder.join("parquet"))?;
    std::fs::create_dir_all(folder.join("lines"))?;
    parquet(&folder.join("parquet"), answers, files)?;
    lines(&folder.join("lines"), events, answers, files)?;
    println!("{}", serde_json::json!({ "answers": answers, "events": events, "files": files * 2 }));
    Ok(())
}
