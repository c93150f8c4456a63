//! Fills the tables of a server that is stopped with made-up telemetry, through the table writer and not through the intake.
//!
//! `bulk_load --dir DATA/lake --rows 50000000 --days 1 --json FILE`
//!
//! Rows look like those that OTLP clients send: every column but the texts is filled, ids are as random as real ones, and
//! neighbouring rows are of different phones. Receipts are spread evenly over the days before now. About 8 % of the
//! interactions get an outcome. `cargo xtask bench query` runs it.

#![expect(clippy::print_stdout, reason = "a program that prints its result")]

mod rows;

use flywheel_lake::{Lake, LakeConfig, Table};
use flywheel_types::BusinessClock as _;
use flywheel_types::clock::SystemClock;
use futures::stream::{self, BoxStream};
use rows::{Made, Maker};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;
use tokio::sync::mpsc::{Receiver, channel};

/// Interactions of one commit.
const COMMIT_ROWS: u64 = 5_000_000;
/// Name in the transactions of the tables.
const WRITER: &str = "bulk_load";

struct Args {
    dir: PathBuf,
    rows: u64,
    days: u32,
    json: Option<PathBuf>,
}

impl Args {
    fn parse() -> Result<Self, String> {
        let mut out = Self { dir: PathBuf::new(), rows: 0, days: 1, json: None };
        let mut args = std::env::args().skip(1);
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let bad = |e| format!("{name} {value}: {e}");
            match name.as_str() {
                "--dir" => out.dir = value.into(),
                "--rows" => out.rows = value.parse().map_err(bad)?,
                "--days" => out.days = value.parse().map_err(bad)?,
                "--json" => out.json = Some(value.into()),
                _ => return Err(format!("unknown argument {name}: --dir, --rows, --days, --json")),
            }
        }
        if out.dir.as_os_str().is_empty() || out.rows == 0 || out.days == 0 {
            return Err("name --dir, and --rows and --days of 1 or more".to_owned());
        }
        Ok(out)
    }
}

type Batches = BoxStream<'static, arrow::array::RecordBatch>;

/// What comes out of `from`, as the lake takes it.
fn batches(from: Receiver<arrow::array::RecordBatch>) -> Batches {
    Box::pin(stream::unfold(from, |mut from| async move { from.recv().await.map(|batch| (batch, from)) }))
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let began = Instant::now();
    let lake = Lake::open(LakeConfig::local(&args.dir)?).await?;
    let mut maker = Maker::new(SystemClock.now(), args.rows, args.days);
    let (mut interactions, mut outcomes) = (0u64, 0u64);
    let mut seq = 0;
    while interactions < args.rows {
        seq += 1;
        let n = COMMIT_ROWS.min(args.rows - interactions);
        let (i_to, i_from) = channel(2);
        let (o_to, o_from) = channel(2);
        // made on a thread of its own, so that one core makes rows while the other encodes
        let making = std::thread::spawn(move || {
            let mut labelled = 0;
            let mut left = n;
            while left > 0 {
                let Made { interactions, outcomes, rows } = maker.next(left)?;
                left -= rows;
                for batch in interactions {
                    i_to.blocking_send(batch).map_err(|e| e.to_string())?;
                }
                for batch in outcomes {
                    labelled += batch.num_rows() as u64;
                    o_to.blocking_send(batch).map_err(|e| e.to_string())?;
                }
            }
            Ok::<_, String>((maker, labelled))
        });
        let both = tokio::try_join!(
            lake.append_bulk(Table::Interactions, WRITER, seq, batches(i_from)),
            lake.append_bulk(Table::Outcomes, WRITER, seq, batches(o_from)),
        )?;
        if both != (true, true) {
            return Err("the tables were loaded before: use an empty folder".into());
        }
        let (back, labelled) = making.join().map_err(|_| "the thread that makes rows panicked")??;
        maker = back;
        interactions += n;
        outcomes += labelled;
        println!("{interactions} interactions, {outcomes} outcomes after {:.0} s", began.elapsed().as_secs_f64());
    }
    let report = serde_json::json!({
        "interactions": interactions, "outcomes": outcomes, "days": args.days, "load_s": began.elapsed().as_secs_f64(),
    });
    if let Some(path) = args.json {
        std::fs::write(path, report.to_string())?;
    }
    Ok(())
}
