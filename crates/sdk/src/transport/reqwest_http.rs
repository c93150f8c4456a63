//! The default transport, on reqwest with rustls. The program installs the TLS provider once at start
//! (`rustls::crypto::ring::default_provider().install_default()`).

use super::{BodySink, Flow, HttpRequest, HttpTransport, Method, ResponseHead, TransportError};
use futures::StreamExt as _;
use std::time::Duration;

/// HTTP client with a connection pool; one per process serves any number of devices.
#[derive(Debug, Clone)]
pub struct ReqwestTransport {
    client: reqwest::Client,
}

impl ReqwestTransport {
    /// A client that gives up connecting after 10 s and reading after 60 s without a byte.
    ///
    /// # Errors
    /// [`TransportError::Unreachable`] when no TLS provider is installed.
    pub fn new() -> Result<Self, TransportError> {
        // The client would panic; a library must not.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            return Err(TransportError::Unreachable(
                "no TLS provider: call `rustls::crypto::ring::default_provider().install_default()` once at start"
                    .to_owned(),
            ));
        }
        let client = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(10))
            .read_timeout(Duration::from_secs(60))
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(crate::SDK_NAME)
            .build()
            .map_err(|e| TransportError::Unreachable(e.without_url().to_string()))?;
        Ok(Self { client })
    }
}

/// The text of an error with its causes, without the address (it may hold secrets of a pre-signed link).
fn text(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut out = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        out.push_str(": ");
        out.push_str(&inner.to_string());
        cause = inner.source();
    }
    out
}

#[async_trait::async_trait]
impl HttpTransport for ReqwestTransport {
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError> {
        let mut builder = match request.method {
            Method::Get => self.client.get(&request.url),
            Method::Post => self.client.post(&request.url).body(request.body),
        };
        for (name, value) in &request.headers {
            builder = builder.header(*name, value);
        }
        let response = builder.send().await.map_err(|e| TransportError::Unreachable(text(e)))?;
        let head = ResponseHead {
            status: response.status().as_u16(),
            headers: response
                .headers()
                .iter()
                .filter_map(|(n, v)| Some((n.as_str().to_owned(), v.to_str().ok()?.to_owned())))
                .collect(),
        };
        if sink.head(&head) == Flow::Stop {
            return Ok(());
        }
        let mut body = response.bytes_stream();
        while let Some(block) = body.next().await {
            let block = block.map_err(|e| TransportError::Broken(text(e)))?;
            if sink.data(&block) == Flow::Stop {
                return Ok(());
            }
        }
        Ok(())
    }
}
