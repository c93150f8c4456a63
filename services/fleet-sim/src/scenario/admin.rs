//! The people of the scenario talk to the server as people do: bearer token, JSON, public HTTP.

use anyhow::{Context, Result, bail};
use reqwest::{Client, Method};
use serde_json::Value;

/// A person with a token.
#[derive(Clone)]
pub struct Admin {
    client: Client,
    base: String,
    token: String,
}

impl Admin {
    pub fn new(client: Client, base: &str, token: &str) -> Self {
        Self { client, base: base.trim_end_matches('/').to_owned(), token: token.to_owned() }
    }

    pub async fn get(&self, path: &str) -> Result<Value> {
        self.send(Method::GET, path, None).await
    }
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.send(Method::POST, path, Some(body)).await
    }
    pub async fn put(&self, path: &str, body: &Value) -> Result<Value> {
        self.send(Method::PUT, path, Some(body)).await
    }

    /// Uploads a file as it is; the answer names its digest.
    pub async fn upload(&self, path: &str, file: &std::path::Path) -> Result<Value> {
        let handle = tokio::fs::File::open(file).await.with_context(|| format!("cannot open {}", file.display()))?;
        let length = handle.metadata().await?.len();
        let body = reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::with_capacity(handle, 1 << 20));
        let request = self
            .client
            .post(format!("{}{path}", self.base))
            .bearer_auth(&self.token)
            .header("content-type", "application/octet-stream")
            .header("content-length", length)
            .body(body);
        read(path, request.send().await).await
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut request = self.client.request(method, format!("{}{path}", self.base)).bearer_auth(&self.token);
        if let Some(b) = body {
            request = request.json(b);
        }
        read(path, request.send().await).await
    }
}

async fn read(path: &str, response: reqwest::Result<reqwest::Response>) -> Result<Value> {
    let response = response.with_context(|| format!("{path}: no answer"))?;
    let status = response.status();
    let text = response.text().await.with_context(|| format!("{path}: answer cut off"))?;
    if !status.is_success() {
        bail!("{path}: {status}: {text}");
    }
    if text.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&text).with_context(|| format!("{path}: answer is not JSON: {text}"))
}
