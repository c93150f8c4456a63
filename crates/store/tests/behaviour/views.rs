//! Saved views.

use crate::{World, id, noon, on_both};
use flywheel_store::Error;
use flywheel_store::views::NewView;

on_both!(views_belong_to_one_app_and_are_replaced_by_name);

fn view(name: &str, query: &str, by: &str) -> NewView {
    NewView { name: name.into(), query: query.into(), description: "naïve".into(), created_by: by.into() }
}

async fn views_belong_to_one_app_and_are_replaced_by_name(w: &World) {
    let mut tx = w.begin().await;
    tx.view_put(&w.app, &view("slow", "SELECT 1", "ann")).await.unwrap();
    tx.view_put(&w.app, &view("cold", "SELECT 2", "ann")).await.unwrap();
    assert_eq!(tx.view_count(&w.app).await.unwrap(), 2);
    tx.commit().await.unwrap();
    let later = noon() + chrono::TimeDelta::hours(1);
    let mut tx = w.store().begin(later).await.unwrap();
    tx.view_put(&w.app, &view("slow", "SELECT 'it''s'", "bob")).await.unwrap();
    assert_eq!(tx.view_count(&w.app).await.unwrap(), 2);
    let seen = tx.view_get(&w.app, "slow").await.unwrap().unwrap();
    tx.commit().await.unwrap();
    let listed = w.store().view_list(&w.app).await.unwrap();
    assert_eq!(listed.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["cold", "slow"]);
    assert_eq!(listed[1], seen);
    assert_eq!((seen.query.as_str(), seen.created_by.as_str()), ("SELECT 'it''s'", "bob"));
    assert_eq!((seen.created_at, seen.updated_at), (noon(), later));
    assert!(w.store().view_list(&id("other")).await.unwrap().is_empty());
    let mut tx = w.begin().await;
    assert!(matches!(tx.view_delete(&id("other"), "slow").await, Err(Error::NotFound { .. })));
    tx.view_delete(&w.app, "slow").await.unwrap();
    assert!(matches!(tx.view_delete(&w.app, "slow").await, Err(Error::NotFound { .. })));
    assert_eq!(tx.view_get(&w.app, "slow").await.unwrap(), None);
    tx.commit().await.unwrap();
    assert_eq!(w.store().view_list(&w.app).await.unwrap().len(), 1);
}
