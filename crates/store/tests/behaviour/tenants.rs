//! Apps, tokens and ingest keys.

use crate::{World, assert_conflict, id, noon, on_both};
use chrono::TimeDelta;
use flywheel_store::apps::AppSettings;
use flywheel_store::secret::Secret;
use flywheel_store::tokens::NewToken;
use flywheel_types::{AppId, Automation, Role};
use rand::SeedableRng as _;

on_both!(settings_change_by_compare_and_swap, tokens_are_hashed_scoped_and_end, ingest_keys_belong_to_one_app);

async fn settings_change_by_compare_and_swap(w: &World) {
    let settings = AppSettings { automation: Automation::Act, ..AppSettings::default() };
    let mut tx = w.begin().await;
    assert!(!tx.app_create(&w.app, &settings).await.unwrap(), "an existing app keeps its settings");
    assert!(tx.app_create(&id("system"), &settings).await.is_err());
    assert_eq!(tx.app_settings_set(&w.app, 1, &settings).await.unwrap(), 2);
    assert_conflict!(tx.app_settings_set(&w.app, 1, &settings).await);
    tx.commit().await.unwrap();
    let row = w.store().app_get(&w.app).await.unwrap().unwrap();
    assert_eq!((row.version, row.settings), (2, settings));
}

async fn tokens_are_hashed_scoped_and_end(w: &World) {
    let mut rng = rand::rngs::StdRng::seed_from_u64(7);
    let (one, all) = (Secret::draw("fwt_", &mut rng), Secret::draw("fwt_", &mut rng));
    let new =
        |app_id: Option<AppId>, expires_at| NewToken { app_id, name: "ops".into(), role: Role::Operator, expires_at };
    let mut tx = w.begin().await;
    let end = noon() + TimeDelta::hours(1);
    let row = tx.token_create(&new(Some(w.app.clone()), Some(end)), &one).await.unwrap();
    tx.token_create(&new(None, None), &all).await.unwrap();
    tx.commit().await.unwrap();

    let found = w.store().token_find(&one).await.unwrap().unwrap();
    assert_eq!(found, row);
    assert!(found.allows(&w.app, noon()));
    assert!(!found.allows(&id("other"), noon()));
    assert!(!found.allows(&w.app, end));
    let any = w.store().token_find(&all).await.unwrap().unwrap();
    assert!(any.allows(&id("other"), end));
    assert!(w.store().token_find(&Secret::presented("fwt_guess")).await.unwrap().is_none());
    assert_eq!(w.store().token_list(Some(&w.app)).await.unwrap().len(), 1);

    let mut tx = w.begin().await;
    assert!(tx.token_revoke(Some(&id("other")), &row.token_id).await.is_err());
    assert!(tx.token_revoke(None, &row.token_id).await.is_ok());
    assert!(tx.token_revoke(None, &row.token_id).await.is_err(), "once");
    tx.commit().await.unwrap();
    assert!(!w.store().token_find(&one).await.unwrap().unwrap().allows(&w.app, noon()));
}

async fn ingest_keys_belong_to_one_app(w: &World) {
    let key = Secret::presented("fwk_demo");
    let mut tx = w.begin().await;
    let row = tx.ingest_key_create(&w.app, "android", &key, Some(600)).await.unwrap();
    assert_eq!(row.events_per_minute, Some(600));
    assert_eq!(tx.ingest_key_create(&w.app, "android", &key, Some(600)).await.unwrap(), row, "again is no error");
    tx.app_create(&id("other"), &AppSettings::default()).await.unwrap();
    assert_conflict!(tx.ingest_key_create(&id("other"), "x", &key, None).await);
    tx.commit().await.unwrap();
    assert_eq!(w.store().ingest_key_find(&key).await.unwrap().unwrap().app_id, w.app);
    let mut tx = w.begin().await;
    tx.ingest_key_revoke(&w.app, &row.key_id).await.unwrap();
    tx.commit().await.unwrap();
    assert!(w.store().ingest_key_find(&key).await.unwrap().is_none());
    assert_eq!(w.store().ingest_key_list(&w.app).await.unwrap().len(), 1);
}
