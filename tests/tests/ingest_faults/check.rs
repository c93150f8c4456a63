//! What must hold after any fault: every row that a phone was told is stored is there once, nothing else is, and what became
//! of the items sums up to what was received.

use crate::ask::Operator;
use crate::delta::DeltaLog;
use crate::load::{Kind, Network, Sent};
use flywheel_tests::Server;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// By SQL: ids and sums are those that the phones were told.
pub fn rows(server: &Server, operator: &Operator, sent: &[Sent], net: &Network) {
    let ids = |wanted: &[Kind]| -> BTreeSet<String> {
        let of = sent.iter().filter(|s| wanted.contains(&s.phone.kind));
        of.flat_map(|s| (1..=s.batches).flat_map(|n| s.phone.ids(n))).collect()
    };
    let same = |table: &str, want: &BTreeSet<String>| {
        let found = operator.ids(server, table, "interaction_id");
        let lost: Vec<_> = want.difference(&found).take(5).collect();
        let invented: Vec<_> = found.difference(want).take(5).collect();
        assert!(lost.is_empty() && invented.is_empty(), "{table}: lost {lost:?}, invented {invented:?}");
    };
    let (answers, feedback) = (ids(&[Kind::Otlp, Kind::Sdk]), ids(&[Kind::Feedback]));
    same("interactions", &answers);
    same("feedback", &feedback);
    let device: u64 = sent.iter().map(|s| s.phone.device_events() * s.batches).sum();
    let bad: u64 = sent.iter().map(|s| (1..=s.batches).map(|n| s.phone.bad(n)).sum::<u64>()).sum();
    assert_eq!(operator.number(server, "SELECT count(*) FROM device_events"), device);
    assert_eq!(operator.number(server, "SELECT count(*) FROM rejects"), bad);
    let sums = operator.rows(server, "SELECT disposition, sum(items) FROM dispositions GROUP BY 1 ORDER BY 1");
    let sums: BTreeMap<&str, u64> =
        sums.as_array().unwrap().iter().map(|r| (r[0].as_str().unwrap(), r[1].as_u64().unwrap())).collect();
    let of = |word: &str| sums.get(word).copied().unwrap_or(0);
    let seen = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let stored = (answers.len() + feedback.len()) as u64 + device;
    let told = (of("stored"), of("quarantined"), of("refused_intake"));
    assert_eq!(told, (stored, bad, seen(&net.ledger.refused)), "{sums:?}");
    // a repeated request may have been counted without anybody hearing of it
    let (known, unheard) = (seen(&net.ledger.duplicates), seen(&net.ledger.unanswered));
    assert!((known..=known + unheard).contains(&of("duplicate")), "{sums:?}: {known} known, {unheard} unheard");
}

/// By the files of a table, once everything is committed: they hold as many rows as SQL counts.
pub fn files(server: &Server, operator: &Operator, table: &str) -> DeltaLog {
    let folder = server.data_dir().join("lake/tables").join(table);
    let log = DeltaLog::read(&folder);
    log.check(&folder);
    assert_eq!(log.rows(), operator.number(server, &format!("SELECT count(*) FROM {table}")), "rows of {table}");
    log
}
