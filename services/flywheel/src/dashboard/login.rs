//! Login with an API token: the token goes into a cookie that scripts cannot read and other sites cannot send.

use super::page::{APP_COOKIE, PageResult, html};
use crate::http::auth::{COOKIE, principal};
use crate::server::Server;
use askama::Template;
use axum::Form;
use axum::extract::State;
use axum::extract::rejection::FormRejection;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use flywheel_types::{AppId, Error, ErrorKind, Role};
use serde::Deserialize;
use std::sync::Arc;

/// A login lasts a working day, seconds.
const LASTS_S: u32 = 12 * 3600;

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage<'a> {
    problem: Option<&'a str>,
    app: &'a str,
}

/// `GET /login`.
pub async fn form() -> PageResult {
    html(&LoginPage { problem: None, app: "" })
}

#[derive(Deserialize)]
pub struct Login {
    token: String,
    #[serde(default)]
    app: String,
}

/// `POST /login`: checks the token before it is kept.
pub async fn submit(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    form: Result<Form<Login>, FormRejection>,
) -> PageResult {
    if from_elsewhere(&headers) {
        return refused(StatusCode::FORBIDDEN, "The form came from another site. Log in here instead.", "");
    }
    let Ok(Form(login)) = form else {
        return refused(StatusCode::BAD_REQUEST, "The form was not complete. Fill in the token.", "");
    };
    let (token, app) = (login.token.trim(), login.app.trim());
    match check(&server, token, app).await {
        Ok(app) => {
            let secure = server.config.public_url().starts_with("https://");
            let mut response = Redirect::to("/").into_response();
            set(&mut response, COOKIE, token, LASTS_S, secure)?;
            set(&mut response, APP_COOKIE, app.as_str(), LASTS_S, secure)?;
            Ok(response)
        }
        Err(e) if e.kind == ErrorKind::Unauthenticated => {
            refused(StatusCode::UNAUTHORIZED, "This token is unknown, expired or revoked.", app)
        }
        Err(e) if e.code == "app_not_named" => {
            refused(StatusCode::BAD_REQUEST, "This token is for all apps: fill in which one to show.", app)
        }
        Err(e) if matches!(e.kind, ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Forbidden) => {
            let status = StatusCode::from_u16(e.kind.status()).unwrap_or(StatusCode::BAD_REQUEST);
            refused(status, &e.message, app)
        }
        Err(e) => Err(e.into()),
    }
}

/// `POST /logout`.
pub async fn leave(headers: HeaderMap) -> PageResult {
    let mut response = Redirect::to("/login").into_response();
    if !from_elsewhere(&headers) {
        set(&mut response, COOKIE, "", 0, false)?;
        set(&mut response, APP_COOKIE, "", 0, false)?;
    }
    Ok(response)
}

async fn check(server: &Server, token: &str, app: &str) -> Result<AppId, Error> {
    let unusable = |_| Error::new(ErrorKind::Unauthenticated, "no_valid_token", "the token is no token", "check it");
    let mut asked = HeaderMap::new();
    let bearer = HeaderValue::from_str(&format!("Bearer {token}")).map_err(unusable)?;
    asked.insert(header::AUTHORIZATION, bearer);
    if !app.is_empty() {
        let bad = |_| Error::invalid("bad_app", "this is not the name of an app", "check it");
        asked.insert("x-fleet-app", HeaderValue::from_str(app).map_err(bad)?);
    }
    let who = principal(server, &asked).await?;
    who.require(Role::Viewer)?;
    Ok(who.app)
}

fn refused(status: StatusCode, problem: &str, app: &str) -> PageResult {
    let mut response = html(&LoginPage { problem: Some(problem), app })?;
    *response.status_mut() = status;
    Ok(response)
}

/// Browsers say whether a form was sent by a page of this site.
fn from_elsewhere(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").and_then(|v| v.to_str().ok());
    matches!(site, Some("cross-site" | "same-site"))
}

/// `value` is a checked token or an id: neither holds a character that would need quoting.
fn set(response: &mut Response, name: &str, value: &str, lasts_s: u32, secure: bool) -> Result<(), Error> {
    let secure = if secure { "; Secure" } else { "" };
    let text = format!("{name}={value}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}");
    let value = HeaderValue::from_str(&text).map_err(Error::internal)?;
    response.headers_mut().append(header::SET_COOKIE, value);
    Ok(())
}
