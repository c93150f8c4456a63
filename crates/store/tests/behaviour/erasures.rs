//! Erasures, holds, and the salt of user keys.

use crate::{World, assert_conflict, digest, on_both};
use flywheel_store::erasures::{ErasureState as S, HoldRow, NewErasure, SubjectKind};
use serde_json::json;

on_both!(an_erasure_forgets_its_subject_when_it_is_done, a_held_erasure_is_requested_again, a_salt_is_made_once);

fn request(id: &str) -> NewErasure {
    NewErasure {
        erasure_id: id.into(),
        subject_kind: SubjectKind::UserKey,
        subject: "abc123".into(),
        reason: "she asked".into(),
        requested_by: "privacy".into(),
    }
}

async fn an_erasure_forgets_its_subject_when_it_is_done(w: &World) {
    let mut tx = w.begin().await;
    tx.erasure_create(&w.app, &request("e-1")).await.unwrap();
    tx.erasure_progress(&w.app, "e-1", &json!({ "feedback": 3 })).await.unwrap();
    tx.commit().await.unwrap();
    let row = w.store().erasure_get(&w.app, "e-1").await.unwrap().unwrap();
    assert_eq!(
        (row.subject.as_deref(), row.state, row.progress["feedback"].as_i64()),
        (Some("abc123"), S::Requested, Some(3))
    );
    assert_eq!(row.subject_digest, digest("abc123"));
    assert!(!serde_json::to_string(&row).unwrap().contains("abc123"), "the subject is never shown");
    let mut tx = w.begin().await;
    tx.erasure_finish(&w.app, "e-1", S::Done, &json!({ "v": 1 })).await.unwrap();
    assert_conflict!(tx.erasure_finish(&w.app, "e-1", S::Done, &json!({})).await);
    assert_conflict!(tx.erasure_progress(&w.app, "e-1", &json!({})).await);
    assert_conflict!(tx.erasure_progress(&w.app, "e-2", &json!({})).await);
    tx.commit().await.unwrap();
    let row = w.store().erasure_list(&w.app, 9).await.unwrap().remove(0);
    assert_eq!((row.subject, row.state, row.receipt), (None, S::Done, Some(json!({ "v": 1 }))));
}

async fn a_held_erasure_is_requested_again(w: &World) {
    let hold = HoldRow {
        app_id: w.app.clone(),
        name: "case-7".into(),
        subject_kind: SubjectKind::Install,
        subject: "ff".into(),
        reason: "court".into(),
        created_by: "legal".into(),
        created_at: crate::noon(),
    };
    let mut tx = w.begin().await;
    tx.hold_put(&w.app, &HoldRow { subject: "ee".into(), ..hold.clone() }).await.unwrap();
    tx.hold_put(&w.app, &hold).await.unwrap();
    for id in ["e-1", "e-2"] {
        tx.erasure_create(&w.app, &request(id)).await.unwrap();
    }
    tx.erasure_finish(&w.app, "e-1", S::Held, &json!({ "v": 1 })).await.unwrap();
    tx.erasure_finish(&w.app, "e-2", S::Done, &json!({ "v": 1 })).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(w.store().hold_list(&w.app).await.unwrap(), std::slice::from_ref(&hold));
    let mut tx = w.begin().await;
    assert_eq!(tx.hold_lift(&w.app, "case-7").await.unwrap(), hold);
    assert!(tx.hold_lift(&w.app, "case-7").await.is_err());
    let again = tx.erasures_release(&w.app).await.unwrap();
    assert_eq!(again.iter().map(|e| e.erasure_id.as_str()).collect::<Vec<_>>(), ["e-1"]);
    tx.commit().await.unwrap();
    let row = w.store().erasure_get(&w.app, "e-1").await.unwrap().unwrap();
    assert_eq!((row.state, row.subject.as_deref()), (S::Requested, Some("abc123")));
    assert!(w.store().hold_list(&w.app).await.unwrap().is_empty());
}

async fn a_salt_is_made_once(w: &World) {
    let mut tx = w.begin().await;
    assert_eq!(tx.salt("user", "first").await.unwrap(), "first");
    assert_eq!(tx.salt("user", "second").await.unwrap(), "first");
    assert_eq!(tx.salt("other", "second").await.unwrap(), "second");
    tx.commit().await.unwrap();
}
