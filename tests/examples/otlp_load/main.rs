//! Load generator for the intake: OTLP log records of on-device answers over kept connections, as fast as the server
//! acknowledges them. Each request carries ids of its own; everything else is encoded once, so that the generator takes
//! little of the machine it shares with the server.
#![allow(clippy::print_stdout, reason = "a program for the command line")]

mod body;
mod http;

use anyhow::{Context, Result};
use body::{Body, Format};
use http::Connection;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What to send, and for how long.
struct Args {
    address: String,
    key: String,
    format: Format,
    seconds: u64,
    connections: usize,
    records: usize,
    /// First number of the ids; another run on the same server needs another.
    first: u64,
    /// Requests a second, over all connections; as many as possible when 0.
    rate: u64,
    /// The server is killed meanwhile: a broken connection ends its part of the run and is no error.
    may_end: bool,
    json: Option<PathBuf>,
}

impl Args {
    fn parse() -> Result<Self> {
        let mut out = Self {
            address: String::new(),
            key: String::new(),
            format: Format::Protobuf,
            seconds: 10,
            connections: 8,
            records: 200,
            first: 0,
            rate: 0,
            may_end: false,
            json: None,
        };
        let mut args = std::env::args().skip(1);
        while let Some(name) = args.next() {
            let value = args.next().with_context(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--address" => out.address = value,
                "--key" => out.key = value,
                "--format" => out.format = value.parse()?,
                "--seconds" => out.seconds = value.parse()?,
                "--connections" => out.connections = value.parse()?,
                "--records" => out.records = value.parse()?,
                "--first" => out.first = value.parse()?,
                "--rate" => out.rate = value.parse()?,
                "--may-end" => out.may_end = value.parse()?,
                "--json" => out.json = Some(value.into()),
                other => anyhow::bail!("unknown option {other}"),
            }
        }
        Ok(out)
    }
}

/// What all connections saw.
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    refused: AtomicU64,
    bytes: AtomicU64,
    next: AtomicU64,
    /// Time to the acknowledgement of each request, microseconds.
    acks: Mutex<Vec<u32>>,
}

/// One connection: sends until the time is over. A refused batch is sent again, as a phone would.
fn send(args: &Args, seen: &Seen, began: Instant) -> Result<()> {
    let until = began + Duration::from_secs(args.seconds);
    let mut connection = Connection::open(&args.address, args.format, &args.key)?;
    let mut body = Body::new(args.format, args.records)?;
    let mut acks = Vec::new();
    'all: while Instant::now() < until {
        let number = seen.next.fetch_add(1, Ordering::Relaxed);
        if args.rate > 0 {
            let due = began + Duration::from_secs_f64(number as f64 / args.rate as f64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        body.number(args.first + number);
        loop {
            let began = Instant::now();
            let status = match connection.post(body.bytes()) {
                Err(_) if args.may_end => break 'all,
                answered => answered?,
            };
            match status {
                200 => {
                    acks.push(u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX));
                    seen.requests.fetch_add(1, Ordering::Relaxed);
                    seen.bytes.fetch_add(body.bytes().len() as u64, Ordering::Relaxed);
                    break;
                }
                503 => {
                    seen.refused.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(50));
                }
                other => anyhow::bail!("status {other}: {}", connection.answer()),
            }
        }
    }
    seen.acks.lock().unwrap_or_else(PoisonError::into_inner).extend(acks);
    Ok(())
}

fn quantile(sorted: &[u32], q: f64) -> f64 {
    let at = ((sorted.len() as f64 * q) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(0.0, |us| f64::from(*us) / 1000.0)
}

/// CPU seconds of this process, user and system.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: f64 = after.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum();
    ticks / 100.0
}

fn main() -> Result<()> {
    let args = Arc::new(Args::parse()?);
    let seen = Arc::new(Seen::default());
    let began = Instant::now();
    let threads: Vec<_> = (0..args.connections)
        .map(|_| {
            let (args, seen) = (Arc::clone(&args), Arc::clone(&seen));
            std::thread::spawn(move || send(&args, &seen, began))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| anyhow::anyhow!("a connection's thread panicked"))??;
    }
    let seconds = began.elapsed().as_secs_f64();
    let mut acks = std::mem::take(&mut *seen.acks.lock().unwrap_or_else(PoisonError::into_inner));
    acks.sort_unstable();
    let (requests, bytes) = (seen.requests.load(Ordering::Relaxed), seen.bytes.load(Ordering::Relaxed));
    let events = requests * args.records as u64;
    let report = serde_json::json!({
        "events": events, "requests": requests, "refused": seen.refused.load(Ordering::Relaxed), "seconds": seconds,
        "events_per_s": events as f64 / seconds, "bytes_in_per_s": bytes as f64 / seconds,
        "ack_p50_ms": quantile(&acks, 0.5), "ack_p99_ms": quantile(&acks, 0.99), "ack_max_ms": quantile(&acks, 1.0),
        "generator_cpu_s": cpu_seconds(), "connections": args.connections, "records": args.records,
        "format": args.format.to_string(),
    });
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    println!("{report}");
    Ok(())
}
