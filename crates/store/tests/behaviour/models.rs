//! Candidates, evaluations, releases.

use crate::{World, assert_conflict, digest, id, on_both};
use flywheel_store::Error;
use flywheel_store::candidates::{CandidateSource, NewCandidate};
use flywheel_store::evaluations::NewEvaluation;
use flywheel_store::releases::{NewRelease, ReleaseState};
use flywheel_types::{BundleKind, CandidateState as S, Verdict};
use serde_json::json;

on_both!(candidates_walk_legal_states, evaluations_never_change, releases_wait_for_the_signer);

fn candidate(bytes: &str) -> NewCandidate {
    NewCandidate {
        candidate_id: id("cand-1"),
        kind: BundleKind::Weights,
        base: Some(digest("base")),
        artefact: digest(bytes),
        object_path: "artefacts/x.gguf".into(),
        size_bytes: 1 << 40,
        dataset: Some(digest("d")),
        source: CandidateSource::Job,
        job: Some((id("job-1"), 2)),
        report: json!({"loss": 0.25}),
        created_by: "system".into(),
    }
}

async fn candidates_walk_legal_states(w: &World) {
    let mut tx = w.begin().await;
    assert!(tx.candidate_register(&w.app, &candidate("x")).await.unwrap());
    assert!(!tx.candidate_register(&w.app, &candidate("x")).await.unwrap());
    assert_conflict!(tx.candidate_register(&w.app, &candidate("y")).await);
    let c = id("cand-1");
    assert!(matches!(
        tx.candidate_state_set(&w.app, &c, S::Registered, S::Released, "jump").await,
        Err(Error::Invalid { .. })
    ));
    for (from, to) in [(S::Registered, S::Evaluating), (S::Evaluating, S::GateFailed), (S::GateFailed, S::Overridden)] {
        tx.candidate_state_set(&w.app, &c, from, to, "because").await.unwrap();
        assert_conflict!(tx.candidate_state_set(&w.app, &c, from, to, "again").await);
    }
    tx.commit().await.unwrap();
    let row = w.store().candidate_get(&w.app, &c).await.unwrap().unwrap();
    assert_eq!((row.state, row.size_bytes, row.job), (S::Overridden, 1 << 40, Some((id("job-1"), 2))));
    assert_eq!(row.report["loss"], 0.25);
    assert_eq!(w.store().candidate_list(&w.app, Some(S::Registered), 9).await.unwrap().len(), 0);
    assert_eq!(w.store().candidate_list(&w.app, None, 9).await.unwrap().len(), 1);
}

async fn evaluations_never_change(w: &World) {
    let new = |verdict| NewEvaluation {
        evaluation_id: "ev-1".into(),
        candidate_id: id("cand-1"),
        verdict,
        spec: json!({"v": 1}),
        report: json!({"ppl": 12.5}),
        source: CandidateSource::Job,
        job: None,
    };
    let mut tx = w.begin().await;
    tx.candidate_register(&w.app, &candidate("x")).await.unwrap();
    assert!(tx.evaluation_create(&w.app, &new(Verdict::Pass)).await.unwrap());
    assert!(!tx.evaluation_create(&w.app, &new(Verdict::Pass)).await.unwrap());
    assert_conflict!(tx.evaluation_create(&w.app, &new(Verdict::Fail)).await);
    tx.commit().await.unwrap();
    let rows = w.store().evaluation_list(&w.app, &id("cand-1")).await.unwrap();
    assert_eq!((rows.len(), rows[0].verdict), (1, Verdict::Pass));
    let mut tx = w.begin().await;
    let orphan = NewEvaluation { evaluation_id: "ev-2".into(), candidate_id: id("nobody"), ..new(Verdict::Pass) };
    assert!(matches!(tx.evaluation_create(&w.app, &orphan).await, Err(Error::Invalid { .. })));
}

async fn releases_wait_for_the_signer(w: &World) {
    let new = |n: u32| NewRelease {
        manifest_text: format!("{{\"v\":1,\"n\":{n}}}"),
        kind: BundleKind::Weights,
        candidate_id: None,
        security_epoch: 3,
    };
    let mut tx = w.begin().await;
    let one = tx.release_request(&w.app, &new(1)).await.unwrap();
    assert_eq!(tx.release_request(&w.app, &new(1)).await.unwrap(), one);
    let two = tx.release_request(&w.app, &new(2)).await.unwrap();
    assert_conflict!(tx.release_complete_set(&w.app, one).await);
    tx.release_decide(&w.app, one, true, "signer", "policy holds").await.unwrap();
    tx.release_decide(&w.app, two, false, "signer", "unknown base").await.unwrap();
    assert_conflict!(tx.release_decide(&w.app, two, true, "signer", "again").await);
    assert_conflict!(tx.release_request(&w.app, &new(2)).await);
    tx.release_complete_set(&w.app, one).await.unwrap();
    tx.commit().await.unwrap();
    let s = w.store();
    assert_eq!(s.release_last_complete(&w.app).await.unwrap().unwrap().manifest, one);
    assert_eq!(s.release_get(&w.app, two).await.unwrap().unwrap().state, ReleaseState::Refused);
    assert_eq!(s.release_list(&w.app, Some(ReleaseState::Approved)).await.unwrap().len(), 1);
    let mut tx = w.begin().await;
    tx.release_complete_clear(&w.app, one).await.unwrap();
    tx.commit().await.unwrap();
    assert!(s.release_last_complete(&w.app).await.unwrap().is_none());
}
