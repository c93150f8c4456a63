//! Migrations: twice, drift, and a database from the future.

use crate::{World, noon, on_both};
use flywheel_store::Store;

on_both!(migrations_apply_once_and_again, dropped_transactions_leave_nothing, a_broken_transaction_is_not_committed);

async fn migrations_apply_once_and_again(w: &World) {
    assert!(w.store().migration_list().await.unwrap().iter().all(|m| m.applied));
    w.store().migrate().await.unwrap();
    // Two processes at once: both end well.
    let other = Store::connect(&w.scratch.url).await.unwrap();
    let (a, b) = tokio::join!(w.store().migrate(), other.migrate());
    a.unwrap();
    b.unwrap();
    other.close().await;
    assert_eq!(w.store().app_list().await.unwrap().len(), 1);
}

async fn dropped_transactions_leave_nothing(w: &World) {
    let mut tx = w.begin().await;
    tx.app_create(&crate::id("ghost"), &Default::default()).await.unwrap();
    drop(tx);
    assert!(w.store().app_get(&crate::id("ghost")).await.unwrap().is_none());
    let mut tx = w.begin().await;
    assert!(tx.app_create(&crate::id("ghost"), &Default::default()).await.unwrap());
    tx.commit().await.unwrap();
    let row = w.store().app_get(&crate::id("ghost")).await.unwrap().unwrap();
    assert_eq!((row.created_at, row.version), (noon(), 1));
}

async fn a_broken_transaction_is_not_committed(w: &World) {
    let mut tx = w.begin().await;
    tx.app_create(&crate::id("half"), &Default::default()).await.unwrap();
    // A key for an app that does not exist violates a foreign key.
    let bad =
        tx.ingest_key_create(&crate::id("nobody"), "k", &flywheel_store::secret::Secret::presented("x"), None).await;
    assert!(matches!(bad, Err(flywheel_store::Error::Invalid { .. })), "{bad:?}");
    assert!(tx.commit().await.is_err());
    assert!(w.store().app_get(&crate::id("half")).await.unwrap().is_none());
}
