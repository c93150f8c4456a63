//! `kill -9` under load, ten times at unpredictable points, with tiny log segments and constant commits, compactions and
//! retries: no acknowledged row is lost and none is stored twice.

use crate::support::{Device, answer, app, at, number};
use flywheel_lake::{Lake, LakeConfig, Table};
use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const DEVICES: u32 = 16;
/// Kills of one run; `FLYWHEEL_KILLS` asks for more.
fn kills() -> u64 {
    std::env::var("FLYWHEEL_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(10)
}
const FOLDER: &str = "FLYWHEEL_KILL_TEST_FOLDER";
const EVENTS: u64 = 3;

fn kill_config(dir: &Path) -> LakeConfig {
    let mut c = crate::support::config(dir);
    c.log.segment_bytes = 128 << 10;
    c.commit_interval = Duration::from_millis(100);
    c.commit_bytes = 256 << 10;
    c
}

fn ids(device: u32, seq: u64) -> Vec<String> {
    (0..EVENTS).map(|k| format!("{device}-{seq}-{k}")).collect()
}

async fn send(lake: &Lake, device: u32, seq: u64) {
    let events = ids(device, seq).iter().map(|id| answer(id, at(0))).collect();
    Device::new(device).send(lake, seq, at(seq as i64), events).await.unwrap();
}

/// The process that is killed: sends from where the parent says, and prints each acknowledged batch.
#[test]
fn child() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let next: BTreeMap<u32, u64> = serde_json::from_slice(&std::fs::read(folder.join("next.json")).unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let lake = Arc::new(Lake::open(kill_config(folder)).await.unwrap());
        for device in 0..DEVICES {
            let (lake, start) = (Arc::clone(&lake), next[&device]);
            tokio::spawn(async move {
                for seq in start.. {
                    send(&lake, device, seq).await;
                    // One write per line, so that lines of two tasks do not mix.
                    let line = format!("ack {device} {seq}\n");
                    let mut out = std::io::stdout().lock();
                    out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
                }
            });
        }
        loop {
            lake.compact(Table::Interactions).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
}

/// Runs the child until it printed `n` acknowledgements, kills it, and returns all it printed.
fn run_and_kill(folder: &Path, n: usize) -> Vec<(u32, u64)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::child", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut acks = Vec::new();
    let mut killed = false;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let Ok(line) = line else { break };
        let Some((device, seq)) = line.split_once("ack ").and_then(|(_, a)| a.split_once(' ')) else {
            continue;
        };
        // The last line may be cut by the kill: then it was not acknowledged to anybody.
        if let (Ok(d), Ok(s)) = (device.parse(), seq.parse()) {
            acks.push((d, s));
        }
        if acks.len() >= n && !killed {
            child.kill().unwrap();
            killed = true;
        }
    }
    child.wait().unwrap();
    assert!(killed, "the child ended by itself after {} acknowledgements", acks.len());
    acks
}

#[test]
fn ten_kills_lose_nothing_and_double_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked: BTreeMap<u32, u64> = (0..DEVICES).map(|d| (d, 0)).collect();
    // A fixed sequence of kill points; what runs at that moment still differs from run to run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..kills() {
        let next: BTreeMap<u32, u64> = acked.iter().map(|(d, s)| (*d, s + 1)).collect();
        std::fs::write(dir.path().join("next.json"), serde_json::to_vec(&next).unwrap()).unwrap();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round | 1);
        let n = 40 + (state >> 33) as usize % 400;
        for (device, seq) in run_and_kill(dir.path(), n) {
            assert_eq!(seq, acked[&device] + 1, "acknowledgements of one device are in order");
            acked.insert(device, seq);
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(check(dir.path(), &acked));
}

async fn check(folder: &Path, acked: &BTreeMap<u32, u64>) {
    let lake = Lake::open(kill_config(folder)).await.unwrap();
    // Every device retries its last acknowledged batch and the one that may have been in flight.
    for (device, seq) in acked {
        if *seq > 0 {
            send(&lake, *device, *seq).await;
        }
        send(&lake, *device, seq + 1).await;
    }
    for flushed in [false, true] {
        if flushed {
            lake.flush().await.unwrap();
        }
        let (_, rows) =
            lake.interaction_batch(&app(), at(-1), at(1_000_000), chrono::Duration::zero(), None).await.unwrap();
        let stored: HashSet<&str> = rows.interaction.iter().map(String::as_str).collect();
        let mut expected = 0;
        for (device, seq) in acked {
            for s in 1..=seq + 1 {
                for id in ids(*device, s) {
                    assert!(stored.contains(id.as_str()), "{id} was acknowledged and is lost (flushed: {flushed})");
                    expected += 1;
                }
            }
        }
        let total = number(&lake, &app(), "SELECT count(*) FROM interactions").await;
        assert_eq!(total, expected, "rows were doubled or invented (flushed: {flushed})");
        let counted = number(&lake, &app(), "SELECT sum(items) FROM dispositions WHERE disposition = 'stored'").await;
        assert_eq!(counted, expected, "dispositions do not sum up (flushed: {flushed})");
    }
    println!("{} batches acknowledged over {} kills", acked.values().sum::<u64>(), kills());
}
