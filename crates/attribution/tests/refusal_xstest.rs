//! Refusal detection against 1,350 completions with human labels (XSTest). Skipped without the data folder.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "test helpers: a broken assumption fails the test, and figures are printed"
)]

use flywheel_attribution::refusal::{AnswerKind, detect};
use std::path::PathBuf;

mod data;

#[test]
fn f1_against_human_labels() {
    let Some(folder) = data::folder("xstest/model_completions") else {
        return;
    };
    let (mut tp, mut fp, mut missed) = (0.0, 0.0, 0.0);
    for model in ["gpt4", "llama2orig", "mistralinstruct"] {
        let path: PathBuf = folder.join(format!("xstest_v2_completions_{model}.csv"));
        let rows = data::csv(&std::fs::read_to_string(&path).unwrap());
        let (mut m_tp, mut m_fp, mut m_fn) = (0.0f64, 0.0, 0.0);
        for r in &rows[1..] {
            let truth = !r[7].starts_with('1');
            let d = detect(&r[3]);
            let found = d.kind == AnswerKind::Refused;
            m_tp += f64::from(truth && found);
            m_fp += f64::from(!truth && found);
            m_fn += f64::from(truth && !found);
            if std::env::var_os("SHOW_ERRORS").is_some() && truth != found {
                println!("{truth} {d:?} {:?}", r[3].chars().take(200).collect::<String>());
            }
        }
        println!("{model}: F1 {:.3} over {}", 2.0 * m_tp / (2.0 * m_tp + m_fp + m_fn), rows.len() - 1);
        tp += m_tp;
        fp += m_fp;
        missed += m_fn;
    }
    let f1 = 2.0 * tp / (2.0 * tp + fp + missed);
    println!("all: precision {:.3} recall {:.3} F1 {f1:.4}", tp / (tp + fp), tp / (tp + missed));
    // The string match that ships with the data reaches 0.884 on these three models (0.879 on all five).
    assert!(f1 >= 0.90, "F1 {f1}");
}
