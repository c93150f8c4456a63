//! The published tree as static files: metadata small and cacheable, artefacts with ranges and strong validators, so
//! that any CDN in front of it works and a phone can resume.

use super::error::{ApiError, ApiResult, PathParams, with_status};
use crate::server::Server;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flywheel_types::{AppId, Error};
use std::io::SeekFrom;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio_util::io::ReaderStream;

/// Only the timestamp changes under its name.
const MUTABLE: &str = "metadata/timestamp.json";

/// `GET /tuf/{app}/{path}`.
pub async fn file(
    State(server): State<Arc<Server>>,
    PathParams((app, path)): PathParams<(String, String)>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let missing = || ApiError(Error::not_found("no_such_file", "nothing is published under this name"));
    let app = AppId::new(app).map_err(|_| missing())?;
    let found = server.delivery.tree(&app).locate(&path).ok_or_else(missing)?;
    let mut file = tokio::fs::File::open(&found).await.map_err(|_| missing())?;
    let meta = file.metadata().await.map_err(Error::internal)?;
    if !meta.is_file() {
        return Err(missing());
    }
    let length = meta.len();
    let etag = etag(&path, &meta);
    if headers.get(header::IF_NONE_MATCH).is_some_and(|v| v.as_bytes() == etag.as_bytes()) {
        return Ok(with_head(StatusCode::NOT_MODIFIED.into_response(), &path, &etag));
    }
    let if_range_holds = headers.get(header::IF_RANGE).is_none_or(|v| v.as_bytes() == etag.as_bytes());
    let range = headers.get(header::RANGE).and_then(|v| v.to_str().ok()).filter(|_| if_range_holds);
    match range.map(|r| parse_range(r, length)) {
        None => Ok(with_head(stream(file, length, StatusCode::OK, None), &path, &etag)),
        Some(Some((start, end))) => {
            file.seek(SeekFrom::Start(start)).await.map_err(Error::internal)?;
            let content_range = format!("bytes {start}-{end}/{length}");
            let response = stream(file, end - start + 1, StatusCode::PARTIAL_CONTENT, Some(content_range));
            Ok(with_head(response, &path, &etag))
        }
        Some(None) => Ok(out_of_range(length)),
    }
}

/// 416 with the length that the file has.
fn out_of_range(length: u64) -> Response {
    let mut response = with_status(
        StatusCode::RANGE_NOT_SATISFIABLE,
        "range_not_satisfiable",
        &format!("the range is not one part of the {length} bytes of this file"),
        "ask for one range `bytes=a-b` inside the file, or for all of it",
    );
    if let Ok(v) = HeaderValue::from_str(&format!("bytes */{length}")) {
        response.headers_mut().insert(header::CONTENT_RANGE, v);
    }
    response
}

fn stream(file: tokio::fs::File, length: u64, status: StatusCode, range: Option<String>) -> Response {
    let body = Body::from_stream(ReaderStream::with_capacity(file.take(length), 256 << 10));
    let mut response = (status, body).into_response();
    let head = response.headers_mut();
    head.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    if let Some(v) = range.and_then(|r| HeaderValue::from_str(&r).ok()) {
        head.insert(header::CONTENT_RANGE, v);
    }
    response
}

fn with_head(mut response: Response, path: &str, etag: &str) -> Response {
    let cache = if path == MUTABLE { "max-age=60" } else { "max-age=31536000, immutable" };
    let kind = if path.ends_with(".json") { "application/json" } else { "application/octet-stream" };
    let head = response.headers_mut();
    head.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Ok(v) = HeaderValue::from_str(etag) {
        head.insert(header::ETAG, v);
    }
    response
}

/// Strong validator: a name is written once, so the name does for all but the timestamp; that one is replaced by
/// rename, which makes a new inode.
fn etag(path: &str, meta: &std::fs::Metadata) -> String {
    use std::os::unix::fs::MetadataExt;
    if path == MUTABLE {
        format!("\"{:x}-{:x}-{:x}\"", meta.ino(), meta.mtime_nsec(), meta.len())
    } else {
        format!("\"{}\"", &flywheel_types::Digest::of(path.as_bytes()).to_hex()[..32])
    }
}

/// One `bytes=a-b`, `bytes=a-` or `bytes=-n`; `None` when it cannot be satisfied or is not one range.
fn parse_range(text: &str, length: u64) -> Option<(u64, u64)> {
    let (start, end) = text.strip_prefix("bytes=")?.split_once('-')?;
    if length == 0 {
        return None;
    }
    if start.is_empty() {
        let n: u64 = end.parse().ok()?;
        return (n > 0).then(|| (length.saturating_sub(n), length - 1));
    }
    let start: u64 = start.parse().ok()?;
    let end = if end.is_empty() { length - 1 } else { end.parse::<u64>().ok()?.min(length - 1) };
    (start <= end && start < length).then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn ranges() {
        assert_eq!(parse_range("bytes=0-9", 100), Some((0, 9)));
        assert_eq!(parse_range("bytes=90-", 100), Some((90, 99)));
        assert_eq!(parse_range("bytes=-5", 100), Some((95, 99)));
        assert_eq!(parse_range("bytes=95-500", 100), Some((95, 99)));
        for bad in ["bytes=100-", "bytes=5-2", "bytes=-0", "bytes=a-b", "chunks=0-1", "bytes=0-1,3-4"] {
            assert_eq!(parse_range(bad, 100), None, "{bad}");
        }
        assert_eq!(parse_range("bytes=0-", 0), None);
    }
}
