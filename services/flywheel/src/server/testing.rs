//! A whole control plane in a temporary folder, and a client that talks to it over a socket: for tests of handlers,
//! pages and steps.

use super::Server;
use crate::config::{ClockConfig, Config, MailConfig};
use chrono::{DateTime, Utc};
use flywheel_store::apps::AppSettings;
use flywheel_types::{AppId, Role};
use reqwest::header::{CONTENT_TYPE, COOKIE, HeaderMap, LOCATION, SET_COOKIE};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;

/// A server with one app, `shop`, on a business clock that stands still.
pub struct TestServer {
    pub server: Arc<Server>,
    pub app: AppId,
    /// Removed with the test.
    _dir: tempfile::TempDir,
}

/// An answer over HTTP.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }
    pub fn location(&self) -> &str {
        self.headers.get(LOCATION).map_or("", |v| v.to_str().unwrap())
    }
    /// `Set-Cookie` values.
    pub fn cookies(&self) -> Vec<String> {
        self.headers.get_all(SET_COOKIE).iter().map(|v| v.to_str().unwrap().to_owned()).collect()
    }
}

/// A client of one running server; `token` goes as bearer, `cookie` as it is.
#[derive(Clone)]
pub struct Client {
    addr: SocketAddr,
    http: reqwest::Client,
    pub token: Option<String>,
    pub cookie: Option<String>,
    accept: Option<&'static str>,
}

/// The business time of the tests.
pub fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_772_352_000, 0).unwrap() // 2026-03-01 08:00 UTC
}

impl TestServer {
    pub async fn start(mail: Option<MailConfig>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            data_dir: dir.path().join("data"),
            clock: ClockConfig::Virtual { start: now() },
            public_url: Some("http://fly.example".into()),
            mail,
            ..Config::default()
        };
        let server = Server::open(config).await.unwrap();
        let app = AppId::new("shop").unwrap();
        let mut tx = server.begin().await.unwrap();
        tx.app_create(&app, &AppSettings::default()).await.unwrap();
        tx.commit().await.unwrap();
        Self { server, app, _dir: dir }
    }

    /// A fresh token of the app, or for all apps.
    pub async fn token(&self, app: Option<&str>, role: Role) -> String {
        let config = &self.server.config;
        crate::cli::setup::token_create(config, app, role, &format!("test-{role}")).await.unwrap()
    }

    /// Serves on a free port until the test ends.
    pub async fn client(&self) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let router = crate::http::router(self.server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build().unwrap();
        Client { addr, http, token: None, cookie: None, accept: None }
    }
}

impl Client {
    /// The same client with the token of another role.
    pub fn with(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// The same client that asks for another form of the answers.
    pub fn accept(&self, media_type: &'static str) -> Self {
        Self { accept: Some(media_type), ..self.clone() }
    }

    async fn send(&self, mut request: reqwest::RequestBuilder) -> Answer {
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(cookie) = &self.cookie {
            request = request.header(COOKIE, cookie);
        }
        if let Some(kind) = self.accept {
            request = request.header(reqwest::header::ACCEPT, kind);
        }
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer { status, headers, text: response.text().await.unwrap() }
    }
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }
    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.http.get(self.url(path))).await
    }
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.http.post(self.url(path)).json(body)).await
    }
    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send(self.http.put(self.url(path)).json(body)).await
    }
    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.http.delete(self.url(path))).await
    }
    /// A form as a browser sends it; `body` is urlencoded already.
    pub async fn form(&self, path: &str, body: &str) -> Answer {
        let request = self.http.post(self.url(path)).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        self.send(request.body(body.to_owned())).await
    }
}
