//! How many small signed batches a second are acknowledged durably. A measurement, run by hand:
//! `cargo test -p flywheel-lake --test suite throughput -- --ignored --nocapture`.

use crate::support::{Device, answer, app, at, config, feedback, number};
use flywheel_lake::Lake;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

#[test]
#[ignore = "a measurement, not a check"]
fn signed_batches_per_second() {
    let dir = tempfile::tempdir_in(std::env::var("FLYWHEEL_BENCH_DIR").unwrap_or_else(|_| "/var/tmp".into())).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut c = config(dir.path());
        c.commit_interval = std::time::Duration::from_secs(2);
        let lake = Arc::new(Lake::open(c).await.unwrap());
        let (clients, per_client) = (64u32, 150u64);
        // Signing is the phones' work: prepare the requests before the clock starts.
        let mut work = Vec::new();
        for d in 0..clients {
            let device = Device::new(d);
            let requests: Vec<_> = (1..=per_client)
                .map(|s| {
                    let id = format!("{d}-{s}");
                    let events = vec![answer(&id, at(0)), feedback(&id, flywheel_types::LabelKind::Accepted, at(0))];
                    device.request(&app(), s, at(s as i64), events)
                })
                .collect();
            work.push(requests);
        }
        let slowest_us = Arc::new(AtomicU64::new(0));
        let begin = Instant::now();
        let tasks = work.into_iter().map(|requests| {
            let (lake, slowest_us) = (Arc::clone(&lake), Arc::clone(&slowest_us));
            tokio::spawn(async move {
                for r in requests {
                    let t = Instant::now();
                    assert_eq!(lake.ingestor().ingest(r).await.unwrap().ack.stored, 2);
                    slowest_us.fetch_max(t.elapsed().as_micros() as u64, Ordering::Relaxed);
                }
            })
        });
        for t in tasks.collect::<Vec<_>>() {
            t.await.unwrap();
        }
        let wall = begin.elapsed();
        let batches = u64::from(clients) * per_client;
        println!(
            "{batches} batches in {:.2} s: {:.0} batches/s, slowest ack {} ms",
            wall.as_secs_f64(),
            batches as f64 / wall.as_secs_f64(),
            slowest_us.load(Ordering::Relaxed) / 1000
        );
        let begin = Instant::now();
        lake.flush().await.unwrap();
        println!("flush of the rest: {} ms", begin.elapsed().as_millis());
        assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions").await, batches as i64);
    });
}
