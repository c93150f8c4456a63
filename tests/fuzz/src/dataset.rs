//! Stored training sets and the corrections they are built from: both are texts of people outside.

use flywheel_attribution::dataset::{Correction, DatasetPolicyV1, DatasetV1, EvalGuard, build};
use flywheel_types::Digest;
use std::collections::BTreeSet;

/// The input as a stored set, and its lines as corrections.
pub fn run(data: &[u8]) {
    stored(data);
    let lines = data.split(|b| *b == b'\n');
    let corrections: Vec<Correction> = lines.filter_map(|l| serde_json::from_slice(l).ok()).take(20).collect();
    if !corrections.is_empty() {
        built(&corrections);
    }
}

fn stored(data: &[u8]) {
    let Ok(samples) = DatasetV1::read(data) else { return };
    assert_eq!(samples.len(), data.split(|b| *b == b'\n').filter(|l| !l.is_empty()).count(), "one sample per line");
    let mut jsonl = Vec::new();
    for sample in &samples {
        serde_json::to_writer(&mut jsonl, sample).expect("a sample can be written");
        jsonl.push(b'\n');
    }
    assert_eq!(DatasetV1::read(&jsonl).expect("what was written can be read"), samples);
    let set = DatasetV1 { digest: Digest::of(&jsonl), jsonl, samples, dropped: Vec::new() };
    set.dpo_jsonl().expect("pairs of any sample can be written");
}

fn built(corrections: &[Correction]) {
    let policy = DatasetPolicyV1 { people_needed: 1, max_person_share: 0.5, ..DatasetPolicyV1::default() };
    let guard = EvalGuard { chunks: BTreeSet::from(["held-out".to_owned()]), questions: vec!["How long?".to_owned()] };
    let set = build(&policy, corrections, &guard).expect("any corrections give a set");
    assert_eq!(set.digest, Digest::of(&set.jsonl));
    assert_eq!(DatasetV1::read(&set.jsonl).expect("a built set can be read"), set.samples);
    let interactions: BTreeSet<&str> = corrections.iter().map(|c| c.interaction_id.as_str()).collect();
    let mut ended: Vec<&str> = set.samples.iter().map(|s| s.interaction_id.as_str()).collect();
    ended.extend(set.dropped.iter().map(|d| d.interaction_id.as_str()));
    assert_eq!(ended.len(), interactions.len(), "every interaction is a sample or dropped with a reason, once");
    assert_eq!(ended.into_iter().collect::<BTreeSet<_>>(), interactions);
    for sample in &set.samples {
        assert_eq!(sample.messages.last().map(|m| m.role.as_str()), Some("assistant"));
        assert!(!sample.people.is_empty(), "somebody agreed on every sample");
    }
    assert_eq!(build(&policy, corrections, &guard).map(|s| s.digest), Ok(set.digest), "same input, same bytes");
}
