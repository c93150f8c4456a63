//! Pages for people, made on the server and complete without JavaScript: HTML files in `templates/`, numbers in tables,
//! intervals as SVG. One file per page loads what it shows and fills its template; nothing here changes the control
//! plane, so a page can be opened at any time by anybody with a token.

mod audit;
mod findings;
mod fleet;
mod format;
mod login;
mod overview;
mod page;
mod rollout;
pub mod svg;
#[cfg(test)]
mod tests;
mod traffic;
mod views;
mod words;

use crate::server::Server;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::header;
use axum::middleware::map_response;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use std::sync::Arc;

/// Largest form, bytes.
const FORM_BODY: usize = 16 << 10;

/// Every page, with its security headers.
pub fn router() -> Router<Arc<Server>> {
    Router::new()
        .route("/", get(overview::show))
        .route("/login", get(login::form).post(login::submit))
        .route("/logout", post(login::leave))
        .route("/rollouts/{id}", get(rollout::show))
        .route("/findings", get(findings::show))
        .route("/views", get(views::list))
        .route("/views/{name}", get(views::show))
        .route("/audit", get(audit::show))
        .route("/assets/style.css", get(style))
        .route("/assets/icon.svg", get(icon))
        .layer(DefaultBodyLimit::max(FORM_BODY))
        .layer(map_response(page::secure))
}

/// The style sheet, part of the program: no folder to deploy, no other host to ask.
async fn style() -> impl IntoResponse {
    asset("text/css; charset=utf-8", include_str!("../../assets/style.css"))
}

/// The icon of the tab, for which every browser asks.
async fn icon() -> impl IntoResponse {
    asset("image/svg+xml", include_str!("../../assets/icon.svg"))
}

fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "public, max-age=3600")], text)
}
