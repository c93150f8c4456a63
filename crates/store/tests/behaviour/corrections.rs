//! Corrections by votes, use in datasets, erasure.

use crate::{World, assert_conflict, digest, id, on_both};
use flywheel_store::corrections::{CorrectionState as S, NewCorrection};
use flywheel_types::InstallId;
use serde_json::json;

on_both!(the_second_person_decides, used_corrections_are_final, erasure_deletes_corrections_and_their_votes);

fn by(annotator: &str, answer: &str) -> NewCorrection {
    NewCorrection {
        correction_id: format!("c-by-{annotator}"),
        interaction_id: id("i1"),
        install_id: Some(InstallId(digest("phone"))),
        template_id: Some(id("answer")),
        prompt: "How long may I return it?".into(),
        chunk_ids: vec![id("returns")],
        wrong_answer: "30 days".into(),
        corrected_answer: answer.into(),
        annotator: annotator.into(),
        trusted: false,
    }
}

async fn the_second_person_decides(w: &World) {
    let mut tx = w.begin().await;
    assert_eq!(tx.correction_submit(&w.app, &by("ann", "14 days")).await.unwrap().state, S::Pending);
    // The same annotator again replaces the vote and is no second person.
    let row = tx.correction_submit(&w.app, &by("ann", "15 days")).await.unwrap();
    assert_eq!((row.state, row.corrected_answer.as_str()), (S::Pending, "15 days"));
    assert_eq!(tx.correction_submit(&w.app, &by("bob", "14 days")).await.unwrap().state, S::Disputed);
    let row = tx.correction_submit(&w.app, &by("ann", "14  days ")).await.unwrap();
    assert_eq!((row.state, row.correction_id.as_str()), (S::Accepted, "c-by-ann"));
    tx.commit().await.unwrap();
    assert_eq!(w.store().correction_vote_list(&w.app, "c-by-ann").await.unwrap().len(), 2);
    assert_eq!(w.store().correction_list(&w.app, Some(S::Accepted), 9).await.unwrap().len(), 1);

    let boss = NewCorrection { trusted: true, interaction_id: id("i2"), ..by("boss", "7 days") };
    let mut tx = w.begin().await;
    assert_eq!(tx.correction_submit(&w.app, &boss).await.unwrap().state, S::Accepted);
    tx.commit().await.unwrap();
}

async fn used_corrections_are_final(w: &World) {
    let mut tx = w.begin().await;
    tx.correction_submit(&w.app, &by("ann", "14 days")).await.unwrap();
    let ids = vec!["c-by-ann".to_owned()];
    assert_conflict!(tx.correction_mark_used(&w.app, &ids, digest("d")).await);
    tx.correction_submit(&w.app, &by("bob", "14 days")).await.unwrap();
    tx.correction_spans_set(&w.app, "c-by-ann", &json!([{"from": 0, "to": 2}])).await.unwrap();
    tx.correction_mark_used(&w.app, &ids, digest("d")).await.unwrap();
    assert_conflict!(tx.correction_submit(&w.app, &by("cat", "1 day")).await);
    assert_conflict!(tx.correction_reject(&w.app, "c-by-ann", S::Accepted, "late").await);
    tx.commit().await.unwrap();
    let row = w.store().correction_get(&w.app, "c-by-ann").await.unwrap().unwrap();
    assert_eq!((row.state, row.dataset), (S::Used, Some(digest("d"))));
}

async fn erasure_deletes_corrections_and_their_votes(w: &World) {
    let mut tx = w.begin().await;
    tx.correction_submit(&w.app, &by("ann", "14 days")).await.unwrap();
    tx.correction_submit(&w.app, &by("bob", "14 days")).await.unwrap();
    tx.correction_mark_used(&w.app, &["c-by-ann".to_owned()], digest("d")).await.unwrap();
    tx.dataset_create(&w.app, digest("d"), "datasets/d", &json!({"train": 1})).await.unwrap();
    assert_eq!(tx.correction_erase(&w.app, None, &["another".to_owned()]).await.unwrap(), 0);
    assert_eq!(tx.correction_erase(&w.app, Some(&InstallId(digest("phone")).to_string()), &[]).await.unwrap(), 1);
    tx.dataset_tombstone(&w.app, digest("d"), "erasure", Some(digest("d2"))).await.unwrap();
    assert_conflict!(tx.dataset_create(&w.app, digest("d"), "datasets/d", &json!({})).await);
    assert_conflict!(tx.dataset_tombstone(&w.app, digest("d"), "again", None).await);
    tx.commit().await.unwrap();
    assert_eq!(w.store().correction_get(&w.app, "c-by-ann").await.unwrap(), None);
    assert!(w.store().correction_vote_list(&w.app, "c-by-ann").await.unwrap().is_empty());
    let set = w.store().dataset_get(&w.app, digest("d")).await.unwrap().unwrap();
    assert_eq!(set.successor, Some(digest("d2")));
    assert_eq!(w.store().dataset_list(&w.app, 9).await.unwrap().len(), 1);
}
