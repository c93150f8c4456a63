//! What all pages share: who looks, errors as HTML, and the headers that bind a browser.

use crate::http::auth::{COOKIE, Principal, cookie, principal};
use crate::server::Server;
use askama::Template;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use flywheel_types::{Error, ErrorKind, Role};
use std::sync::Arc;

/// Cookie with the app that a person with a token for all apps looks at.
pub const APP_COOKIE: &str = "flywheel_app";

/// Scripts, styles and forms from this server only; no frames, no plugins, no other base.
const POLICY: &str = "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; object-src 'none'; \
    base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

/// Puts the security headers on every answer of the dashboard.
pub async fn secure(mut response: Response) -> Response {
    let fixed: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ];
    for (name, value) in fixed {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    // numbers of the fleet stay out of shared caches
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// A person who may look at the dashboard of one app.
#[derive(Debug, Clone)]
pub struct Visitor(pub Principal);

/// Headers with the app of the cookie as the app that the request names.
pub fn with_app(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    let app = cookie(&headers, APP_COOKIE).and_then(|a| HeaderValue::from_str(&a).ok());
    if let Some(app) = app
        && !headers.contains_key("x-fleet-app")
    {
        headers.insert("x-fleet-app", app);
    }
    headers
}

impl FromRequestParts<Arc<Server>> for Visitor {
    type Rejection = Response;

    /// Without a valid token the browser is sent to the login page.
    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, Response> {
        let found = principal(server, &with_app(&parts.headers)).await;
        let known = found.and_then(|who| who.require(Role::Viewer).map(|()| Self(who)));
        known.map_err(|e| match e.kind {
            ErrorKind::Unauthenticated => Redirect::to("/login").into_response(),
            // a cookie that names an app which is gone or missing: choose again
            ErrorKind::NotFound | ErrorKind::Invalid if cookie(&parts.headers, COOKIE).is_some() => {
                Redirect::to("/login").into_response()
            }
            _ => PageError(e).into_response(),
        })
    }
}

/// The error of every page.
#[derive(Debug)]
pub struct PageError(pub Error);

/// Result of every page.
pub type PageResult = Result<Response, PageError>;

impl<E: Into<Error>> From<E> for PageError {
    fn from(e: E) -> Self {
        Self(e.into())
    }
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage<'a> {
    status: u16,
    message: &'a str,
    hint: &'a str,
    code: &'a str,
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let e = self.0;
        if let Some(inside) = &e.inside {
            tracing::error!(code = e.code, inside, "page failed");
        }
        let status = StatusCode::from_u16(e.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let page = ErrorPage { status: status.as_u16(), message: &e.message, hint: &e.hint, code: e.code };
        match page.render() {
            Ok(html) => (status, Html(html)).into_response(),
            Err(e) => {
                tracing::error!(inside = %e, "the error page cannot be made");
                (status, "the page cannot be shown").into_response()
            }
        }
    }
}

/// Fills a template.
///
/// # Errors
/// `Internal` when it cannot be filled.
pub fn html(template: &impl Template) -> PageResult {
    Ok(Html(template.render().map_err(Error::internal)?).into_response())
}
