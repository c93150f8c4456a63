//! Every 4xx and 5xx leaves as `{code, message, hint}`; the inside half of an error goes to the log only.

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flywheel_types::wire::ErrorBodyV1;
use flywheel_types::{Error, ErrorKind};
use serde::de::DeserializeOwned;

/// The error type of every handler.
#[derive(Debug)]
pub struct ApiError(pub Error);

/// Result of every handler.
pub type ApiResult<T> = Result<T, ApiError>;

impl<E: Into<Error>> From<E> for ApiError {
    fn from(e: E) -> Self {
        Self(e.into())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let e = self.0;
        if let Some(inside) = &e.inside {
            tracing::error!(code = e.code, inside, "request failed");
        }
        let status = StatusCode::from_u16(e.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = ErrorBodyV1 { code: e.code.to_owned(), message: e.message, hint: e.hint };
        let mut response = (status, Json(body)).into_response();
        if e.kind.retryable() {
            response.headers_mut().insert(header::RETRY_AFTER, retry_after());
        }
        response
    }
}

/// Seconds until a retry, spread over 2..=9 so that a fleet does not come back in one wave.
fn retry_after() -> HeaderValue {
    let mut byte = [0u8; 1];
    let spread = getrandom::fill(&mut byte).map_or(3, |()| 2 + u64::from(byte[0] % 8));
    HeaderValue::from(spread)
}

/// What axum said about a request that it could not read.
fn unreadable(status: StatusCode, text: String, code: &'static str, hint: &'static str) -> ApiError {
    let kind = match status.as_u16() {
        413 => ErrorKind::TooLarge,
        404 => ErrorKind::NotFound,
        _ => ErrorKind::Invalid,
    };
    ApiError(Error::new(kind, code, text, hint))
}

/// `axum::Json` whose rejection is an [`ApiError`].
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let hint = "send the JSON body that docs/api.md shows, with content-type application/json";
        match Json::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(r) => Err(unreadable(r.status(), r.body_text(), "bad_json", hint)),
        }
    }
}

/// `axum::extract::Query` whose rejection is an [`ApiError`].
#[derive(Debug)]
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let hint = "check the names and values of the query parameters";
        match Query::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(r) => Err(unreadable(r.status(), r.body_text(), "bad_query", hint)),
        }
    }
}

/// Fallback for unknown paths.
pub async fn not_found() -> ApiError {
    ApiError(Error::not_found("no_such_path", "there is nothing at this path"))
}

/// Fallback for a known path with another method.
pub async fn method_not_allowed() -> Response {
    let body = ErrorBodyV1 {
        code: "method_not_allowed".into(),
        message: "this path does not take that method".into(),
        hint: "docs/api.md lists the methods of each path".into(),
    };
    (StatusCode::METHOD_NOT_ALLOWED, Json(body)).into_response()
}

/// A handler that panicked: the client gets the fixed sentence, the log gets the rest.
pub fn panicked(cause: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let text = cause
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_default();
    ApiError(Error::internal(format!("handler panicked: {text}"))).into_response()
}
