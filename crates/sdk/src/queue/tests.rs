//! Queue tests: what survives a restart at any byte, and that a number is never used for two different batches.

use super::*;
use flywheel_types::wire::{EventBatchV1, FeedbackV1};
use flywheel_types::{InteractionId, LabelKind};
use proptest::prelude::*;
use std::path::Path;

fn feedback(n: u32) -> EventV1 {
    EventV1::Feedback(FeedbackV1 {
        interaction_id: InteractionId::new(format!("i-{n}")).unwrap(),
        at: DateTime::UNIX_EPOCH,
        label: LabelKind::Rejected,
        reason: None,
        user_id: None,
    })
}

fn interaction(n: u32) -> EventV1 {
    let json = format!(
        r#"{{"kind":"interaction","interaction_id":"q-{n}","at":"2026-03-01T10:00:00Z","template_id":"t",
            "bundle":"{}"}}"#,
        "0".repeat(64)
    );
    serde_json::from_str(&json).unwrap()
}

fn crash() -> EventV1 {
    EventV1::Device(DeviceEventV1 {
        at: DateTime::UNIX_EPOCH,
        event: DeviceEventKind::Crashed,
        bundle: None,
        assignment: None,
        load_ms: None,
        reason: None,
    })
}

fn open(dir: &Path) -> Queue {
    Queue::open(dir, Durability::Relaxed, QueueLimits::default()).unwrap()
}

fn batch(q: &mut Queue, max: usize) -> Option<Batch> {
    let facts = DeviceFactsV1::default();
    let install = InstallId::of_public_key(&[1; 32]);
    let stamp = BatchStamp { install, now: DateTime::UNIX_EPOCH, facts: &facts };
    q.batch(&UploadPolicy::default(), max, &stamp).unwrap()
}

fn events(b: &Batch) -> Vec<EventV1> {
    serde_json::from_slice::<EventBatchV1>(&b.body).unwrap().events
}

#[test]
fn a_batch_is_the_same_bytes_until_it_is_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let mut q = open(dir.path());
    q.append(&[feedback(1), interaction(2)], 0).unwrap();
    let first = batch(&mut q, 100).unwrap();
    q.append(&[feedback(3)], 0).unwrap();
    assert_eq!(batch(&mut q, 100).unwrap(), first);
    let mut q = open(dir.path());
    assert_eq!(batch(&mut q, 100).unwrap(), first, "also after a restart");
    assert_eq!((first.seq, events(&first)), (1, vec![feedback(1), interaction(2)]));
    q.acked(1).unwrap();
    let second = batch(&mut open(dir.path()), 100).unwrap();
    assert_eq!((second.seq, events(&second)), (2, vec![feedback(3)]));
}

#[test]
fn oldest_interactions_go_first_and_the_loss_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let limits = QueueLimits { max_events: 3, max_bytes: 1 << 20 };
    let mut q = Queue::open(dir.path(), Durability::Relaxed, limits).unwrap();
    q.append(&[feedback(1), interaction(2), interaction(3)], 0).unwrap();
    q.append(&[feedback(4), interaction(5)], 0).unwrap();
    q.append(&[feedback(6)], 0).unwrap();
    let b = batch(&mut q, 100).unwrap();
    let mut got = events(&b);
    let EventV1::Device(lost) = got.pop().unwrap() else { panic!("the last event tells the loss") };
    assert_eq!((lost.event, lost.reason.as_deref()), (DeviceEventKind::EventsDropped, Some("queue_full=3")));
    assert_eq!(got, vec![feedback(1), feedback(4), feedback(6)]);
    // Refused for ever: the three events and the three lost before are counted again.
    q.refused(b.seq, "http_400").unwrap();
    let b = batch(&mut open(dir.path()), 100).unwrap();
    let reasons: Vec<_> = events(&b)
        .into_iter()
        .map(|e| match e {
            EventV1::Device(d) => d.reason.unwrap(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(reasons, ["http_400=3", "queue_full=3"]);
    assert_eq!(b.seq, 2);
}

#[test]
fn byte_bound_holds() {
    let dir = tempfile::tempdir().unwrap();
    let limits = QueueLimits { max_events: 1000, max_bytes: 2000 };
    let mut q = Queue::open(dir.path(), Durability::Relaxed, limits).unwrap();
    for n in 0..200 {
        q.append(&[interaction(n)], 0).unwrap();
        assert!(q.pending_bytes <= 2000);
    }
    assert!(q.len() > 5);
    assert!(std::fs::metadata(&q.path).unwrap().len() < 3 * COMPACT_BYTES, "the log does not grow for ever");
}

#[test]
fn too_large_batch_is_split_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut q = open(dir.path());
    q.append(&(0..6).map(feedback).collect::<Vec<_>>(), 0).unwrap();
    let b = batch(&mut q, 100).unwrap();
    q.split(b.seq).unwrap();
    q.append(&[feedback(6)], 0).unwrap();
    let mut q = open(dir.path());
    let mut got = vec![];
    let mut seqs = vec![];
    while let Some(b) = batch(&mut q, 3) {
        got.extend(events(&b));
        seqs.push(b.seq);
        q.acked(b.seq).unwrap();
        q = open(dir.path());
    }
    assert_eq!(got, (0..7).map(feedback).collect::<Vec<_>>());
    assert_eq!(seqs, [2, 3, 4]);
}

#[test]
fn a_report_is_queued_once_whatever_crashes_between() {
    let dir = tempfile::tempdir().unwrap();
    let mut q = open(dir.path());
    q.append(&[crash()], 1).unwrap();
    q.append(&[crash()], 1).unwrap();
    assert_eq!(q.len(), 1);
    let b = batch(&mut q, 100).unwrap();
    q.acked(b.seq).unwrap();
    let mut q = open(dir.path());
    q.append(&[crash(), feedback(1)], 1).unwrap();
    assert_eq!((q.len(), q.last_report()), (1, 2), "report 1 was sent long ago, report 2 is new");
}

#[test]
fn a_lost_log_never_repeats_a_sequence_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut q = open(dir.path());
    for n in 0..5 {
        q.append(&[feedback(n)], 0).unwrap();
        let b = batch(&mut q, 100).unwrap();
        q.acked(b.seq).unwrap();
    }
    std::fs::remove_file(dir.path().join("queue.log")).unwrap();
    let mut q = open(dir.path());
    q.append(&[feedback(9)], 0).unwrap();
    assert!(batch(&mut q, 100).unwrap().seq > 5);
    // Both damaged: a jump.
    std::fs::write(dir.path().join("queue.log"), b"rubbish, not a log").unwrap();
    std::fs::write(dir.path().join("queue.seq"), b"rubbish").unwrap();
    let mut q = open(dir.path());
    q.append(&[feedback(9)], 0).unwrap();
    assert!(batch(&mut q, 100).unwrap().seq > SEQ_JUMP);
}

/// One step of a random history.
#[derive(Debug, Clone)]
enum Op {
    Append,
    Form,
    Ack,
    Refuse,
    Split,
    Restart,
    /// Tears the last record (the shortest has 17 bytes), then restarts.
    Torn(u16),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Append),
        3 => Just(Op::Form),
        3 => Just(Op::Ack),
        1 => Just(Op::Refuse),
        1 => Just(Op::Split),
        1 => Just(Op::Restart),
        1 => (1u16..17).prop_map(Op::Torn),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens: one sequence number is one body, and without torn logs every event is sent or counted.
    #[test]
    fn seq_is_unique_and_events_are_accounted_for(ops in proptest::collection::vec(op(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut q = open(dir.path());
        let mut bodies: BTreeMap<u64, Bytes> = BTreeMap::new();
        let (mut appended, mut acked, mut lost_reported) = (0u64, 0u64, 0u64);
        let mut torn = false;
        for op in ops {
            match op {
                Op::Append => {
                    appended += 1;
                    q.append(&[feedback(appended as u32)], 0).unwrap();
                }
                Op::Form => {
                    if let Some(b) = batch(&mut q, 4) {
                        let known = bodies.entry(b.seq).or_insert_with(|| b.body.clone());
                        prop_assert_eq!(&*known, &b.body);
                    }
                }
                Op::Ack => {
                    if let Some(b) = q.in_flight.clone() {
                        for e in events(&b) {
                            match e {
                                EventV1::Device(d) => lost_reported += split_loss(d.reason).1,
                                _ => acked += 1,
                            }
                        }
                        q.acked(b.seq).unwrap();
                    }
                }
                Op::Refuse => if let Some(b) = q.in_flight.clone() { q.refused(b.seq, "http_400").unwrap() },
                Op::Split => if let Some(b) = q.in_flight.clone() { q.split(b.seq).unwrap() },
                Op::Restart => q = open(dir.path()),
                Op::Torn(bytes) => {
                    torn = true;
                    let log = std::fs::read(&q.path).unwrap();
                    std::fs::write(&q.path, &log[..log.len().saturating_sub(bytes as usize)]).unwrap();
                    q = open(dir.path());
                }
            }
        }
        if !torn {
            let waiting: u64 = q.in_flight.iter().flat_map(events).map(|e| match e {
                EventV1::Device(d) => split_loss(d.reason).1,
                _ => 1,
            }).sum::<u64>() + q.pending.len() as u64;
            let counted: u64 = q.counters.dropped.values().sum();
            prop_assert_eq!(appended, acked + lost_reported + waiting + counted);
        }
    }
}

#[test]
fn numbers_at_the_end_of_their_range_never_overflow_and_every_start_finds_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("queue.log");
    let base = |n: u64| {
        let json = serde_json::json!({ "next_seq": n, "next_event": n, "last_report": n, "dropped": {} });
        Record::Base(json.to_string().into_bytes()).encode()
    };
    let event = |no| Record::Event { no, report: no, interaction: false, json: br#"{"a":1}"#.to_vec() }.encode();
    let in_flight = Record::Batch { seq: u64::MAX, events: vec![], body: br#"{"events":[{"b":1},{"c":1}]}"#.to_vec() };
    let split = Record::Split { seq: u64::MAX }.encode();
    for log in [
        [base(u64::MAX), event(1)].concat(),
        [base(1), event(i64::MAX as u64), event(u64::MAX)].concat(),
        [base(u64::MAX - 1), in_flight.encode(), split, event(7)].concat(),
    ] {
        std::fs::write(&path, &log[..]).unwrap();
        std::fs::write(dir.path().join("queue.seq"), encode_seq(u64::MAX)).unwrap();
        let mut q = open(dir.path());
        q.append(&[feedback(1)], u64::MAX).unwrap();
        q.append(&[feedback(2)], 0).unwrap();
        q.compact().unwrap();
        let len = q.len();
        let mut q = open(dir.path());
        assert_eq!(q.len(), len);
        let seq = batch(&mut q, 1).unwrap().seq;
        q.split(seq).unwrap();
        assert_eq!(open(dir.path()).len(), q.len());
    }
}

#[test]
fn counted_losses_stop_at_the_largest_number() {
    let dir = tempfile::tempdir().unwrap();
    let base = r#"{"next_seq":1,"next_event":1,"last_report":0,"dropped":{"queue_full":18446744073709551615}}"#;
    std::fs::write(dir.path().join("queue.log"), Record::Base(base.into()).encode()).unwrap();
    let limits = QueueLimits { max_events: 1, ..QueueLimits::default() };
    let mut q = Queue::open(dir.path(), Durability::Relaxed, limits).unwrap();
    q.append(&[feedback(1), feedback(2)], 0).unwrap();
    assert_eq!(q.counters.dropped["queue_full"], u64::MAX);
}
