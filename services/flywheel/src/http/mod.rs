//! The HTTP surface: devices, admin API, signer, published files, dashboard. Handlers extract, call and convert.

pub mod audit;
pub mod auth;
pub mod candidates;
pub mod chunks;
pub mod clock;
pub mod corrections;
pub mod datasets;
pub mod erasures;
pub mod error;
pub mod eval_sets;
pub mod findings;
pub mod health;
pub mod imports;
pub mod ingest;
pub mod interactions;
pub mod jobs;
pub mod listen;
pub mod quota;
pub mod releases;
pub mod rollouts;
pub mod schedules;
pub mod senders;
pub mod settings;
pub mod signer;
pub mod sql;
pub mod tail;
pub mod tuf;
pub mod views;

use crate::server::Server;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post, put};
use std::sync::Arc;
use tower_http::catch_panic::CatchPanicLayer;

/// Largest JSON body of the admin API, bytes.
const ADMIN_BODY: usize = 8 << 20;

/// All routes.
pub fn router(server: Arc<Server>) -> Router {
    let intake = Router::new()
        .route("/v1/events", post(ingest::events))
        .route("/v1/feedback", post(ingest::feedback))
        .route("/v1/traces", post(ingest::traces))
        .route("/v1/logs", post(ingest::logs))
        .route("/v1/metrics", post(ingest::metrics))
        .layer(DefaultBodyLimit::max(server.config.ingest.max_body_bytes));
    let upload = Router::new().route("/v1/models", post(candidates::upload)).layer(DefaultBodyLimit::disable());
    Router::new()
        .merge(admin())
        .merge(operations())
        .layer(DefaultBodyLimit::max(ADMIN_BODY))
        .merge(intake)
        .merge(upload)
        .merge(crate::dashboard::router())
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(CatchPanicLayer::custom(error::panicked))
        .with_state(server)
}

fn admin() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/index/changes", get(chunks::changes))
        .route("/v1/chunks", get(chunks::list).put(chunks::put))
        .route("/v1/chunks/state", post(chunks::set_state))
        .route("/v1/chunks/versions/{*chunk}", get(chunks::versions))
        .route("/v1/findings", get(findings::list))
        .route("/v1/findings/{id}/dismiss", post(findings::dismiss))
        .route("/v1/interactions/rejected", get(interactions::rejected))
        .route("/v1/corrections", get(corrections::list).post(corrections::submit))
        .route("/v1/datasets", get(datasets::list))
        .route("/v1/eval-sets/{name}", get(eval_sets::get).put(eval_sets::put))
        .route("/v1/candidates", get(candidates::list).post(candidates::register))
        .route("/v1/candidates/{id}", get(candidates::get))
        .route("/v1/candidates/{id}/override", post(candidates::override_gate))
        .route("/v1/releases", get(releases::list))
        .route("/v1/rollouts", get(rollouts::list).post(rollouts::start))
        .route("/v1/rollouts/{id}", get(rollouts::get))
        .route("/v1/rollouts/{id}/{verb}", post(rollouts::ask))
}

fn operations() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/settings", get(settings::get).put(settings::put))
        .route("/v1/jobs", get(jobs::list))
        .route("/v1/jobs/{id}", get(jobs::get))
        .route("/v1/jobs/{id}/cancel", post(jobs::cancel))
        .route("/v1/jobs/{id}/retry", post(jobs::retry))
        .route("/v1/imports", post(imports::start))
        .route("/v1/schedules", get(schedules::list).put(schedules::put))
        .route("/v1/schedules/next", get(schedules::next))
        .route("/v1/schedules/{name}/run", post(schedules::run))
        .route("/v1/schedules/{name}/pause", post(schedules::pause))
        .route("/v1/schedules/{name}/resume", post(schedules::resume))
        .route("/v1/audit", get(audit::list))
        .route("/v1/audit/verify", get(audit::verify))
        .route("/v1/erasures", get(erasures::list).post(erasures::request))
        .route("/v1/erasures/{id}", get(erasures::get))
        .route("/v1/holds", get(erasures::holds))
        .route("/v1/holds/{name}", put(erasures::put_hold).delete(erasures::lift_hold))
        .route("/v1/sql", post(sql::query))
        .route("/v1/tail", get(tail::watch))
        .route("/v1/views", get(views::list))
        .route("/v1/views/{name}", put(views::put).delete(views::delete))
        .route("/v1/clock", post(clock::advance).get(clock::now))
        .route("/v1/signer/work", get(signer::work))
        .route("/v1/signer/decisions", post(signer::decide))
        .route("/tuf/{app}/{*path}", get(tuf::file))
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(health::metrics))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// `METHOD path` of every route above.
    fn routes() -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for piece in include_str!("mod.rs").split(".route(\"").skip(1) {
            let (path, rest) = piece.split_once('"').unwrap();
            let handlers = rest.split("))").next().unwrap();
            for (call, method) in [("get(", "GET"), ("post(", "POST"), ("put(", "PUT"), ("delete(", "DELETE")] {
                if handlers.contains(&format!(" {call}")) || handlers.contains(&format!(".{call}")) {
                    found.insert(format!("{method} {path}"));
                }
            }
        }
        found
    }

    #[test]
    fn the_reference_has_every_route_and_no_other() {
        let text = include_str!("../../../../docs/api.md");
        let documented: BTreeSet<String> =
            text.lines().filter_map(|l| l.strip_prefix("### ")).map(String::from).collect();
        let routes = routes();
        assert!(routes.len() >= 50, "{routes:?}");
        assert_eq!(routes.difference(&documented).collect::<Vec<_>>(), Vec::<&String>::new(), "not in docs/api.md");
        assert_eq!(documented.difference(&routes).collect::<Vec<_>>(), Vec::<&String>::new(), "docs/api.md has more");
    }
}
