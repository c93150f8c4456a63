//! Rows are visible once, whatever moves underneath: between memory and Delta, over restarts, retries, compaction,
//! and commits that report failure although they happened.

use crate::support::{Device, answer, app, at, config, device_event, feedback, number, open, rows};
use flywheel_lake::{Lake, Table};
use flywheel_telemetry::Endpoint;
use flywheel_types::{AppId, ErrorKind, LabelKind};

const COUNT: &str = "SELECT count(*) FROM interactions";
const DISTINCT: &str = "SELECT count(DISTINCT interaction_id) FROM interactions";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_rows_are_visible_before_and_after_the_commit_and_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let device = Device::new(1);
    let lake = open(dir.path()).await;
    let ack = device.send(&lake, 1, at(0), vec![answer("a", at(0)), answer("b", at(0))]).await.unwrap().ack;
    assert_eq!((ack.stored, ack.duplicate, ack.quarantined), (2, 0, 0));
    assert_eq!(number(&lake, &app(), COUNT).await, 2);
    let v = lake.flush_and_watermark().await.unwrap();
    assert_eq!(v.interactions, 1);
    assert_eq!(number(&lake, &app(), COUNT).await, 2);
    device.send(&lake, 2, at(1), vec![answer("c", at(1))]).await.unwrap();
    assert_eq!(number(&lake, &app(), COUNT).await, 3);
    drop(lake);
    // The third row is only in the log.
    let lake = open(dir.path()).await;
    assert_eq!(number(&lake, &app(), COUNT).await, 3);
    let again = device.send(&lake, 2, at(2), vec![answer("c", at(1))]).await.unwrap();
    assert!(again.duplicate_batch);
    assert_eq!(again.ack.duplicate, 1);
    lake.flush().await.unwrap();
    drop(lake);
    let lake = open(dir.path()).await;
    assert_eq!((number(&lake, &app(), COUNT).await, number(&lake, &app(), DISTINCT).await), (3, 3));
    let sums =
        rows(&lake, "SELECT disposition, sum(items) AS n FROM dispositions GROUP BY disposition ORDER BY 1").await;
    assert_eq!(
        sums,
        serde_json::json!([{"disposition": "duplicate", "n": 1}, {"disposition": "stored", "n": 3}])
            .as_array()
            .unwrap()
            .clone()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_changes_files_but_no_rows_and_no_version_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let device = Device::new(1);
    let lake = open(dir.path()).await;
    for seq in 1..=4u64 {
        device.send(&lake, seq, at(seq as i64), vec![answer(&format!("i{seq}"), at(0))]).await.unwrap();
        lake.flush().await.unwrap();
    }
    let before = lake.version(Table::Interactions);
    assert_eq!(before, 4);
    let report = lake.compact(Table::Interactions).await.unwrap();
    assert_eq!((report.files_removed, report.files_added), (4, 1));
    assert_eq!(number(&lake, &app(), COUNT).await, 4);
    let ids = |from, to| {
        let lake = &lake;
        async move {
            let batches = lake.rows_between(&app(), Table::Interactions, from, to).await.unwrap();
            batches.iter().map(|b| b.num_rows()).sum::<usize>()
        }
    };
    assert_eq!(ids(0, 4).await, 4);
    assert_eq!(ids(1, 3).await, 2);
    assert_eq!(ids(4, lake.version(Table::Interactions)).await, 0, "compaction adds nothing");
    let report = lake.vacuum(Table::Interactions, chrono::Duration::zero()).await.unwrap();
    assert_eq!(report.files_deleted.len(), 4);
    assert_eq!(number(&lake, &app(), COUNT).await, 4);
    device.send(&lake, 5, at(9), vec![answer("i5", at(9))]).await.unwrap();
    lake.flush().await.unwrap();
    assert_eq!(number(&lake, &app(), DISTINCT).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_are_exact_while_batches_arrive_and_tables_commit() {
    let dir = tempfile::tempdir().unwrap();
    let lake = std::sync::Arc::new(open(dir.path()).await);
    let sender = {
        let lake = std::sync::Arc::clone(&lake);
        tokio::spawn(async move {
            let device = Device::new(1);
            for seq in 1..=60u64 {
                device.send(&lake, seq, at(0), vec![answer(&format!("i{seq}"), at(0))]).await.unwrap();
                if seq % 7 == 0 {
                    lake.flush().await.unwrap();
                }
            }
        })
    };
    let mut last = 0;
    while !sender.is_finished() {
        let got = rows(&lake, "SELECT count(*) AS n, count(DISTINCT interaction_id) AS d FROM interactions").await;
        let (n, d) = (got[0]["n"].as_i64().unwrap(), got[0]["d"].as_i64().unwrap());
        assert_eq!(n, d, "a row was counted twice");
        assert!(n >= last, "{n} rows after {last}: rows vanished");
        last = n;
    }
    sender.await.unwrap();
    assert_eq!(number(&lake, &app(), COUNT).await, 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_freed_only_behind_delta_and_duplicates_are_still_known() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(dir.path());
    c.log.segment_bytes = 32 << 10;
    let device = Device::new(1);
    let anonymous = |n: u64| {
        let mut r = crate::support::forged(device.install, 1, at(0), vec![feedback("i1", LabelKind::Rejected, at(0))]);
        r.headers.idempotency_key = Some(format!("k{n}"));
        r
    };
    let lake = Lake::open(c.clone()).await.unwrap();
    for seq in 1..=40u64 {
        device.send(&lake, seq, at(0), vec![answer(&format!("i{seq}"), at(0))]).await.unwrap();
        lake.ingestor().ingest(anonymous(seq)).await.unwrap();
    }
    let before = lake.ingestor().status().log_bytes;
    assert!(before > 64 << 10, "{before}");
    lake.flush().await.unwrap();
    let after = lake.ingestor().status().log_bytes;
    assert!(after < before / 2, "{after} of {before} left");
    drop(lake);
    let lake = Lake::open(c).await.unwrap();
    for seq in 1..=40u64 {
        assert!(device.send(&lake, seq, at(1), vec![answer("x", at(0))]).await.unwrap().duplicate_batch);
        assert!(lake.ingestor().ingest(anonymous(seq)).await.unwrap().duplicate_batch);
    }
    assert_eq!(number(&lake, &app(), COUNT).await, 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_copies_of_one_batch_store_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let device = Device::new(1);
    let sends = (0..5).map(|_| device.send(&lake, 1, at(0), vec![answer("a", at(0)), answer("b", at(0))]));
    let acks: Vec<_> = futures::future::join_all(sends).await.into_iter().map(|r| r.unwrap().ack).collect();
    assert_eq!(acks.iter().map(|a| a.stored).sum::<u64>(), 2);
    assert_eq!(acks.iter().map(|a| a.duplicate).sum::<u64>(), 8);
    assert_eq!(number(&lake, &app(), COUNT).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reused_idempotency_key_is_a_conflict_and_a_forged_seq_burns_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let device = Device::new(1);
    let mut first = crate::support::forged(device.install, 1, at(0), vec![answer("x", at(0))]);
    first.headers.idempotency_key = Some("k".into());
    let mut second = crate::support::forged(device.install, 1, at(0), vec![answer("y", at(0))]);
    second.headers.idempotency_key = Some("k".into());
    lake.ingestor().ingest(first).await.unwrap();
    let e = lake.ingestor().ingest(second).await.unwrap_err();
    assert_eq!((e.kind, e.code), (ErrorKind::Conflict, "idempotency_key_reused"));
    // The real device still has its number 1.
    assert_eq!(device.send(&lake, 1, at(0), vec![answer("z", at(0))]).await.unwrap().ack.stored, 1);
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions WHERE trust = 'keyed'").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_budget_intake_says_so_and_recovers_after_the_commit() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(dir.path());
    c.ingest.backlog_bytes = 200 << 10;
    let lake = Lake::open(c).await.unwrap();
    let device = Device::new(1);
    let mut seq = 0;
    let refused = loop {
        seq += 1;
        if let Err(e) = device.send(&lake, seq, at(0), vec![answer(&format!("i{seq}"), at(0))]).await {
            break e;
        }
        assert!(seq < 1000, "the budget never bit");
    };
    assert_eq!((refused.kind, refused.code), (ErrorKind::Unavailable, "overloaded"));
    lake.flush().await.unwrap();
    device.send(&lake, seq, at(0), vec![answer(&format!("i{seq}"), at(0))]).await.unwrap();
    assert_eq!(number(&lake, &app(), COUNT).await, seq as i64);
    let n = number(&lake, &app(), "SELECT sum(items) FROM dispositions WHERE reason = 'overloaded'").await;
    assert_eq!(n, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_endpoint_ends_in_counted_dispositions() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let device = Device::new(1);
    let events = vec![
        answer("a", at(0)),
        feedback("a", LabelKind::Rejected, at(0)),
        device_event(flywheel_types::wire::DeviceEventKind::Confirmed, at(0), None),
    ];
    device.send(&lake, 1, at(0), events).await.unwrap();
    let mut bad = device.request(&app(), 2, at(0), vec![]);
    bad.body = bytes::Bytes::from_static(b"{}");
    assert_eq!(lake.ingestor().ingest(bad).await.unwrap_err().kind, ErrorKind::Unauthenticated);
    let mut otlp = crate::support::forged(device.install, 1, at(0), vec![]);
    otlp.endpoint = Endpoint::OtlpLogs;
    otlp.body = bytes::Bytes::from_static(
        br#"{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"eventName":"other"},
        {"eventName":"gen_ai.client.inference.operation.details","attributes":[{"key":"gen_ai.response.id","value":{"stringValue":"r"}}]}]}]}]}"#,
    );
    let ack = lake.ingestor().ingest(otlp).await.unwrap().ack;
    assert_eq!((ack.stored, ack.quarantined), (1, 1));
    lake.flush().await.unwrap();
    let got = rows(
        &lake,
        "SELECT source, kind, disposition, coalesce(reason, '-') AS reason, sum(items) AS n FROM dispositions \
         GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3",
    )
    .await;
    let lines: Vec<String> = got
        .iter()
        .map(|r| {
            format!("{} {} {} {} {}", r["source"], r["kind"], r["disposition"], r["reason"], r["n"]).replace('"', "")
        })
        .collect();
    assert_eq!(
        lines,
        [
            "events device stored - 1",
            "events feedback stored - 1",
            "events interaction stored - 1",
            "events request refused_intake bad_signature 1",
            "otlp_logs interaction stored - 1",
            "otlp_logs unknown quarantined unsupported_record 1",
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn apps_are_apart_and_one_process_owns_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let device = Device::new(1);
    let other = AppId::new("other-app").unwrap();
    device.send(&lake, 1, at(0), vec![answer("a", at(0))]).await.unwrap();
    lake.ingestor()
        .ingest(device.request(&other, 1, at(0), vec![answer("b", at(0)), answer("c", at(0))]))
        .await
        .unwrap();
    for flushed in [false, true] {
        if flushed {
            lake.flush().await.unwrap();
        }
        assert_eq!(number(&lake, &app(), COUNT).await, 1);
        assert_eq!(number(&lake, &other, COUNT).await, 2);
    }
    let e = Lake::open(config(dir.path())).await.err().unwrap().to_string();
    assert!(e.contains("in use by another process"), "{e}");
}
