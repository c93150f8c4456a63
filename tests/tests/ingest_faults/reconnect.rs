//! A thousand phones that come back at once after a crash: nothing is lost or doubled, and memory and the accept loop hold.
//! `cargo xtask bench reconnect` does it with ten thousand.

use crate::ask::{Operator, wait_for};
use flywheel_tests::reconnect::Fleet;
use flywheel_tests::{Server, raise_file_limit, unit_arguments};

const DEVICES: u64 = 1000;

#[test]
fn a_thousand_phones_come_back_at_once() {
    raise_file_limit(DEVICES + 64).unwrap();
    let mut server = Server::with_config(&unit_arguments().unwrap(), "").unwrap();
    let operator = Operator::of(&server);
    let address = server.url("").trim_start_matches("http://").to_owned();
    let fleet = Fleet { address, ingest_key: server.ingest_key().unwrap(), devices: DEVICES, batches: 3, events: 4 };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(fleet.before()).unwrap();
    server.kill_and_restart().unwrap();
    let seen = runtime.block_on(fleet.reconnect(true)).unwrap();
    println!("{seen}, {} kB at most", server.peak_rss_kb());
    assert_eq!(seen["acknowledged"], DEVICES * 3, "{seen}");
    assert_eq!(seen["duplicate_batches"], DEVICES, "the first batch of each was known");
    assert_eq!(seen["broken_connections"], 0, "{seen}");
    let ids = operator.ids(&server, "interactions", "interaction_id");
    assert_eq!(ids.len() as u64, fleet.rows());
    let sums = operator.rows(
        &server,
        "SELECT sum(CASE WHEN disposition = 'stored' THEN items END), sum(CASE WHEN disposition = 'duplicate' THEN items \
         END) FROM dispositions",
    );
    assert_eq!(sums, serde_json::json!([[fleet.rows(), DEVICES * 4]]));
    assert!(!server.log().unwrap().contains("not accepted"), "{}", server.log().unwrap());
    assert!(server.peak_rss_kb() < 300_000, "{} kB", server.peak_rss_kb());
}

#[test]
fn more_phones_than_file_descriptors_wait_their_turn() {
    // of 160 files a server needs some for itself; the other phones are answered when those before them are
    let launcher = ["sh", "-c", r#"ulimit -n 160; exec "$0" "$@""#].map(str::to_owned).into();
    let server = Server::with_launcher(&unit_arguments().unwrap(), "", launcher).unwrap();
    let operator = Operator::of(&server);
    let address = server.url("").trim_start_matches("http://").to_owned();
    let fleet = Fleet { address, ingest_key: server.ingest_key().unwrap(), devices: 400, batches: 1, events: 2 };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let seen = runtime.block_on(fleet.reconnect(false)).unwrap();
    println!("{seen}");
    assert_eq!(operator.ids(&server, "interactions", "interaction_id").len() as u64, fleet.rows());
    let log = server.log().unwrap();
    assert!(log.contains("few files may be open"), "a low limit is said at start: {log}");
    assert!(!log.contains("Too many open files"), "{log}");
    wait_for("a ready server", || (operator.ready(&server).0 == 200).then_some(()));
}
