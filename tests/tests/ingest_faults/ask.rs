//! Questions to a running server, and waiting for what must become true.

use flywheel_tests::{Server, client};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Longest wait for anything.
const LONGEST: Duration = Duration::from_secs(120);

/// Tries until `found` gives something; ends the test with `what` when it never does.
pub fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONGEST;
    loop {
        if let Some(it) = found() {
            return it;
        }
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An operator at a server, for code that is not asynchronous.
pub struct Operator {
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    token: String,
}

impl Operator {
    pub fn of(server: &Server) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { http: client().unwrap(), runtime, token: server.token("operator").unwrap() }
    }

    /// What one SELECT answers, as it came.
    pub fn sql(&self, server: &Server, query: &str) -> (u16, Value) {
        let request = self.http.post(server.url("/v1/sql")).bearer_auth(&self.token).json(&json!({ "query": query }));
        self.runtime.block_on(async {
            let answer = request.send().await.unwrap();
            (answer.status().as_u16(), answer.json().await.unwrap())
        })
    }

    /// Rows of one SELECT.
    pub fn rows(&self, server: &Server, query: &str) -> Value {
        let (status, answer) = self.sql(server, query);
        assert_eq!((status, &answer["truncated"]), (200, &Value::Bool(false)), "{query}: {answer}");
        answer["rows"].clone()
    }

    /// The number that one SELECT answers.
    pub fn number(&self, server: &Server, query: &str) -> u64 {
        let rows = self.rows(server, query);
        rows[0][0].as_u64().unwrap_or_else(|| panic!("{query}: {rows}"))
    }

    /// Every id in a column of a table, with how often it is there: pages of what one answer may hold.
    pub fn ids(&self, server: &Server, table: &str, column: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        loop {
            let last = found.last().cloned().unwrap_or_default();
            let page = self.rows(
                server,
                &format!(
                    "SELECT {column}, count(*) FROM {table} WHERE {column} > '{last}' GROUP BY 1 ORDER BY 1 LIMIT 5000"
                ),
            );
            for row in page.as_array().unwrap() {
                assert_eq!(row[1], 1, "stored more than once: {row}");
                found.insert(row[0].as_str().unwrap().to_owned());
            }
            if page.as_array().unwrap().len() < 5000 {
                return found;
            }
        }
    }

    /// Sends telemetry; the answer of a 200.
    pub fn post(&self, server: &Server, path: &str, key: &str, headers: &[(&str, String)], body: String) -> Value {
        let request = self.http.post(server.url(path)).header("x-fleet-ingest-key", key);
        let request = headers.iter().fold(request, |r, (name, value)| r.header(*name, value));
        let request = request.header("content-type", "application/json").body(body);
        self.runtime.block_on(async {
            let answer = request.send().await.unwrap();
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            assert_eq!(status, 200, "{text}");
            serde_json::from_str(&text).unwrap()
        })
    }

    /// Moves the business clock; returns when the jobs of the tick are done.
    pub fn advance(&self, server: &Server, now: &str) {
        let token = server.token("admin").unwrap();
        let request = self.http.post(server.url("/v1/clock")).bearer_auth(token).json(&json!({ "now": now }));
        self.runtime.block_on(async {
            let answer = request.timeout(LONGEST).send().await.unwrap();
            assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
        });
    }

    /// `/readyz`: the status and what it says.
    pub fn ready(&self, server: &Server) -> (u16, Value) {
        self.runtime.block_on(async {
            let answer = self.http.get(server.url("/readyz")).send().await.unwrap();
            if answer.status() == 503 {
                assert!(answer.headers().contains_key("retry-after"), "a 503 says when to come back");
            }
            (answer.status().as_u16(), answer.json().await.unwrap())
        })
    }

    /// A number of `/metrics`.
    pub fn gauge(&self, server: &Server, name: &str) -> f64 {
        let text = self.runtime.block_on(async {
            let answer = self.http.get(server.url("/metrics")).send().await.unwrap();
            answer.text().await.unwrap()
        });
        let found = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        found.unwrap_or_else(|| panic!("{name} is not in\n{text}"))
    }

    /// Until everything that was acknowledged is in the tables.
    pub fn wait_until_committed(&self, server: &Server) {
        wait_for("an empty log", || (self.gauge(server, "flywheel_ingest_backlog_bytes") == 0.0).then_some(()));
    }
}
