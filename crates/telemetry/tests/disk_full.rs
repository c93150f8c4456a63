//! A disk that is full and becomes free again: intake refuses while it is full, needs no restart afterwards, loses
//! nothing it acknowledged and keeps nothing it refused. Full is imitated by the file size limit of a child process.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use flywheel_telemetry::wal::LogConfig;
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestRequest, Ingestor, Recovery, Settings, Table};
use flywheel_types::{AppId, Error, ErrorKind};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::path::Path;
use std::process::Command;

const FOLDER: &str = "FLYWHEEL_DISK_FULL_FOLDER";

fn limit(bytes: Option<u64>) {
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

async fn send(ingestor: &Ingestor, n: u32) -> Result<u64, Error> {
    let body = format!(r#"{{"interaction_id":"i-{n}","at":"2026-03-01T10:00:00Z","label":"rejected"}}"#);
    let request = IngestRequest {
        app: AppId::new("app").unwrap(),
        ingest_key: "k".into(),
        endpoint: Endpoint::Feedback,
        headers: IngestHeaders { idempotency_key: Some(n.to_string()), ..IngestHeaders::default() },
        body: body.into(),
        now: "2026-03-01T10:00:00Z".parse().unwrap(),
    };
    ingestor.ingest(request).await.map(|o| o.ack.stored)
}

#[test]
fn child() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let open = || Recovery::open(LogConfig::new(Path::new(&folder))).unwrap();
    let acked = runtime.block_on(async {
        let ingestor = open().start(Settings::default(), 0).unwrap();
        limit(Some(40_000));
        let mut n = 0;
        let refused = loop {
            match send(&ingestor, n).await {
                Ok(stored) => assert_eq!(stored, 1),
                Err(e) => break e,
            }
            n += 1;
            assert!(n < 1000, "the limit never bit");
        };
        assert_eq!((refused.kind, refused.code), (ErrorKind::Unavailable, "log_failed"));
        assert!(!ingestor.status().healthy);
        assert!(send(&ingestor, n + 1).await.is_err());
        limit(None);
        // The refused batch is sent again, as a client would, and is not mistaken for a duplicate.
        assert_eq!(send(&ingestor, n).await.unwrap(), 1);
        assert!(ingestor.status().healthy);
        n + 1
    });
    let mut recovery = open();
    let (mut feedback, mut refused) = (0, 0);
    while let Some(group) = recovery.next_group().unwrap() {
        feedback += group.get(Table::Feedback).map_or(0, |s| s.load().unwrap().num_rows());
        if let Some(stored) = group.get(Table::Dispositions) {
            let text = format!("{:?}", stored.load().unwrap());
            refused += text.matches("refused_intake").count();
        }
    }
    assert_eq!(feedback, acked as usize);
    assert_eq!(refused, 1, "refusals are counted once the disk is back");
    assert!(recovery.damage().is_empty());
    println!("held after {acked} batches");
}

#[test]
fn a_full_disk_refuses_and_heals() {
    let dir = tempfile::tempdir().unwrap();
    let exe = std::env::current_exe().unwrap();
    // An ignored signal stays ignored over exec; without this the kernel kills the process at the limit.
    let script = format!("trap '' XFSZ; exec '{}' --exact child --nocapture --test-threads=1", exe.display());
    let out = Command::new("sh").args(["-c", &script]).env(FOLDER, dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains("held after"), "{text}{}", String::from_utf8_lossy(&out.stderr));
}
