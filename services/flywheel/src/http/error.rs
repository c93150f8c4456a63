//! Every 4xx and 5xx leaves as `{code, message, hint}`; the inside half of an error goes to the log only.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
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
        failed(&self.0, shown(self.0.code, &self.0.message, &self.0.hint).into_response())
    }
}

/// The outside half of an error.
fn shown(code: &str, message: &str, hint: &str) -> Json<ErrorBodyV1> {
    Json(ErrorBodyV1 { code: code.to_owned(), message: message.to_owned(), hint: hint.to_owned() })
}

/// Gives `response` the status and the headers of `e`, and writes its inside half to the log. For bodies of another
/// form than ours; handlers answer with [`ApiError`].
pub fn failed(e: &Error, mut response: Response) -> Response {
    if let Some(inside) = &e.inside {
        tracing::error!(code = e.code, inside, "request failed");
    }
    *response.status_mut() = StatusCode::from_u16(e.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if e.kind.retryable() {
        response.headers_mut().insert(header::RETRY_AFTER, retry_after());
    }
    response
}

/// An error with a status that belongs to HTTP only (405, 416) and that no [`ErrorKind`] has.
pub fn with_status(status: StatusCode, code: &str, message: &str, hint: &str) -> Response {
    (status, shown(code, message, hint)).into_response()
}

/// Seconds until a retry, spread over 2..=9 so that a fleet does not come back in one wave.
fn retry_after() -> HeaderValue {
    let mut byte = [0u8; 1];
    let spread = getrandom::fill(&mut byte).map_or(3, |()| 2 + u64::from(byte[0] % 8));
    HeaderValue::from(spread)
}

/// What axum said about a request that it could not read. `code` is for what the caller wrote; a body that is too
/// large and a foreign content type have codes of their own.
fn unreadable(status: StatusCode, text: String, code: &'static str, hint: &'static str) -> ApiError {
    ApiError(match status.as_u16() {
        413 => Error::new(
            ErrorKind::TooLarge,
            "body_too_large",
            "the body is larger than this path takes",
            "split it into several requests",
        ),
        415 => Error::new(ErrorKind::Unsupported, "unsupported_content_type", text, hint),
        500.. => Error::internal(text),
        _ => Error::invalid(code, text, hint),
    })
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

/// `axum::extract::Path` whose rejection is an [`ApiError`].
#[derive(Debug)]
pub struct PathParams<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let hint = "check the id in the path: 1 to 128 letters, digits and `. _ : / @ -`, percent-encoded UTF-8";
        match Path::from_request_parts(parts, state).await {
            Ok(Path(params)) => Ok(Self(params)),
            Err(r) => Err(unreadable(r.status(), r.body_text(), "bad_path", hint)),
        }
    }
}

/// The bytes of a body, up to the limit of its path; the rejection is an [`ApiError`].
#[derive(Debug)]
pub struct RawBody(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match Bytes::from_request(request, state).await {
            Ok(body) => Ok(Self(body)),
            Err(r) => Err(unreadable(r.status(), r.body_text(), "upload_cut_off", "send the whole body again")),
        }
    }
}

/// Fallback for unknown paths.
pub async fn not_found() -> ApiError {
    ApiError(Error::not_found("no_such_path", "there is nothing at this path"))
}

/// Fallback for a known path with another method; axum adds the `allow` header.
pub async fn method_not_allowed() -> Response {
    with_status(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        "this path does not take that method",
        "use a method that the `allow` header names",
    )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;
    use axum::body::to_bytes;
    use flywheel_types::Role;
    use serde_json::{Value, json};

    async fn read(response: Response) -> (u16, ErrorBodyV1) {
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 16).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }

    #[tokio::test]
    async fn a_panic_is_answered_without_its_text() {
        let (status, body) = read(panicked(Box::new("password=hunter2"))).await;
        assert_eq!((status, body.code.as_str()), (500, "internal"));
        assert!(!body.message.contains("hunter2") && !body.hint.is_empty(), "{body:?}");
    }

    #[tokio::test]
    async fn what_axum_refuses_keeps_its_status_class() {
        let of = |status: u16| unreadable(StatusCode::from_u16(status).unwrap(), "text".into(), "bad_json", "hint");
        for (status, expected, code) in [
            (413, 413, "body_too_large"),
            (415, 415, "unsupported_content_type"),
            (422, 400, "bad_json"),
            (400, 400, "bad_json"),
            (500, 500, "internal"),
        ] {
            let (got, body) = read(of(status).into_response()).await;
            assert_eq!((got, body.code.as_str()), (expected, code));
        }
    }

    #[tokio::test]
    async fn only_what_may_pass_carries_retry_after() {
        let unavailable = Error::new(ErrorKind::Unavailable, "busy", "it is busy", "wait");
        let seconds: u64 =
            ApiError(unavailable).into_response().headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
        assert!((2..=9).contains(&seconds), "{seconds}");
        let invalid = ApiError(Error::invalid("bad", "it is bad", "correct it")).into_response();
        assert!(!invalid.headers().contains_key(header::RETRY_AFTER));
    }

    #[tokio::test]
    async fn bad_ids_and_methods_are_explained() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Viewer).await);
        for path in ["/v1/jobs/a%20b", "/v1/rollouts/%ff", "/v1/chunks/versions/a%20b", "/v1/eval-sets/%ff"] {
            let answer = client.get(path).await;
            assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("bad_path")), "{path}: {}", answer.text);
        }
        let wrong = client.put("/v1/jobs", &Value::Null).await;
        assert_eq!((wrong.status, &wrong.json()["code"]), (405, &json!("method_not_allowed")));
        assert_eq!(wrong.headers["allow"], "GET,HEAD");
    }
}
