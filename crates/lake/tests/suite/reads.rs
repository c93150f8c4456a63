//! The named reads of the pipeline: windows, labels, identities, order.

use crate::support::{
    Device, answer, app, assignment, at, bundle, config, device_event, feedback, forged, interaction, number, open,
    with_content,
};
use chrono::Duration;
use flywheel_lake::{Lake, QueryScope, SavedView, SqlLimits, Table, Versions};
use flywheel_telemetry::{Endpoint, Settings};
use flywheel_types::assign::Arm;
use flywheel_types::wire::{DeviceEventKind, EventV1};
use flywheel_types::{LabelKind, RolloutId, TrustClass};
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_depend_on_the_interactions_own_times_not_on_the_windows() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let (a, b) = (Device::new(1), Device::new(2));
    // Feedback before its interaction, in time, too late, twice, and from another device.
    a.send(&lake, 1, at(0), vec![feedback("early", LabelKind::Rejected, at(0))]).await.unwrap();
    let all = ["early", "intime", "late", "twice", "foreign", "forged"];
    a.send(&lake, 2, at(10), all.iter().map(|id| answer(id, at(10))).collect()).await.unwrap();
    a.send(&lake, 3, at(20), vec![feedback("twice", LabelKind::Accepted, at(20))]).await.unwrap();
    a.send(
        &lake,
        4,
        at(70),
        vec![feedback("intime", LabelKind::Edited, at(70)), feedback("twice", LabelKind::Rejected, at(70))],
    )
    .await
    .unwrap();
    b.send(&lake, 1, at(20), vec![feedback("foreign", LabelKind::Rejected, at(20))]).await.unwrap();
    let lie = forged(a.install, 9, at(20), vec![feedback("forged", LabelKind::Rejected, at(20))]);
    lake.ingestor().ingest(lie).await.unwrap();
    a.send(&lake, 5, at(71), vec![feedback("late", LabelKind::Rejected, at(71))]).await.unwrap();
    let v = lake.flush_and_watermark().await.unwrap();
    let delay = Duration::minutes(60);
    let (names, rows) = lake.interaction_batch(&app(), at(60), at(70), delay, Some(&v)).await.unwrap();
    assert_eq!(rows.interaction, ["early", "foreign", "forged", "intime", "late", "twice"]);
    assert_eq!(rows.rejected, [true, false, false, true, false, false]);
    assert_eq!(rows.trust, vec![TrustClass::Keyed; 6]);
    assert_eq!(names.chunk.names(), ["kb-1@1", "kb-2@3"]);
    assert_eq!(rows.chunks(5).collect::<Vec<_>>(), [(0, false), (1, true)]);
    assert_eq!(rows.hour[0] as i64, at(10).timestamp() / 3600);
    // Window edges: exclusive below, inclusive above.
    for (from, to, n) in [(70, 80, 0), (69, 70, 6), (60, 69, 0)] {
        let got = lake.interaction_batch(&app(), at(from), at(to), delay, Some(&v)).await.unwrap().1;
        assert_eq!(got.len(), n, "({from}, {to}]");
    }
    // The same answer from memory, before any commit.
    let now = lake.interaction_batch(&app(), at(60), at(70), delay, None).await.unwrap();
    assert_eq!(now, (names, rows));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_as_of_a_version_do_not_move() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let a = Device::new(1);
    a.send(&lake, 1, at(0), vec![answer("one", at(0))]).await.unwrap();
    let v1 = lake.flush_and_watermark().await.unwrap();
    a.send(&lake, 2, at(0), vec![answer("two", at(0)), feedback("one", LabelKind::Rejected, at(0))]).await.unwrap();
    let v2 = lake.flush_and_watermark().await.unwrap();
    let read = |v| {
        let lake = &lake;
        async move { lake.interaction_batch(&app(), at(-60), at(60), Duration::zero(), Some(&v)).await.unwrap().1 }
    };
    assert_eq!((read(v1).await.interaction, read(v1).await.rejected), (vec!["one".to_owned()], vec![false]));
    assert_eq!((read(v2).await.interaction.len(), read(v2).await.rejected), (2, vec![true, false]));
    assert_eq!(read(v1).await.len(), 1);
    let json = serde_json::to_string(&v2).unwrap();
    assert_eq!(serde_json::from_str::<flywheel_lake::Versions>(&json).unwrap(), v2);
}

fn in_rollout(id: &str, arm: Arm, ttft: f64) -> EventV1 {
    let mut i = interaction(id, at(0));
    i.assignment = assignment("r-1", arm);
    i.ttft_ms = Some(ttft);
    EventV1::Interaction(i)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_histories_are_per_proven_identity() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let (a, b, outside) = (Device::new(1), Device::new(2), Device::new(3));
    a.send(&lake, 1, at(-100), vec![answer("before", at(-100))]).await.unwrap();
    let treated = assignment("r-1", Arm::Treatment);
    a.send(&lake, 2, at(1), vec![device_event(DeviceEventKind::Exposed, at(1), treated.clone())]).await.unwrap();
    a.send(
        &lake,
        3,
        at(2),
        vec![
            device_event(DeviceEventKind::Confirmed, at(2), treated.clone()),
            in_rollout("x2", Arm::Treatment, 20.0),
            in_rollout("x1", Arm::Treatment, 10.0),
        ],
    )
    .await
    .unwrap();
    a.send(
        &lake,
        4,
        at(3),
        vec![
            in_rollout("x1", Arm::Treatment, 10.0),
            feedback("x1", LabelKind::Rejected, at(3)),
            device_event(DeviceEventKind::Crashed, at(3), treated.clone()),
            in_rollout("x3", Arm::Control, 5.0),
        ],
    )
    .await
    .unwrap();
    b.send(&lake, 1, at(4), vec![device_event(DeviceEventKind::Exposed, at(4), assignment("r-1", Arm::Control))])
        .await
        .unwrap();
    outside.send(&lake, 1, at(4), vec![answer("other", at(4))]).await.unwrap();
    // Somebody claims to be device b and reports crashes.
    let crash = device_event(DeviceEventKind::Crashed, at(5), assignment("r-1", Arm::Treatment));
    lake.ingestor().ingest(forged(b.install, 77, at(5), vec![crash])).await.unwrap();
    let rollout = RolloutId::new("r-1").unwrap();
    let v = lake.flush_and_watermark().await.unwrap();
    let got = lake.device_histories(&app(), &rollout, Some(&v)).await.unwrap();
    assert_eq!(got.len(), 3);
    let of = |d: &Device, t| got.iter().find(|h| h.install == d.install.to_string() && h.trust == t).unwrap();
    let h = of(&a, TrustClass::Keyed);
    assert_eq!((h.arm, h.phase, h.exposed_at, h.first_seen), (Arm::Treatment, 1, at(1), at(-100)));
    assert!(h.crossed_over);
    assert_eq!((h.confirmed_at, h.failures.as_slice()), (Some(at(2)), &[at(3)][..]));
    let labels: Vec<_> = h.responses.iter().map(|r| (r.at, r.label, r.ttft_ms)).collect();
    assert_eq!(
        labels,
        [(at(2), Some(LabelKind::Rejected), Some(10.0)), (at(2), None, Some(20.0)), (at(3), None, Some(5.0)),]
    );
    assert_eq!((h.device_class.as_str(), h.locale.as_str()), ("high-8gb", "en-GB"));
    let real_b = of(&b, TrustClass::Keyed);
    assert!(real_b.failures.is_empty() && !real_b.crossed_over);
    assert_eq!(of(&b, TrustClass::Anonymous).failures.len(), 1);
    assert_eq!(lake.device_histories(&app(), &rollout, None).await.unwrap(), got);
    let none = lake.device_histories(&app(), &RolloutId::new("r-2").unwrap(), None).await.unwrap();
    assert!(none.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inventory_and_latency() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let (a, mut b) = (Device::new(1), Device::new(2));
    b.class = "low-4gb";
    a.send(
        &lake,
        1,
        at(0),
        vec![device_event(DeviceEventKind::Confirmed, at(0), None), in_rollout("a", Arm::Control, 30.0)],
    )
    .await
    .unwrap();
    a.send(&lake, 2, at(5), vec![in_rollout("b", Arm::Control, 10.0)]).await.unwrap();
    b.send(&lake, 1, at(3), vec![in_rollout("c", Arm::Control, 99.0)]).await.unwrap();
    lake.flush().await.unwrap();
    b.send(&lake, 2, at(7), vec![feedback("c", LabelKind::Accepted, at(7))]).await.unwrap();
    lake.ingestor().ingest(forged(a.install, 5, at(9), vec![in_rollout("z", Arm::Control, 1.0)])).await.unwrap();
    let all = lake.inventory(&app(), None).await.unwrap();
    let of =
        |d: &Device| all.iter().find(|r| r.install == d.install.to_string() && r.trust == TrustClass::Keyed).unwrap();
    assert_eq!(all.len(), 3);
    assert_eq!((of(&a).bundle.clone(), of(&a).last_seen), (Some(bundle(2).to_hex()), at(5)));
    assert_eq!((of(&b).bundle.clone(), of(&b).last_seen, of(&b).device_class.as_str()), (None, at(7), "low-4gb"));
    let samples = lake.latency_samples(&app(), &bundle(1), at(-1), None).await.unwrap();
    assert_eq!(
        samples.into_iter().collect::<Vec<_>>(),
        [("high-8gb".to_owned(), vec![10.0, 30.0]), ("low-4gb".to_owned(), vec![99.0])]
    );
    let later = lake.latency_samples(&app(), &bundle(1), at(3), None).await.unwrap();
    assert_eq!(later.into_iter().collect::<Vec<_>>(), [("high-8gb".to_owned(), vec![10.0])]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_answers_come_with_masked_content_and_refusals_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(dir.path());
    c.ingest = Settings {
        classifier: Some(Arc::new(|answer: &str| answer.starts_with("I cannot").then_some(LabelKind::Refused))),
        ..Settings::default()
    };
    let lake = Lake::open(c).await.unwrap();
    let a = Device::new(1);
    a.send(
        &lake,
        1,
        at(0),
        vec![
            with_content("r", at(0), "mail me at x.y@z.example", "It weighs 12 kg"),
            with_content("s", at(0), "hm", "I cannot help"),
            feedback("r", LabelKind::Corrected, at(0)),
        ],
    )
    .await
    .unwrap();
    let got = lake.rejected_interactions(&app(), at(-1), 10, None).await.unwrap();
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].question.as_deref(), Some("mail me at [email]"));
    assert_eq!((got[0].answer.as_deref(), got[0].label), (Some("It weighs 12 kg"), LabelKind::Corrected));
    assert_eq!(got[0].chunks, ["kb-1@1", "kb-2@3"]);
    let (_, rows) = lake.interaction_batch(&app(), at(-1), at(1), Duration::zero(), None).await.unwrap();
    assert_eq!((rows.interaction, rows.refused), (vec!["r".to_owned(), "s".to_owned()], vec![false, true]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_is_taken_once_however_late_it_reaches_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let (a, b) = (Device::new(1), Device::new(2));
    let take = |seen, from, to, upto| {
        let lake = &lake;
        async move {
            let app = app();
            let got = lake.interaction_batch_after(&app, seen, at(from), at(to), Duration::zero(), &upto).await;
            got.unwrap().1
        }
    };
    a.send(&lake, 1, at(10), vec![answer("one", at(10))]).await.unwrap();
    let v1 = lake.flush_and_watermark().await.unwrap();
    assert_eq!(take(v1.interactions, -60, 30, v1).await.interaction, ["one"]);
    // Received at minute 5, in the table after the cursor went to minute 30.
    let late = vec![answer("late", at(5)), feedback("late", LabelKind::Rejected, at(5))];
    b.send(&lake, 1, at(5), late).await.unwrap();
    b.send(&lake, 2, at(40), vec![answer("next", at(40))]).await.unwrap();
    let v2 = lake.flush_and_watermark().await.unwrap();
    let rows = take(v1.interactions, 30, 60, v2).await;
    assert_eq!(
        (rows.interaction.clone(), rows.rejected.clone()),
        (vec!["late".into(), "next".into()], vec![true, false])
    );
    assert_eq!(take(v1.interactions, 30, 60, v2).await, rows, "the same range gives the same rows");
    assert!(take(v2.interactions, 60, 90, v2).await.is_empty());
    // Compaction moves rows into new files, not into a later version's range.
    lake.compact(Table::Interactions).await.unwrap();
    let v3 = lake.flush_and_watermark().await.unwrap();
    assert!(take(v2.interactions, 60, 90, v3).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcomes_hold_each_labelled_interaction_once() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let (a, b) = (Device::new(1), Device::new(2));
    let advance = |after| {
        let lake = &lake;
        async move {
            let upto = lake.flush_and_watermark().await.unwrap();
            (lake.outcomes_advance(&app(), &after, &upto).await.unwrap(), upto)
        }
    };
    let start = flywheel_lake::Versions::default();
    assert_eq!(advance(start).await.0, 0);
    // One with its label, one without, a label before its interaction, and a label of somebody else.
    a.send(&lake, 1, at(0), vec![answer("x", at(0)), feedback("x", LabelKind::Rejected, at(0)), answer("late", at(0))])
        .await
        .unwrap();
    a.send(&lake, 2, at(1), vec![feedback("early", LabelKind::Edited, at(1))]).await.unwrap();
    b.send(&lake, 1, at(1), vec![feedback("late", LabelKind::Rejected, at(1))]).await.unwrap();
    let (added, v1) = advance(start).await;
    assert_eq!(added, 1);
    assert_eq!(advance(start).await.0, 0, "a repetition with an old cursor adds nothing");
    // Six days later the other halves come, and copies of what is there.
    let day6 = at(6 * 24 * 60);
    a.send(&lake, 3, day6, vec![answer("early", day6), feedback("late", LabelKind::Accepted, day6)]).await.unwrap();
    a.send(&lake, 4, day6, vec![answer("x", day6), feedback("x", LabelKind::Accepted, day6)]).await.unwrap();
    let (added, v2) = advance(v1).await;
    assert_eq!(added, 2);
    assert_eq!((advance(v1).await.0, advance(v2).await.0), (0, 0));
    // A label that comes after more than 14 days is not awaited any more.
    a.send(&lake, 5, at(30 * 24 * 60), vec![feedback("gone", LabelKind::Rejected, day6)]).await.unwrap();
    a.send(&lake, 6, at(60 * 24 * 60), vec![answer("gone", day6)]).await.unwrap();
    assert_eq!(advance(v2).await.0, 0);
    let count = |filter: &str| format!("SELECT count(*) FROM outcomes WHERE {filter}");
    for (filter, n) in [
        ("interaction_id = 'x' AND label = 'rejected' AND interaction_at = received_at", 1),
        ("interaction_id = 'early' AND label = 'edited' AND received_at < interaction_at", 1),
        ("interaction_id = 'late' AND label = 'accepted' AND template_id IS NOT NULL", 1),
        ("true", 3),
    ] {
        assert_eq!(number(&lake, &app(), &count(filter)).await, n, "{filter}");
    }
}

/// A day's traffic: of high-8gb four answers with one rejected, an anonymous one, and one of two days before.
async fn a_day(lake: &Lake) {
    let (a, b) = (Device::new(1), Device::new(2));
    a.send(lake, 1, at(-2880), vec![answer("old", at(-2880)), feedback("old", LabelKind::Rejected, at(-2880))])
        .await
        .unwrap();
    let day = ["one", "two", "three"].map(|id| answer(id, at(0)));
    a.send(lake, 2, at(0), day.to_vec()).await.unwrap();
    a.send(
        lake,
        3,
        at(5),
        vec![feedback("one", LabelKind::Edited, at(5)), feedback("two", LabelKind::Accepted, at(5))],
    )
    .await
    .unwrap();
    b.send(lake, 1, at(6), vec![answer("four", at(6))]).await.unwrap();
    lake.ingestor().ingest(forged(a.install, 9, at(7), vec![answer("claimed", at(7))])).await.unwrap();
    let mut gauges = a.request(&app(), 1, at(8), Vec::new());
    gauges.endpoint = Endpoint::OtlpMetrics;
    gauges.body = r#"{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"fleet.battery.level","unit":"1","gauge":{"dataPoints":[
        {"asDouble":0.25},{"asInt":"1"}]}}]}]}]}"#.into();
    (gauges.headers.signature, gauges.headers.public_key) = (None, None);
    lake.ingestor().ingest(gauges).await.unwrap();
    let v = lake.flush_and_watermark().await.unwrap();
    assert_eq!(lake.outcomes_advance(&app(), &Versions::default(), &v).await.unwrap(), 3);
}

fn scope(views: &[(&str, &str)]) -> QueryScope {
    let views = views.iter().map(|(name, query)| SavedView { name: (*name).into(), query: (*query).into() }).collect();
    QueryScope { app: app(), now: Some(at(30)), views }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn built_in_views_show_the_last_day() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    a_day(&lake).await;
    let limits = SqlLimits::default();
    let view = async |name: &str| {
        let mut rows = lake.view(scope(&[]), name, &limits).await.unwrap().to_json().unwrap();
        rows.sort_by_key(ToString::to_string);
        rows
    };
    let group = |trust: &str, answers: i64, rejected: i64, rate: f64| {
        serde_json::json!({ "template_id": "faq@3", "bundle": bundle(1).to_hex(), "device_class": "high-8gb", "trust": trust,
            "answers": answers, "rejected": rejected, "rejection_rate": rate })
    };
    assert_eq!(view("rejection_rate_24h").await, [group("anonymous", 1, 0, 0.0), group("keyed", 4, 1, 0.25)]);
    let latency = view("latency_24h").await;
    assert_eq!(latency.len(), 2);
    let keyed = &latency[1];
    assert_eq!((&keyed["trust"], &keyed["answers"], &keyed["measured"]), (&"keyed".into(), &4.into(), &4.into()));
    assert_eq!((&keyed["ttft_p50_ms"], &keyed["ttft_p95_ms"]), (&100.0.into(), &100.0.into()));
    let intake = view("intake_24h").await;
    let items: i64 = intake.iter().map(|r| r["items"].as_i64().unwrap()).sum();
    assert_eq!(items, 9, "four answers, two labels, one claimed, two points: {intake:?}");
    let metrics = view("metrics_24h").await;
    assert_eq!(metrics.len(), 1);
    assert_eq!((&metrics[0]["points"], &metrics[0]["mean"]), (&2.into(), &0.625.into()));
    assert_eq!((&metrics[0]["lowest"], &metrics[0]["highest"]), (&0.25.into(), &1.0.into()));
    // a day later nothing is left of it
    let later = QueryScope { now: Some(at(30 + 24 * 60)), ..scope(&[]) };
    assert_eq!(lake.view(later, "rejection_rate_24h", &limits).await.unwrap().rows(), 0);
    assert_eq!(lake.view(scope(&[]), "none", &limits).await.unwrap_err().code, "view_not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saved_views_are_tables_to_a_query() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    a_day(&lake).await;
    let limits = SqlLimits::default();
    let views = [
        ("proven", "SELECT bundle, answers, rejected FROM rejection_rate_24h WHERE trust <> 'anonymous'"),
        ("mixed", "SELECT 1 AS n UNION ALL SELECT 2.5"),
        ("stacked", "SELECT * FROM proven"),
    ];
    let ask = async |query: &str| lake.sql(scope(&views), query, &limits).await;
    let got = ask("SELECT sum(answers) AS a, sum(rejected) AS r FROM proven").await.unwrap().to_json().unwrap();
    assert_eq!(got, [serde_json::json!({ "a": 4, "r": 1 })]);
    let got = ask("SELECT sum(n) AS n FROM mixed JOIN proven ON true").await.unwrap().to_json().unwrap();
    assert_eq!(got[0]["n"], 3.5);
    // a view of a query's own name wins over a saved one
    let got = ask("WITH proven AS (SELECT 7 AS answers) SELECT answers FROM proven").await.unwrap().to_json().unwrap();
    assert_eq!(got[0]["answers"], 7);
    // one saved view cannot stand on another, whatever the order
    let e = ask("SELECT * FROM stacked").await.unwrap_err();
    assert!(e.code == "bad_query" && e.message.contains("the view `stacked`"), "{e}");
    assert_eq!(ask("SELECT * FROM proven, stacked").await.unwrap_err().code, "bad_query");
    let check = async |name: &str, query: &str| {
        lake.check_view(scope(&views), &SavedView { name: name.into(), query: query.into() }).await
    };
    let columns = check("fresh", views[0].1).await.unwrap();
    let shown: Vec<(&str, &str)> = columns.iter().map(|c| (c.name.as_str(), c.kind.as_str())).collect();
    assert_eq!(shown, [("bundle", "Utf8"), ("answers", "Int64"), ("rejected", "Int64")]);
    assert_eq!(check("fresh", "SELECT * FROM proven").await.unwrap_err().code, "bad_query");
    assert_eq!(check("unnest", "SELECT 1 AS one").await.unwrap_err().code, "bad_view_name");
    let twice = "SELECT a.bundle, b.bundle FROM interactions a JOIN interactions b ON a.bundle = b.bundle";
    assert_eq!(check("fresh", twice).await.unwrap_err().code, "bad_view");
    let now = ask("SELECT CAST(now() AS VARCHAR) AS now").await.unwrap().to_json().unwrap();
    assert!(now[0]["now"].as_str().unwrap().starts_with("2026-03-01T00:30"), "time is that of the business: {now:?}");
}
