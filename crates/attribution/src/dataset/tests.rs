//! Gates, agreement, order and splits of the dataset builder.

use super::*;

fn c(id: &str, person: &str, output: &str, corrected: Option<&str>) -> Correction {
    Correction {
        interaction_id: id.to_owned(),
        person: person.to_owned(),
        trusted: false,
        system: Some("Answer from the notes.".to_owned()),
        question: format!("What about {id}?"),
        output: output.to_owned(),
        corrected: corrected.map(str::to_owned),
        chunks: vec![format!("chunk-{id}")],
        group: format!("group-{id}"),
    }
}

fn policy() -> DatasetPolicyV1 {
    DatasetPolicyV1 { max_person_share: 1.0, ..DatasetPolicyV1::default() }
}

fn reason(submissions: &[Correction]) -> Option<DropReason> {
    let d = build(&policy(), submissions, &EvalGuard::default()).unwrap();
    d.dropped.into_iter().next().map(|d| d.reason)
}

const OUT: &str = "The kettle has a warranty of two years from purchase.";
const FIX: &str = "The kettle has a warranty of three years from purchase.";

fn pair(corrected: &str) -> [Correction; 2] {
    [c("i", "ann", OUT, Some(corrected)), c("i", "bob", OUT, Some(corrected))]
}

#[test]
fn every_gate_gives_its_reason() {
    assert_eq!(reason(&pair(FIX)), None);
    assert_eq!(reason(&pair(OUT)), Some(DropReason::SameAsOutput));
    assert_eq!(
        reason(&pair("The kettle  has a warranty of two years from purchase. ")),
        Some(DropReason::SameAsOutput)
    );
    assert_eq!(reason(&pair("")), Some(DropReason::Empty));
    assert_eq!(reason(&pair("The kettle has a warranty")), Some(DropReason::PrefixOfOutput));
    assert!(matches!(reason(&pair("Call us.")), Some(DropReason::EditRatio { .. })));
    let skip = [c("i", "ann", OUT, None), c("i", "bob", OUT, None)];
    assert_eq!(reason(&skip), Some(DropReason::Skipped));
}

#[test]
fn two_people_or_a_trusted_one_and_the_last_submission_counts() {
    let one = c("i", "ann", OUT, Some(FIX));
    assert_eq!(reason(std::slice::from_ref(&one)), Some(DropReason::NeedsSecondPerson));
    assert_eq!(reason(&[one.clone(), c("i", "ann", OUT, Some(FIX))]), Some(DropReason::NeedsSecondPerson));
    assert_eq!(
        reason(&[one.clone(), c("i", "bob", OUT, Some("The kettle has no warranty of years from purchase."))]),
        Some(DropReason::Disagreement)
    );
    assert_eq!(reason(&[Correction { trusted: true, ..one.clone() }]), None);
    let changed_mind = [c("i", "bob", OUT, Some("The kettle has no warranty.")), one, c("i", "bob", OUT, Some(FIX))];
    let d = build(&policy(), &changed_mind, &EvalGuard::default()).unwrap();
    assert_eq!(d.samples[0].people, ["ann", "bob"]);
    assert_eq!(d.samples[0].edits.len(), 1);
    assert_eq!(d.samples[0].edits[0].corrected.text, "three");
}

#[test]
fn evaluation_chunks_and_questions_never_train() {
    let mut guard = EvalGuard::default();
    guard.chunks.insert("chunk-i".to_owned());
    let d = build(&policy(), &pair(FIX), &guard).unwrap();
    assert!(matches!(d.dropped[0].reason, DropReason::EvalContamination { .. }));
    let guard = EvalGuard { chunks: BTreeSet::new(), questions: vec!["what  about I?".to_owned()] };
    assert!(build(&policy(), &pair(FIX), &guard).unwrap().samples.is_empty());
}

fn many(n: usize) -> Vec<Correction> {
    let words = ["apple", "banana", "cherry", "damson", "elder", "fig", "grape", "hazel", "iris", "juniper"];
    (0..n)
        .flat_map(|i| {
            let (a, b, d) = (words[i % 10], words[(i / 10) % 10], words[(i * 7 + 3) % 10]);
            ["ann", "bob"].map(|p| {
                let mut x = c(
                    &format!("i{i}"),
                    p,
                    &format!("{a} {d} wrong {b} number"),
                    Some(&format!("{a} {d} right {b} {i} code")),
                );
                x.question = format!("What is {b} of {a} near {d} in room {i}?");
                x.group = format!("g{}", i % 9);
                x
            })
        })
        .collect()
}

#[test]
fn order_of_input_does_not_change_the_bytes_and_the_digest_names_them() {
    let rows = many(40);
    let a = build(&policy(), &rows, &EvalGuard::default()).unwrap();
    let mut shuffled = rows;
    shuffled.reverse();
    let b = build(&policy(), &shuffled, &EvalGuard::default()).unwrap();
    assert_eq!((a.digest, &a.jsonl), (b.digest, &b.jsonl));
    assert_eq!(a.digest, Digest::of(&a.jsonl));
    assert_eq!(DatasetV1::read(&a.jsonl).unwrap(), a.samples);
    assert!(matches!(DatasetV1::read(b"{}\n"), Err(DatasetError::Line { line: 1, .. })));
    for s in &a.samples {
        assert_eq!(s.messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["system", "user", "assistant"]);
    }
    let dpo = a.dpo_jsonl().unwrap();
    let first: serde_json::Value = serde_json::from_slice(dpo.split(|b| *b == b'\n').next().unwrap()).unwrap();
    assert_ne!(first["chosen"], first["rejected"]);
}

#[test]
fn a_group_is_never_split_and_some_are_held_out() {
    let p = DatasetPolicyV1 { holdout_share: 0.4, ..policy() };
    let d = build(&p, &many(90), &EvalGuard::default()).unwrap();
    let mut of_group: BTreeMap<&str, BTreeSet<Split>> = BTreeMap::new();
    for s in &d.samples {
        of_group.entry(&s.group).or_default().insert(s.split);
    }
    assert!(of_group.values().all(|s| s.len() == 1));
    assert!(d.samples.iter().any(|s| s.split == Split::Holdout) && d.samples.iter().any(|s| s.split == Split::Train));
}

#[test]
fn near_duplicates_and_hoarders_are_cut() {
    let mut rows = many(30);
    let copies: Vec<Correction> =
        rows[..2].iter().map(|r| Correction { interaction_id: "copy".to_owned(), ..r.clone() }).collect();
    rows.extend(copies);
    let d = build(&policy(), &rows, &EvalGuard::default()).unwrap();
    assert_eq!(d.dropped.iter().filter(|d| matches!(d.reason, DropReason::NearDuplicate { .. })).count(), 1);
    let p = DatasetPolicyV1 { max_person_share: 0.2, ..policy() };
    let d = build(&p, &rows, &EvalGuard::default()).unwrap();
    let ann = d.samples.iter().filter(|s| s.people.contains(&"ann".to_owned())).count();
    assert_eq!(ann, 1, "everything is by the same two people, so only the guaranteed sample stays");
}
