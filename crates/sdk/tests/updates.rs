//! Fault matrix of updates: what the network, the server, the disk and the power supply can do to a download. In every
//! case the active slot runs exactly the signed bytes or stays what it was.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed expectation is a failed test"
)]

mod support;

use flywheel_sdk::*;
use flywheel_types::wire::DeviceEventKind as K;
use flywheel_types::{LabelKind, TemplateId};
use support::*;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn installs_loads_confirms_and_reports() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[3 * MIB, 70_000]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    assert_eq!(device.plan(), LoadPlan::Empty);
    settle(&mut device, &one).await;
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Current);
    let intake = server.intake.lock().unwrap();
    for kind in [K::Downloaded, K::Installed, K::Confirmed] {
        assert_eq!(intake.device_events(kind).len(), 1, "{kind:?}");
        assert_eq!(intake.device_events(kind)[0].bundle, Some(one.id));
    }
    assert_eq!(intake.device_events(K::Confirmed)[0].load_ms, Some(12.0));
}

#[tokio::test]
async fn an_idle_poll_is_one_request_without_a_body() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[1000]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    assert_eq!(device.update(false).await.unwrap(), UpdateOutcome::Current, "not due: no poll");
    let (requests, bytes) = (server.http.requests().len(), server.http.body_bytes());
    device.update(true).await.unwrap();
    assert_eq!(server.http.requests().len(), requests + 1);
    assert_eq!(server.http.body_bytes(), bytes, "304");
    server.advance(2 * 3600);
    device.update(false).await.unwrap();
    assert_eq!(server.http.requests().len(), requests + 2, "due");
}

/// One fault on the first blob request; the update succeeds in the same call or the next.
async fn survives(fault: Fault, calls: usize) {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[17 * MIB]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    server.http.fail_next("/blobs/", fault.clone());
    let mut device = home.open(&server);
    for call in 1..=calls {
        let got = device.update(true).await;
        if call < calls {
            assert!(got.is_err(), "{fault:?}: {got:?}");
            assert_eq!(device.active_bundle(), None);
        } else {
            assert_eq!(got.unwrap(), UpdateOutcome::Installed { bundle: one.id }, "{fault:?}");
        }
    }
    assert_eq!(server.http.pending_faults(), 0);
    load(&mut device, &one);
}

#[tokio::test]
async fn server_and_network_faults_never_reach_the_slot() {
    survives(Fault::IgnoreRange, 1).await;
    survives(Fault::RangeFromZero, 1).await;
    survives(Fault::OtherEtag, 1).await;
    survives(Fault::ExtraBytes(100_000), 1).await;
    survives(Fault::FlipByte(9 * MIB), 1).await;
    survives(Fault::CutAfter(0), 1).await;
    survives(Fault::CutAfter(16 * MIB + 5), 1).await;
    survives(Fault::Status(416, None), 1).await;
    survives(Fault::Status(500, None), 1).await;
    survives(Fault::Unreachable, 2).await;
    survives(Fault::Status(503, Some("120")), 2).await;
    survives(Fault::Status(404, None), 2).await;
}

#[tokio::test]
async fn ten_cuts_and_ten_kills_cost_at_most_a_chunk_each() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[40 * MIB]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let before = server.http.body_bytes();
    for n in 0..10u64 {
        server.http.fail_next("/blobs/", Fault::CutAfter((n as usize * 7919 * 1013) % (40 * MIB)));
        let mut device = home.open(&server);
        // A kill: the call is dropped half-way, nothing is closed properly.
        let steps = 3000 + n * 911;
        let update = device.update(true);
        tokio::pin!(update);
        for _ in 0..steps {
            if futures::poll!(&mut update).is_ready() {
                break;
            }
        }
    }
    let mut device = home.open(&server);
    while device.active_bundle() != Some(one.id) {
        device.update(true).await.unwrap();
    }
    load(&mut device, &one);
    let got = server.http.body_bytes() - before;
    let bound = 40 * MIB as u64 + 20 * (8 << 20) + (1 << 20);
    assert!(got <= bound, "{got} of at most {bound} bytes");
}

#[tokio::test]
async fn etag_change_in_the_middle_keeps_verified_chunks_and_ends_well() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[20 * MIB]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    server.http.fail_next("/blobs/", Fault::CutAfter(9 * MIB));
    server.http.fail_next("/blobs/", Fault::Unreachable);
    let mut device = home.open(&server);
    device.update(true).await.unwrap_err();
    server.http.fail_next("/blobs/", Fault::OtherEtag);
    device.update(true).await.unwrap();
    load(&mut device, &one);
    let ranges: Vec<_> = server
        .http
        .requests()
        .iter()
        .filter(|r| r.url.contains("/blobs/"))
        .map(|r| (r.get_header("range").map(str::to_owned), r.get_header("if-range").is_some()))
        .collect();
    assert_eq!(ranges[0].0.as_deref(), Some("bytes=0-20971519"));
    assert_eq!(ranges[1], (Some("bytes=8388608-20971519".into()), true));
    assert_eq!(ranges[2], (None, false), "after a foreign tag the file is asked for from its beginning");
}

#[tokio::test]
async fn corrupt_blob_is_refused_reported_once_and_the_old_model_runs() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[MIB]), bundle(2, &[2 * MIB]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[&two], |a| a.rollouts = vec![rollout("r", &two, &one)]);
    let blob = two.manifest.files()[0].sha256;
    let url = format!("{BASE}/tuf/demo/targets/blobs/{blob}.{blob}.gguf");
    let mut bad = two.artefacts[0].clone();
    *bad.last_mut().unwrap() ^= 1;
    server.http.put(url.clone(), bad);
    for _ in 0..3 {
        let e = device.update(true).await.unwrap_err();
        assert!(matches!(e, SdkError::Refused { code: "chunk_hash_mismatch", .. }), "{e}");
        assert_eq!(device.active_bundle(), Some(one.id));
    }
    load(&mut device, &one);
    device.upload().await.unwrap();
    {
        let intake = server.intake.lock().unwrap();
        let refused = intake.device_events(K::Refused);
        assert_eq!(refused.len(), 1, "one report per cause");
        assert_eq!((refused[0].bundle, refused[0].reason.as_deref()), (Some(two.id), Some("chunk_hash_mismatch")));
        assert_eq!(refused[0].assignment.as_ref().unwrap().rollout_id.as_str(), "r");
    }
    // The repaired file is installed without anybody's help.
    server.http.put(url, two.artefacts[0].clone());
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: two.id });
}

#[tokio::test]
async fn tampered_manifest_and_metadata_are_refused_and_nothing_changes() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[1000]), bundle(2, &[2000]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[&two], |a| a.default_bundle = Some(two.id));
    let manifest = format!("{BASE}/tuf/demo/targets/bundles/qa/2/{}.manifest.json", two.id);
    let good = two.manifest.to_bytes().unwrap();
    let mut bad = good.clone();
    let at = bad.windows(4).position(|w| w == b"q4_0").unwrap();
    bad[at + 1] = b'5';
    server.http.put(manifest.clone(), bad);
    let e = device.update(true).await.unwrap_err();
    assert!(matches!(e, SdkError::Refused { .. }), "{e}");
    server.http.put(manifest, good);
    // The timestamp, signed by nobody we know.
    let url = format!("{BASE}/tuf/demo/metadata/timestamp.json");
    let bytes = fetch(&server.http, HttpRequest::get(url.clone()), 1 << 20).await.unwrap().body;
    let text = String::from_utf8(bytes.to_vec()).unwrap().replace("\"version\":2", "\"version\":9");
    server.http.put(url, text.into_bytes());
    server.advance(7200);
    let e = device.update(true).await.unwrap_err();
    assert!(matches!(e, SdkError::Refused { code: "bad_signature", .. }), "{e}");
    assert_eq!(device.active_bundle(), Some(one.id));
    load(&mut device, &one);
}

#[tokio::test]
async fn expired_metadata_keeps_the_model_running_and_installs_nothing() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[1000]), bundle(2, &[2000]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.advance(400 * 86_400);
    for _ in 0..2 {
        let e = device.update(true).await.unwrap_err();
        assert!(matches!(e, SdkError::Expired(_)), "{e}");
        load(&mut device, &one);
    }
    drop(device);
    let mut device = home.open(&server);
    load(&mut device, &one);
    // Fresh metadata heals it without anybody's help. (The starter profile signs the catalog for 180 days.)
    let mut server2 = Server::new();
    server2.clock.advance_to(start() + chrono::Duration::days(170));
    server2.publish(&[&one, &two], |a| a.default_bundle = Some(two.id));
    let home2 = Home::new();
    let mut device = home2.open(&server2);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: two.id });
}

#[tokio::test]
async fn full_disk_keeps_the_partial_and_the_old_model() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[1000]), bundle(2, &[30 * MIB]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[&two], |a| a.rollouts = vec![rollout("r", &two, &one)]);
    // The precheck names the space.
    let tight = Conditions { free_bytes: Some(100 << 20), ..Conditions::default() };
    *home.host.conditions.lock().unwrap() = tight;
    let got = device.update(true).await.unwrap();
    let needed_bytes = (30 << 20) + (256 << 20);
    assert_eq!(got, UpdateOutcome::Waiting(Wait::Space { needed_bytes, free_bytes: 100 << 20 }));
    // The space vanishes half-way.
    *home.host.conditions.lock().unwrap() = Conditions::default();
    home.host.room.store(17 << 20, std::sync::atomic::Ordering::SeqCst);
    let e = device.update(true).await.unwrap_err();
    assert!(matches!(e, SdkError::NoSpace { .. }), "{e}");
    load(&mut device, &one);
    let before = server.http.body_bytes();
    home.host.room.store(u64::MAX, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: two.id });
    assert!(server.http.body_bytes() - before < 15 << 20, "two chunks were kept");
    load(&mut device, &two);
}

#[tokio::test]
async fn conditions_that_change_half_way_stop_between_chunks_and_say_why() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[30 * MIB]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    let cellular = Conditions { network: Network::Metered, ..Conditions::default() };
    *home.host.conditions.lock().unwrap() = cellular;
    let got = device.update(true).await.unwrap();
    assert_eq!(got, UpdateOutcome::Waiting(Wait::Unmetered { bytes: 30 << 20 }));
    *home.host.conditions.lock().unwrap() = Conditions::default();
    *home.host.later.lock().unwrap() = Some((3, cellular));
    let got = device.update(true).await.unwrap();
    let UpdateOutcome::Waiting(Wait::Unmetered { bytes }) = got else { panic!("{got:?}") };
    assert!(bytes < 30 << 20 && bytes % (1 << 20) == 0 && bytes > 0, "{bytes}");
    *home.host.later.lock().unwrap() = None;
    *home.host.conditions.lock().unwrap() = Conditions::default();
    let before = server.http.body_bytes();
    // Not due, no poll, but the download goes on.
    assert_eq!(device.update(false).await.unwrap(), UpdateOutcome::Installed { bundle: one.id });
    assert_eq!(server.http.body_bytes() - before, bytes);
    load(&mut device, &one);
}

#[tokio::test]
async fn follows_a_rollback_without_download_and_forward_again() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[MIB]), bundle(2, &[MIB]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[&two], |a| {
        a.default_bundle = Some(one.id);
        a.rollouts = vec![rollout("r", &two, &one)];
    });
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: two.id });
    load(&mut device, &two);
    assert_eq!(device.arm().unwrap().rollout_id.as_str(), "r");
    server.publish(&[], |a| a.default_bundle = Some(one.id));
    let blobs = |s: &Server| s.http.requests().iter().filter(|r| r.url.contains("/blobs/")).count();
    let before = blobs(&server);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Switched { bundle: one.id });
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Current, "no loop");
    load(&mut device, &one);
    assert_eq!(device.arm(), None);
    server.publish(&[], |a| a.rollouts = vec![rollout("r2", &two, &one)]);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Switched { bundle: two.id });
    load(&mut device, &two);
    assert_eq!(blobs(&server), before, "no byte was downloaded again");
    device.upload().await.unwrap();
    let intake = server.intake.lock().unwrap();
    assert_eq!(intake.device_events(K::RolledBack).len(), 1);
    assert_eq!(intake.device_events(K::RolledBack)[0].bundle, Some(one.id));
    assert_eq!(intake.device_events(K::Confirmed).len(), 4);
    assert_eq!(intake.device_events(K::Exposed).len(), 2);
}

#[tokio::test]
async fn a_halted_rollout_keeps_its_devices_and_takes_nobody_new() {
    let mut server = Server::new();
    let (early, late, ring) = (Home::new(), Home { seed: 2, ..Home::new() }, Home { seed: 3, ..Home::new() });
    let (one, two) = (bundle(1, &[1000]), bundle(2, &[1000]));
    server.publish(&[&one, &two], |a| a.default_bundle = Some(one.id));
    let mut early = early.open(&server);
    let mut ring = ring.open(&server);
    let named = ring.install_id();
    let go = |a: &mut flywheel_types::assign::AssignmentV1, halted: bool| {
        a.default_bundle = Some(one.id);
        let mut r = rollout("r", &two, &one);
        r.intake_closed = halted;
        r.ring = vec![named];
        a.rollouts = vec![r];
    };
    server.publish(&[], |a| go(a, false));
    for device in [&mut early, &mut ring] {
        device.update(true).await.unwrap();
        assert_eq!(device.active_bundle(), Some(two.id));
    }
    assert_eq!((early.arm().is_some(), ring.arm().is_some()), (true, false));
    server.publish(&[], |a| go(a, true));
    let mut late = late.open(&server);
    for (device, expected) in [(&mut early, two.id), (&mut ring, two.id), (&mut late, one.id)] {
        device.update(true).await.unwrap();
        assert_eq!(device.active_bundle(), Some(expected));
    }
}

#[tokio::test]
async fn files_that_vanish_are_fetched_again() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[9 * MIB, 1000]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    for folder in ["blobs", "bundles"] {
        std::fs::remove_dir_all(home.path().join(folder)).unwrap();
        if folder == "bundles" {
            drop(device);
            device = home.open(&server);
            assert_eq!(device.plan(), LoadPlan::Empty, "an unknown bundle is not loaded");
        }
        assert_eq!(device.update(false).await.unwrap(), UpdateOutcome::Installed { bundle: one.id });
        load(&mut device, &one);
    }
}

#[tokio::test]
async fn unchanged_shards_are_not_fetched_twice_and_old_ones_are_removed() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[MIB, 2 * MIB]);
    let mut two = bundle(2, &[MIB, 3 * MIB]);
    two.artefacts[0] = one.artefacts[0].clone();
    two.manifest.builds[0].artefacts[0] = one.manifest.builds[0].artefacts[0].clone();
    two.id = two.manifest.id().unwrap();
    let three = bundle(3, &[MIB / 2]);
    server.publish(&[&one, &two, &three], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[], |a| a.default_bundle = Some(two.id));
    let before = server.http.body_bytes();
    settle(&mut device, &two).await;
    assert!(server.http.body_bytes() - before < 4 * MIB as u64);
    server.publish(&[], |a| a.default_bundle = Some(three.id));
    settle(&mut device, &three).await;
    let names: Vec<_> = std::fs::read_dir(home.path().join("blobs")).unwrap().collect();
    assert_eq!(names.len(), 3, "two shards of the previous bundle, one of the active");
}

#[tokio::test]
async fn no_model_and_wrong_build_are_outcomes_not_failures() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[1000]);
    let mut big = bundle(2, &[1000]);
    big.manifest.builds[0].min_ram_bytes = 1 << 40;
    big.id = big.manifest.id().unwrap();
    server.publish(&[&one, &big], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish(&[], |a| a.default_bundle = None);
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Off);
    assert_eq!((device.plan(), device.active_bundle()), (LoadPlan::Off, None));
    assert!(device.record_interaction(Answer::new(TemplateId::new("t").unwrap())).is_err());
    server.publish(&[], |a| a.default_bundle = Some(big.id));
    let e = device.update(true).await.unwrap_err();
    assert!(matches!(e, SdkError::Refused { code: "no_build", .. }), "{e}");
    server.publish(&[], |a| a.default_bundle = Some(one.id));
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Current);
    load(&mut device, &one);
}

#[tokio::test]
async fn bundle_below_a_raised_floor_is_not_taken_back() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[1000]);
    let two = bundle_with(2, &[1000], 2, Default::default());
    server.publish(&[&one, &two], |a| a.default_bundle = Some(one.id));
    let mut device = home.open(&server);
    settle(&mut device, &one).await;
    server.publish_with_floor(&[], Some(2), |a| a.default_bundle = Some(two.id));
    settle(&mut device, &two).await;
    // The slot in use when the floor rose may still be fallen back to, and that is reported.
    for _ in 0..2 {
        device.load_begin().unwrap();
        device.load_failed("probe", false).unwrap();
    }
    assert_eq!(device.active_bundle(), Some(one.id));
    device.upload().await.unwrap();
    let fell = server.intake.lock().unwrap().device_events(K::FellBack);
    assert_eq!(fell[0].reason, Some(format!("to={};below_floor", one.id)));
}

#[tokio::test]
async fn every_file_truncated_in_turn_never_opens_the_way_back() {
    let (mut server, home) = (Server::new(), Home::new());
    let (one, two) = (bundle(1, &[1000]), bundle(2, &[1000]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let old_stamp = fetch(&server.http, HttpRequest::get(format!("{BASE}/tuf/demo/metadata/timestamp.json")), 1 << 20)
        .await
        .unwrap()
        .body;
    server.publish(&[&two], |a| a.default_bundle = Some(two.id));
    let mut device = home.open(&server);
    settle(&mut device, &two).await;
    drop(device);
    let files = tree(&home.path());
    for (path, bytes) in &files {
        for keep in [0, bytes.len() / 2] {
            for (p, b) in &files {
                std::fs::write(p, b).unwrap();
            }
            std::fs::write(path, &bytes[..keep]).unwrap();
            if path.ends_with("install.key") {
                assert!(matches!(home.try_open(&server), Err(SdkError::Corrupt { .. })));
                continue;
            }
            // The server replays its old timestamp: every device must refuse it, whichever file it lost.
            let url = format!("{BASE}/tuf/demo/metadata/timestamp.json");
            let new_stamp = fetch(&server.http, HttpRequest::get(url.clone()), 1 << 20).await.unwrap().body;
            server.http.put(url.clone(), old_stamp.clone());
            let mut device = home.open(&server);
            let got = device.update(true).await;
            assert!(matches!(got, Err(SdkError::Refused { code: "rollback", .. })), "{}: {got:?}", path.display());
            server.http.put(url, new_stamp);
            device.update(true).await.unwrap();
            assert_eq!(device.active_bundle(), Some(two.id), "{}", path.display());
        }
    }
}

#[tokio::test]
async fn a_second_process_is_told_and_a_host_cache_serves_many() {
    let (mut server, home) = (Server::new(), Home::new());
    let one = bundle(1, &[9 * MIB]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let device = home.open(&server);
    assert!(matches!(home.try_open(&server), Err(SdkError::Busy { .. })));
    drop(device);

    let cache_dir = tempfile::tempdir().unwrap();
    let transport: std::sync::Arc<dyn HttpTransport> = std::sync::Arc::new(server.http.clone());
    let inner = HttpBlobs::new(transport.clone(), format!("{BASE}/tuf/demo/targets"), Durability::Relaxed, 4);
    let cache = std::sync::Arc::new(HostCache::new(inner, cache_dir.path()));
    // A damaged file in the folder is found out before anybody uses it.
    let blob = &one.manifest.files()[0];
    std::fs::write(cache_dir.path().join(format!("{}.gguf", blob.sha256)), vec![0; blob.length as usize]).unwrap();
    for n in 0..5u8 {
        let dir = tempfile::tempdir().unwrap();
        let config = DeviceConfig::new(app(), BASE, "key", server.root.clone(), dir.path());
        let env = Env {
            clock: std::sync::Arc::new(server.clock.clone()),
            rng: Box::new(<rand_chacha::ChaCha8Rng as rand::SeedableRng>::from_seed([n; 32])),
            transport: transport.clone(),
            blobs: cache.clone(),
            host: home.host.clone(),
            shared: SharedCaches::new(),
        };
        let mut device = Device::open(config, env).unwrap();
        device.update(true).await.unwrap();
        load(&mut device, &one);
    }
    assert_eq!(cache.fetched_bytes(), 9 * MIB as u64, "once for all");
}

#[tokio::test]
async fn interaction_ids_and_choices_repeat_with_the_seed() {
    let mut ids: Vec<Vec<String>> = vec![];
    for _ in 0..2 {
        let (mut server, home) = (Server::new(), Home::new());
        let one = bundle(1, &[1000]);
        server.publish(&[&one], |a| a.default_bundle = Some(one.id));
        let mut device = home.open(&server);
        device.update(true).await.unwrap();
        load(&mut device, &one);
        let mut mine = vec![device.install_id().to_string(), device.next_poll_at().to_string()];
        for n in 0..3 {
            server.advance(n);
            let id = device.record_interaction(Answer::new(TemplateId::new("t").unwrap())).unwrap();
            device.record_feedback(id.clone(), LabelKind::Accepted, None).unwrap();
            let uuid: uuid::Uuid = id.as_str().parse().unwrap();
            assert_eq!(uuid.get_version_num(), 7);
            mine.push(id.to_string());
        }
        ids.push(mine);
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(ids[0].iter().collect::<std::collections::BTreeSet<_>>().len(), 5);
}
