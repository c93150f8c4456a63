//! `kill -9` under load, at points chosen by what the server's files show: inside a commit, a join of small files, a
//! checkpoint, the rotation of the log and its freeing. No acknowledged row is lost, none is stored twice, and what became
//! of the items sums up to what was received. `FLYWHEEL_KILLS` asks for more kills, `FLYWHEEL_KILL_SEED` for other ones.

use crate::ask::{Operator, wait_for};
use crate::check;
use crate::delta::{DeltaLog, leftovers};
use crate::load::{Control, Kind, Network, Phone, Sent};
use crate::watch::{Point, TABLES, Watch};
use flywheel_tests::{Server, unit_arguments};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Commits without a pause and log files of a few batches: every kill falls into something.
const CONFIG: &str = "[ingest]\nflush_s = 0\nflush_bytes = 8388608\nsegment_bytes = 131072\nmin_free_bytes = 0\n";
/// Longest wait for a point that is wanted.
const PATIENCE: Duration = Duration::from_secs(60);

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A fixed sequence of choices; what runs at that moment still differs from run to run.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// What a kill met.
#[derive(Default)]
struct Toll {
    points: BTreeMap<Point, u64>,
    /// Kills that left a file which was being written or belongs to no version.
    inside: u64,
}

/// Waits for a point, some acknowledgements more, and kills.
fn kill_once(server: &mut Server, net: &Network, choices: &mut Choices, point: Point) {
    let acked = || net.ledger.batches.load(Ordering::Relaxed);
    let begin = acked();
    if point != Point::Anywhere {
        let watch = Watch::start(&server.data_dir().join("lake"));
        let times = 1 + if point.is_frequent() { choices.below(8) } else { 0 };
        assert!(watch.wait(point, times, PATIENCE), "{point:?} did not come {times} times within {PATIENCE:?}");
    }
    // half of them at once, the others a little later
    let more = if point == Point::Anywhere { 20 + choices.below(60) } else { choices.below(2) * choices.below(4) };
    let begin = if point == Point::Anywhere { begin } else { acked() };
    wait_for("acknowledgements", || (acked() >= begin + more).then_some(()));
    server.kill().unwrap();
}

fn all_leftovers(server: &Server) -> BTreeSet<PathBuf> {
    TABLES.iter().flat_map(|t| leftovers(&server.data_dir().join("lake/tables").join(t))).collect()
}

/// As many kills as are wanted, and up to three times more while none fell into a commit: on a slow machine a short commit is
/// easily over before the signal arrives.
fn kill_often(server: &mut Server, net: &Network, control: &Control, kills: u64) -> Toll {
    let mut choices = Choices(from_environment("FLYWHEEL_KILL_SEED").unwrap_or(0x9e37_79b9_7f4a_7c15));
    let mut toll = Toll::default();
    let mut order = Vec::new();
    let mut known = BTreeSet::new();
    for kill in 0..4 * kills {
        if kill >= kills && toll.inside > 0 {
            break;
        }
        if order.is_empty() {
            order = Point::ALL.to_vec();
            for i in (1..order.len()).rev() {
                order.swap(i, choices.below(i as u64 + 1) as usize);
            }
        }
        // the first makes the folders that are watched
        let point = if kill == 0 { Point::Anywhere } else { order.pop().unwrap() };
        kill_once(server, net, &mut choices, point);
        *toll.points.entry(point).or_default() += 1;
        let left = all_leftovers(server);
        toll.inside += u64::from(left.difference(&known).next().is_some());
        known = left;
        server.restart().unwrap();
        control.restarted();
    }
    toll
}

#[test]
fn kills_lose_nothing_and_double_nothing() {
    let kills = from_environment("FLYWHEEL_KILLS").unwrap_or(10);
    let mut server = Server::with_config(&unit_arguments().unwrap(), CONFIG).unwrap();
    let operator = Operator::of(&server);
    let (net, control) = Network::of(&server);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let kinds = [Kind::Otlp, Kind::Otlp, Kind::Otlp, Kind::Sdk, Kind::Feedback];
    let phones: Vec<_> =
        (0..).zip(kinds).map(|(n, kind)| runtime.spawn(Phone::new(n, kind).run(net.clone()))).collect();
    let toll = kill_often(&mut server, &net, &control, kills);
    control.stop();
    let sent: Vec<Sent> = runtime.block_on(async { futures::future::try_join_all(phones).await.unwrap() });
    // once with rows in the log, once with all of them in the tables
    check::rows(&server, &operator, &sent, &net);
    operator.wait_until_committed(&server);
    check::rows(&server, &operator, &sent, &net);
    let logs: BTreeMap<&str, DeltaLog> = TABLES.map(|t| (t, check::files(&server, &operator, t))).into();
    assert_eq!(operator.ready(&server).0, 200);
    println!(
        "{} kills, {} batches acknowledged. Killed at {:?}; {} left a file of a commit or a join behind. \
         {} items were sent again and known, requests with {} items were never answered. Tables: {}",
        toll.points.values().sum::<u64>(),
        net.ledger.batches.load(Ordering::Relaxed),
        toll.points,
        toll.inside,
        net.ledger.duplicates.load(Ordering::Relaxed),
        net.ledger.unanswered.load(Ordering::Relaxed),
        logs.iter()
            .map(|(t, l)| format!("{t} {} versions, {} joins, {} checkpoints", l.versions, l.joins, l.checkpoints))
            .collect::<Vec<_>>()
            .join("; ")
    );
    assert!(logs["interactions"].joins > 0, "nothing was joined");
    assert!(logs.values().any(|log| log.checkpoints > 0), "no table has a checkpoint");
    assert!(toll.inside > 0, "no kill fell into a commit");
}
