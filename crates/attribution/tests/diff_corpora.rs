//! Span diff against public error annotation: word and gap tags of machine-translation post-edits, and Chinese
//! grammar corrections. Skipped without the data folder.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "test helpers: a broken assumption fails the test, and figures are printed"
)]

use flywheel_attribution::diff::{Op, align, diff};

mod data;

/// F1 of the BAD class for words and for gaps.
fn tags(pair: &str) -> Option<(f64, f64)> {
    let folder = data::folder(&format!("mlqe_pe/{pair}"))?;
    let read = |f: &str| std::fs::read_to_string(folder.join(f)).unwrap();
    let (mt, pe, gold) = (read("dev.mt"), read("dev.pe"), read("dev.tags"));
    let mut counts = [[0.0f64; 3]; 2]; // word, gap × tp, fp, fn
    for ((m, p), g) in mt.lines().zip(pe.lines()).zip(gold.lines()) {
        let a: Vec<&str> = m.split_whitespace().collect();
        let b: Vec<&str> = p.split_whitespace().collect();
        let gold: Vec<bool> = g.split_whitespace().map(|t| t == "BAD").collect();
        assert_eq!(gold.len(), 2 * a.len() + 1);
        let mut got = vec![false; gold.len()];
        for op in align(&a, &b) {
            match op {
                Op::Keep { .. } => {}
                Op::Substitute { a, .. } | Op::Delete { a } => got[2 * a + 1] = true,
                Op::Insert { before_a, .. } => got[2 * before_a] = true,
            }
        }
        for (i, (x, y)) in got.iter().zip(&gold).enumerate() {
            let c = &mut counts[usize::from(i % 2 == 0)];
            c[0] += f64::from(*x && *y);
            c[1] += f64::from(*x && !*y);
            c[2] += f64::from(!*x && *y);
        }
    }
    let f1 = |c: [f64; 3]| 2.0 * c[0] / (2.0 * c[0] + c[1] + c[2]);
    println!("{pair}: word F1 {:.4}, gap F1 {:.4}", f1(counts[0]), f1(counts[1]));
    Some((f1(counts[0]), f1(counts[1])))
}

#[test]
fn word_and_gap_tags_of_post_edits() {
    if let Some((word, gap)) = tags("en-zh") {
        assert!(word >= 0.999 && gap >= 0.999, "{word} {gap}");
    }
    if let Some((word, gap)) = tags("en-de") {
        assert!(word >= 0.995 && gap >= 0.985, "{word} {gap}");
    }
}

#[test]
fn chinese_corrections_round_trip_through_their_spans() {
    let Some(folder) = data::folder("mucgec") else {
        return;
    };
    let text = std::fs::read_to_string(folder.join("MuCGEC_dev.txt")).unwrap();
    let (mut pairs, mut edits) = (0, 0);
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        for correction in &fields[2..] {
            let d = diff(fields[1], correction).unwrap();
            let mut rebuilt = String::new();
            let mut at = 0;
            for e in &d.edits {
                rebuilt += &fields[1][at..e.original.start.utf8 as usize];
                rebuilt += &e.corrected.text;
                at = e.original.end.utf8 as usize;
            }
            rebuilt += &fields[1][at..];
            let bare = |s: &str| s.split_whitespace().collect::<String>();
            assert_eq!(bare(&rebuilt), bare(correction), "{line}");
            pairs += 1;
            edits += d.edits.len();
        }
    }
    println!("{pairs} corrections, {edits} edits, every one rebuilt from its spans");
    assert!(pairs > 1_000);
}
