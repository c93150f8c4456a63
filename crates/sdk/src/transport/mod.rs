//! The network as the core sees it: send one request, receive the body in blocks. A host may supply its own
//! implementation (iOS background sessions need that); the defaults are [`ReqwestTransport`] and, for many devices
//! in one process, [`SharedGets`] around it.

mod memory;
mod reqwest_http;
mod shared;

pub use memory::{Fault, MemoryHttp};
pub use reqwest_http::ReqwestTransport;
pub use shared::SharedGets;

use bytes::Bytes;

/// Request method; the core needs no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

/// One request. Header names are lower case.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    pub method: Method,
    pub url: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Bytes,
}

impl HttpRequest {
    #[must_use]
    pub fn get(url: impl Into<String>) -> Self {
        Self { method: Method::Get, url: url.into(), headers: Vec::new(), body: Bytes::new() }
    }
    #[must_use]
    pub fn post(url: impl Into<String>, body: Bytes) -> Self {
        Self { method: Method::Post, url: url.into(), headers: Vec::new(), body }
    }
    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
    /// Value of a header of this request.
    #[must_use]
    pub fn get_header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }
}

/// Status line and headers of an answer. Header names are lower case.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResponseHead {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl ResponseHead {
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// Whether the receiver wants more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    More,
    Stop,
}

/// Receives one answer: the head once, then the body in blocks of any size.
pub trait BodySink: Send {
    /// [`Flow::Stop`] skips the body.
    fn head(&mut self, head: &ResponseHead) -> Flow;
    /// [`Flow::Stop`] ends the transfer; that is not an error.
    fn data(&mut self, block: &[u8]) -> Flow;
}

/// Why no complete answer arrived.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Nothing reached the server, as far as known.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The answer ended early. Blocks that arrived were delivered.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// A body was longer than the caller allows.
    #[error("the answer is longer than {limit_bytes} bytes")]
    TooLong { limit_bytes: u64 },
}

/// Sends requests. Implementations follow no redirects (an ingest key must not travel to a foreign host), decode no
/// content encoding and time out on inactivity, not on total duration.
#[async_trait::async_trait]
pub trait HttpTransport: Send + Sync {
    /// Sends `request` and streams the answer into `sink`.
    ///
    /// # Errors
    /// [`TransportError`] when no complete answer arrived. Any status is an answer.
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError>;
}

#[async_trait::async_trait]
impl<T: HttpTransport + ?Sized> HttpTransport for std::sync::Arc<T> {
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError> {
        (**self).send(request, sink).await
    }
}

/// A whole answer in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpResponse {
    pub head: ResponseHead,
    pub body: Bytes,
}

struct Collect {
    head: ResponseHead,
    body: Vec<u8>,
    limit: u64,
    too_long: bool,
}

impl BodySink for Collect {
    fn head(&mut self, head: &ResponseHead) -> Flow {
        self.head = head.clone();
        Flow::More
    }
    fn data(&mut self, block: &[u8]) -> Flow {
        if self.body.len() as u64 + block.len() as u64 > self.limit {
            self.too_long = true;
            return Flow::Stop;
        }
        self.body.extend_from_slice(block);
        Flow::More
    }
}

/// Sends and collects the answer, at most `limit_bytes` of body.
///
/// # Errors
/// [`TransportError`], among them [`TransportError::TooLong`].
pub async fn fetch(
    transport: &dyn HttpTransport,
    request: HttpRequest,
    limit_bytes: u64,
) -> Result<HttpResponse, TransportError> {
    let mut sink = Collect { head: ResponseHead::default(), body: Vec::new(), limit: limit_bytes, too_long: false };
    transport.send(request, &mut sink).await?;
    if sink.too_long {
        return Err(TransportError::TooLong { limit_bytes });
    }
    Ok(HttpResponse { head: sink.head, body: sink.body.into() })
}
