//! Events and reports: nothing is lost silently, nothing arrives twice, and a phone that was offline for half a year
//! tells what it knows.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed expectation is a failed test"
)]

mod support;

use flywheel_sdk::*;
use flywheel_types::TemplateId;
use flywheel_types::wire::DeviceEventKind as K;
use flywheel_types::wire::EventV1;
use support::*;

fn answer() -> Answer {
    Answer::new(TemplateId::new("t").unwrap())
}

async fn running(server: &mut Server, home: &Home) -> (Device, TestBundle) {
    let one = bundle(1, &[1000]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(server);
    settle(&mut device, &one).await;
    (device, one)
}

#[tokio::test]
async fn crash_in_load_then_three_offline_starts_is_one_report() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, one) = running(&mut server, &home).await;
    device.load_begin().unwrap();
    drop(device);
    server.http.set_offline(true);
    for start in 0..3 {
        let mut device = home.open(&server);
        assert_eq!(device.died_in_load(), start == 0);
        load(&mut device, &one);
        device.upload().await.unwrap();
    }
    server.http.set_offline(false);
    server.advance(86_400);
    for _ in 0..2 {
        let mut device = home.open(&server);
        device.upload().await.unwrap();
        assert_eq!(device.queued_events(), 0);
    }
    let failed = server.intake.lock().unwrap().device_events(K::LoadFailed);
    assert_eq!(failed.len(), 1);
    assert_eq!((failed[0].bundle, failed[0].reason.as_deref()), (Some(one.id), Some("died_in_load_window")));
}

#[tokio::test]
async fn a_hundred_kills_outside_the_window_cause_no_fall_back_two_inside_do() {
    let (mut server, home) = (Server::new(), Home::new());
    let (device, one) = running(&mut server, &home).await;
    drop(device);
    let two = bundle(2, &[1000]);
    server.publish(&[&two], |a| {
        a.default_bundle = Some(one.id);
        a.rollouts = vec![rollout("r", &two, &one)];
    });
    let mut device = home.open(&server);
    device.update(true).await.unwrap();
    load(&mut device, &two);
    drop(device);
    for _ in 0..100 {
        let mut device = home.open(&server);
        device.record_interaction(answer()).unwrap();
        assert_eq!(device.active_bundle(), Some(two.id));
    }
    for _ in 0..2 {
        let mut device = home.open(&server);
        device.load_begin().unwrap();
    }
    let mut device = home.open(&server);
    assert_eq!(device.active_bundle(), Some(one.id));
    load(&mut device, &one);
    // The local verdict holds against the assignment that still names `two`.
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Blocked { bundle: two.id, retry_at: None });
    device.upload().await.unwrap();
    {
        let intake = server.intake.lock().unwrap();
        assert_eq!(intake.device_events(K::LoadFailed).len(), 2);
        assert_eq!(intake.device_events(K::FellBack).len(), 1);
        assert_eq!(intake.device_events(K::FellBack)[0].bundle, Some(two.id));
    }
    server.publish(&[], |a| {
        a.default_bundle = Some(one.id);
        let mut r = rollout("r", &two, &one);
        r.retry_failed = true;
        a.rollouts = vec![r];
    });
    server.advance(4000);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: two.id });
}

#[tokio::test]
async fn a_lost_answer_leads_to_the_same_bytes_and_is_counted_once() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, _) = running(&mut server, &home).await;
    for _ in 0..5 {
        device.record_interaction(answer()).unwrap();
    }
    server.http.fail_next("/v1/events", Fault::AnswerLost);
    let before = server.intake.lock().unwrap().events.len();
    let out = device.upload().await.unwrap();
    assert!(matches!(out.waiting, Some(Wait::Until(_))), "{out:?}");
    drop(device);
    // The intake of MemoryHttp handled the request although the answer was lost.
    assert_eq!(server.intake.lock().unwrap().events.len(), before + 5);
    let mut device = home.open(&server);
    device.record_interaction(answer()).unwrap();
    device.upload().await.unwrap();
    let intake = server.intake.lock().unwrap();
    assert_eq!((intake.duplicates, intake.events.len()), (1, before + 6));
}

#[tokio::test]
async fn statuses_are_obeyed() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, _) = running(&mut server, &home).await;
    device.record_interaction(answer()).unwrap();
    let answers = |list: &[(u16, Option<&'static str>)]| server.intake.lock().unwrap().answers = list.to_vec();
    // 429 and 503: exactly as long as asked.
    for (status, retry) in [(429, "120"), (503, "60")] {
        answers(&[(status, Some(retry))]);
        let until =
            flywheel_types::BusinessClock::now(&server.clock) + chrono::Duration::seconds(retry.parse().unwrap());
        assert_eq!(device.upload().await.unwrap().waiting, Some(Wait::Until(until)));
        let requests = server.http.requests().len();
        assert_eq!(device.upload().await.unwrap().waiting, Some(Wait::Until(until)));
        assert_eq!(server.http.requests().len(), requests, "no request before its time");
        server.advance(retry.parse().unwrap());
    }
    // A server that is set up wrongly today may be right tomorrow: nothing is dropped.
    answers(&[(401, None), (404, None), (500, None)]);
    for _ in 0..3 {
        assert!(device.upload().await.unwrap().waiting.is_some());
        server.advance(86_400);
    }
    assert_eq!(device.queued_events(), 1);
    // 400 is for good: counted, and the count arrives.
    answers(&[(400, None)]);
    let out = device.upload().await.unwrap();
    assert_eq!((out.refused_events, out.waiting), (1, None));
    device.upload().await.unwrap();
    let lost = server.intake.lock().unwrap().device_events(K::EventsDropped);
    assert_eq!(lost.last().unwrap().reason.as_deref(), Some("http_400=1"));
}

#[tokio::test]
async fn too_large_batches_shrink_until_they_fit() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, _) = running(&mut server, &home).await;
    for _ in 0..64 {
        device.record_interaction(answer()).unwrap();
    }
    let before = server.intake.lock().unwrap().events.len();
    server.intake.lock().unwrap().max_body = 6_000;
    for _ in 0..40 {
        device.upload().await.unwrap();
    }
    assert_eq!(device.queued_events(), 0);
    assert_eq!(server.intake.lock().unwrap().events.len(), before + 64);
}

#[tokio::test]
async fn half_a_year_offline_with_kills_keeps_the_newest_and_counts_the_rest() {
    let (mut server, mut home) = (Server::new(), Home::new());
    home.queue = QueueLimits { max_events: 500, max_bytes: 1 << 20 };
    let (mut device, _) = running(&mut server, &home).await;
    let before = server.intake.lock().unwrap().events.len() as u64;
    server.http.set_offline(true);
    for day in 0..180u64 {
        server.advance(86_400);
        if day % 7 == 3 {
            drop(device);
            device = home.open(&server);
        }
        for _ in 0..5 {
            device.record_interaction(answer()).unwrap();
        }
        device.record_crash(false, Some("signal_11".into())).unwrap();
        device.upload().await.unwrap();
    }
    let size: u64 =
        tree(&home.path()).iter().map(|(p, b)| if p.ends_with("queue.log") { b.len() as u64 } else { 0 }).sum();
    assert!(size < 2 << 20, "{size}");
    server.http.set_offline(false);
    server.advance(86_400);
    while device.queued_events() > 0 {
        device.upload().await.unwrap();
        server.advance(86_400);
    }
    let intake = server.intake.lock().unwrap();
    let lost: u64 = intake
        .device_events(K::EventsDropped)
        .iter()
        .map(|d| d.reason.as_ref().unwrap().split_once('=').unwrap().1.parse::<u64>().unwrap())
        .sum();
    let arrived = intake.events.iter().filter(|e| !matches!(e, EventV1::Device(d) if d.event == K::EventsDropped));
    assert_eq!(arrived.count() as u64 - before + lost, 180 * 6, "holes equal reported drops");
    assert!(lost > 300, "{lost}");
    assert_eq!(intake.device_events(K::Crashed).len(), 180, "interactions go first");
    let seqs: Vec<u64> = intake.batches.keys().map(|(_, s)| *s).collect();
    assert_eq!(seqs.len(), seqs.iter().collect::<std::collections::BTreeSet<_>>().len());
}

#[tokio::test]
async fn the_request_rate_is_bounded_when_everything_fails() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, _) = running(&mut server, &home).await;
    device.record_interaction(answer()).unwrap();
    server
        .http
        .on_request(|_| HttpResponse { head: ResponseHead { status: 500, headers: vec![] }, body: Default::default() });
    let before = server.http.requests().len();
    // The host's scheduler calls every minute for a day.
    for _ in 0..24 * 60 {
        server.advance(60);
        device.upload().await.unwrap();
    }
    let tries = server.http.requests().len() - before;
    assert!((5..60).contains(&tries), "{tries}");
}

#[tokio::test]
async fn index_changes_are_applied_hidden_and_kept() {
    let (mut server, home) = (Server::new(), Home::new());
    let (mut device, _) = running(&mut server, &home).await;
    let chunk = |id: &str, version: u32, hide: &str| {
        format!(
            r#"{{"chunk_id":"{id}","version":{version},"state":"active","text":"t","embedding":"AACAPw==","hide":{hide}}}"#
        )
    };
    let put = |since: u64, version: u64, changes: &[String]| {
        let body = format!(r#"{{"index_version":{version},"changes":[{}]}}"#, changes.join(","));
        server.http.put(format!("{BASE}/v1/index/changes?since={since}"), body.into_bytes());
    };
    put(0, 2, &[chunk("a", 1, "null"), chunk("b", 1, "null")]);
    put(2, 2, &[]);
    assert!(device.sync_index().await.unwrap());
    assert!(!device.sync_index().await.unwrap());
    put(2, 3, &[chunk("a", 2, r#"{"salt":"s","share_ppm":1000000}"#)]);
    put(3, 3, &[]);
    assert!(device.sync_index().await.unwrap());
    drop(device);
    let mut device = home.open(&server);
    assert_eq!(device.index().version(), 3, "kept across a restart");
    assert!(!device.sync_index().await.unwrap());
    let ranked = device.index().nearest(&[1.0], 2);
    let hits = device.index().candidates(&ranked, 1, &device.install_id());
    let seen: Vec<_> = hits.iter().map(|c| (c.chunk.id.as_str(), c.chunk.version, c.hidden)).collect();
    assert_eq!(seen, [("a", 2, true), ("b", 1, false)]);
    // A server that began anew.
    put(3, 1, &[]);
    put(0, 1, &[chunk("c", 1, "null")]);
    assert!(device.sync_index().await.unwrap());
    assert_eq!((device.index().version(), device.index().len()), (1, 1));
    put(1, 4, &["{".into()]);
    assert!(matches!(device.sync_index().await, Err(SdkError::Malformed { .. })));
    assert_eq!(device.index().version(), 1);
}
