//! A disk that becomes full and free again under a running server: telemetry is refused with a 503 and `/readyz` says so, what
//! was acknowledged stays readable, and both intake and commits go on without a restart. Once on a small file system of its own
//! (where the system lets us mount one), and once with a small library in C that is preloaded (`full_disk.c`): it needs no file
//! system, lets writes take half of their bytes, and can meet commits alone.

use crate::ask::{Operator, wait_for};
use crate::check;
use crate::load::{Control, Kind, Network, Phone, Sent};
use crate::watch::TABLES;
use flywheel_tests::{Server, unit_arguments};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

const CONFIG: &str = "[ingest]\nflush_s = 1\nsegment_bytes = 262144\nmin_free_bytes = 0\n";
const NOT_COMMITTED: &str = "acknowledged rows could not be committed";

/// The library; `None` without a C compiler.
fn library(folder: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ingest_faults/full_disk.c");
    let made = folder.join("full_disk.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let out =
        Command::new(compiler).args(["-shared", "-fPIC", "-O1", "-o"]).arg(&made).arg(source).arg("-ldl").output();
    let out = out.ok()?;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(made)
}

fn now(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Until `counter` is so much higher than it is.
fn rises(what: &str, counter: &AtomicU64, by: u64) {
    let from = now(counter);
    wait_for(what, || (now(counter) >= from + by).then_some(()));
}

/// Everything is full: nothing is acknowledged, and that is said.
fn all_full(server: &Server, operator: &Operator, net: &Network, fill: impl FnOnce(), free: impl FnOnce()) {
    rises("acknowledgements", &net.ledger.batches, 30);
    fill();
    rises("refusals", &net.ledger.refused, 500);
    let acknowledged = now(&net.ledger.batches);
    let (status, ready) = operator.ready(server);
    assert_eq!((status, ready["intake"].as_bool(), ready["code"].as_str()), (503, Some(false), Some("not_ready")));
    wait_for("a commit that failed", || server.log().unwrap().contains(NOT_COMMITTED).then_some(()));
    rises("refusals", &net.ledger.refused, 500);
    assert_eq!(now(&net.ledger.batches), acknowledged, "acknowledged with a full disk");
    let stored = operator.number(server, "SELECT count(DISTINCT interaction_id) FROM interactions");
    assert!(stored > 0, "what was acknowledged is readable");
    free();
    wait_for("a ready server", || (operator.ready(server).0 == 200).then_some(()));
    rises("acknowledgements", &net.ledger.batches, 30);
}

/// The tables are full, the log is not: telemetry is taken, and waits.
fn tables_full(server: &Server, operator: &Operator, net: &Network, flag: &Path) {
    let failures = || server.log().unwrap().matches(NOT_COMMITTED).count();
    let before = failures();
    fs::write(flag, "/lake/tables/").unwrap();
    wait_for("a commit that failed", || (failures() > before).then_some(()));
    rises("acknowledgements", &net.ledger.batches, 30);
    wait_for("a commit that failed again", || (failures() > before + 1).then_some(()));
    assert_eq!(operator.ready(server).0, 200, "telemetry is taken");
    assert!(operator.gauge(server, "flywheel_ingest_backlog_bytes") > 0.0);
    fs::remove_file(flag).unwrap();
}

/// Phones that send until they are told to stop.
struct Load {
    net: Network,
    control: Control,
    runtime: tokio::runtime::Runtime,
    phones: Vec<tokio::task::JoinHandle<Sent>>,
}

impl Load {
    fn start(server: &Server) -> Self {
        let (net, control) = Network::of(server);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let kinds = [Kind::Otlp, Kind::Sdk, Kind::Feedback];
        let phones = (0..).zip(kinds).map(|(n, kind)| runtime.spawn(Phone::new(n, kind).run(net.clone()))).collect();
        Self { net, control, runtime, phones }
    }

    /// Everything that was acknowledged is there, by SQL and in the tables.
    fn end(self, server: &Server, operator: &Operator) {
        self.control.stop();
        let sent = self.runtime.block_on(async { futures::future::try_join_all(self.phones).await.unwrap() });
        assert_eq!(now(&self.net.ledger.unanswered), 0, "every request was answered");
        operator.wait_until_committed(server);
        check::rows(server, operator, &sent, &self.net);
        println!(
            "{} batches acknowledged, {} items refused with a full disk",
            now(&self.net.ledger.batches),
            now(&self.net.ledger.refused)
        );
    }
}

#[test]
fn a_full_disk_refuses_and_heals_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = library(folder.path()) else {
        println!("skipped: the full disk needs a C compiler");
        return;
    };
    let flag = folder.path().join("full");
    let launcher = vec![
        "env".to_owned(),
        format!("LD_PRELOAD={}", library.display()),
        format!("FULL_DISK_FLAG={}", flag.display()),
    ];
    let server = Server::with_launcher(&unit_arguments().unwrap(), CONFIG, launcher).unwrap();
    let operator = Operator::of(&server);
    let load = Load::start(&server);
    for _ in 0..2 {
        let fill = || fs::write(&flag, "/data/").unwrap();
        all_full(&server, &operator, &load.net, fill, || fs::remove_file(&flag).unwrap());
        tables_full(&server, &operator, &load.net, &flag);
    }
    load.end(&server, &operator);
    for table in TABLES {
        check::files(&server, &operator, table);
    }
}

/// Mounts a file system of 48 MiB for log and tables in a namespace of its own, then becomes the server.
const SMALL_FILE_SYSTEM: &str = r#"for config; do :; done
    lake="$(dirname "$config")/data/lake"
    mkdir -p "$lake" && mount -t tmpfs -o size=48m none "$lake" && exec "$0" "$@""#;

#[test]
fn a_small_file_system_fills_up_and_is_emptied() {
    let try_mount = ["-rm", "sh", "-c", "mount -t tmpfs none /mnt"];
    if !Command::new("unshare").args(try_mount).output().is_ok_and(|out| out.status.success()) {
        println!("skipped: no file system can be mounted here");
        return;
    }
    let launcher = ["unshare", "-rm", "sh", "-c", SMALL_FILE_SYSTEM].map(str::to_owned).into();
    let server = Server::with_launcher(&unit_arguments().unwrap(), CONFIG, launcher).unwrap();
    let operator = Operator::of(&server);
    let load = Load::start(&server);
    // the file system as the server sees it
    let inside = PathBuf::from(format!("/proc/{}/root", server.pid()));
    let filler = inside.join(server.data_dir().strip_prefix("/").unwrap()).join("lake/filler");
    let fill = || {
        let mut file = fs::File::create(&filler).unwrap();
        let full = std::io::copy(&mut std::io::repeat(0), &mut file).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    };
    all_full(&server, &operator, &load.net, fill, || fs::remove_file(&filler).unwrap());
    load.end(&server, &operator);
}
