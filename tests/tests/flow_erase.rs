//! Erasure against the real binary, under load: afterwards no object of lake and object store names the person, whether in the
//! clear or inside Parquet; others keep their rows; the receipt counts what was done; a hold keeps what it protects.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use flywheel_tests::{Server, client, unit_arguments};
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { out.extend(files(&path)) } else { out.push(path) }
    }
    out
}

/// The bytes of a file, and what is inside when it is Parquet. A file that is deleted meanwhile names nobody.
fn content(path: &Path) -> String {
    let Ok(bytes) = std::fs::read(path) else { return String::new() };
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    if path.extension().is_some_and(|e| e == "parquet") {
        let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).unwrap();
        for row in reader.get_row_iter(None).unwrap() {
            text.push_str(&row.unwrap().to_string());
        }
    }
    text
}

/// Objects of lake and object store that name one of `needles`.
fn naming(server: &Server, needles: &[&str]) -> Vec<PathBuf> {
    let data = server.data_dir();
    let all = ["lake", "objects"].map(|f| files(&data.join(f))).concat();
    all.into_iter()
        .filter(|p| {
            let text = content(p);
            needles.iter().any(|n| text.contains(n))
        })
        .collect()
}

struct World {
    server: Server,
    http: reqwest::Client,
    key: String,
    admin: String,
}

impl World {
    fn start() -> Self {
        let config = "[ingest]\nflush_s = 1\n";
        let server = Server::with_config(&unit_arguments().unwrap(), config).unwrap();
        let (key, admin) = (server.ingest_key().unwrap(), server.token("admin").unwrap());
        Self { server, http: client().unwrap(), key, admin }
    }

    async fn events(&self, batch: &str, events: &[Value]) {
        let lines: Vec<String> = events.iter().map(Value::to_string).collect();
        let request = self.http.post(self.server.url("/v1/events")).header("x-fleet-ingest-key", &self.key);
        let request = request.header("content-type", "application/x-ndjson").header("idempotency-key", batch);
        let answer = request.body(lines.join("\n")).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> Value {
        let request = self.http.request(method.parse().unwrap(), self.server.url(path)).bearer_auth(&self.admin);
        let request = if body.is_null() { request } else { request.json(&body) };
        let answer = request.send().await.unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert!(status.is_success(), "{method} {path}: {status} {text}");
        serde_json::from_str(&text).unwrap()
    }

    async fn number(&self, query: &str) -> i64 {
        let answer = self.call("POST", "/v1/sql", json!({ "query": query })).await;
        answer["rows"][0][0].as_i64().unwrap()
    }

    /// Asks for an erasure and waits until its job ended; the erasure with its receipt.
    async fn erase(&self, who: Value) -> Value {
        let mut body = who;
        body["reason"] = json!("asked for it");
        let id = self.call("POST", "/v1/erasures", body).await["erasure_id"].as_str().unwrap().to_owned();
        self.ended(&id).await
    }

    async fn ended(&self, id: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let row = self.call("GET", &format!("/v1/erasures/{id}"), Value::Null).await;
            if row["state"] != "requested" {
                return row;
            }
            assert!(Instant::now() < deadline, "{row}\n{}", self.server.log().unwrap());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn interaction(id: &str, user: &str) -> Value {
    json!({
        "kind": "interaction", "interaction_id": id, "at": "2026-03-02T00:00:00Z", "template_id": "faq",
        "bundle": "0".repeat(64), "ttft_ms": 700.0, "user_id": user,
        "content": { "question": format!("what about {id}?"), "answer": "no" },
    })
}

fn rejected(id: &str) -> Value {
    json!({ "kind": "feedback", "interaction_id": id, "at": "2026-03-02T00:00:01Z", "label": "rejected" })
}

#[tokio::test]
async fn a_person_is_forgotten_everywhere_while_others_send() {
    let w = World::start();
    let annotator = w.server.token("annotator").unwrap();
    w.call("PUT", "/v1/settings", json!({ "version": 1, "settings": { "dataset_trigger": { "min_corrections": 2 } } }))
        .await;
    let hers: Vec<String> = (0..20).map(|i| format!("anna-{i}")).collect();
    for (i, id) in hers.iter().enumerate() {
        w.events(&format!("a{i}"), &[interaction(id, "anna@example.com"), interaction(&format!("bert-{i}"), "bert")])
            .await;
        w.events(&format!("f{i}"), &[rejected(id), rejected(&format!("bert-{i}"))]).await;
    }
    // two corrections of two people become a dataset; one of them is about her answer
    let second = w.server.token("admin").unwrap();
    for (id, who) in [("anna-0", &second), ("bert-0", &w.admin)] {
        let answer = w.http.post(w.server.url("/v1/corrections")).bearer_auth(who).json(&correction(id));
        assert_eq!(answer.send().await.unwrap().status(), 200);
    }
    let datasets = wait_for_dataset(&w).await;
    let old = datasets[0]["digest"].as_str().unwrap().to_owned();
    // time passes: outcomes are derived, and the tables have several files
    w.call("POST", "/v1/clock", json!({ "now": "2026-03-03T00:00:00Z" })).await;
    assert_eq!(w.number("SELECT count(*) FROM outcomes").await, 40);
    let user = w
        .call(
            "POST",
            "/v1/sql",
            json!({ "query":
        "SELECT DISTINCT user_key FROM interactions WHERE interaction_id = 'anna-1'" }),
        )
        .await;
    let user = user["rows"][0][0].as_str().unwrap().to_owned();
    assert_eq!(naming(&w.server, &["anna@example.com"]), Vec::<PathBuf>::new(), "never stored as it is");
    let needles: Vec<&str> = hers.iter().map(String::as_str).chain([user.as_str()]).collect();
    assert!(naming(&w.server, &needles).len() > 3);

    let sent = std::sync::atomic::AtomicUsize::new(0);
    let erasing = w.erase(json!({ "user_id": "anna@example.com" }));
    tokio::pin!(erasing);
    let row = loop {
        let n = sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        tokio::select! {
            row = &mut erasing => break row,
            () = async { w.events(&format!("l{n}"), &[interaction(&format!("load-{n}"), "carl")]).await } => {}
        }
    };
    assert_eq!(row["state"], "done", "{row}");
    let receipt = &row["receipt"];
    assert_eq!(receipt["rows"]["interactions"], 20);
    assert_eq!(receipt["rows"]["feedback"], 20);
    assert_eq!(receipt["rows"]["outcomes"], 20);
    assert_eq!((&receipt["interactions"], &receipt["corrections"]), (&json!(20), &json!(1)), "{receipt}");
    assert_eq!(receipt["datasets"][0]["erased"], json!(old));
    assert_eq!(receipt["datasets"][0]["samples"], 1);
    assert!(receipt["log_segments_freed"].as_u64() > Some(0), "{receipt}");
    assert_eq!(naming(&w.server, &needles), Vec::<PathBuf>::new());
    assert!(!row.to_string().contains(&user) && !row.to_string().contains("anna"), "{row}");
    // what others have is whole, also what they sent meanwhile
    assert_eq!(w.number("SELECT count(*) FROM interactions WHERE interaction_id LIKE 'bert-%'").await, 20);
    let loads = "SELECT count(DISTINCT interaction_id) FROM interactions WHERE interaction_id LIKE 'load-%'";
    let n = sent.load(std::sync::atomic::Ordering::Relaxed) as i64;
    assert!((n - 1..=n).contains(&w.number(loads).await), "every acknowledged one");
    let datasets = w.call("GET", "/v1/datasets", Value::Null).await;
    assert_eq!(datasets.as_array().unwrap().iter().filter(|d| d["tombstone"].is_null()).count(), 1);
    let answer = w.http.get(w.server.url("/v1/audit/verify")).bearer_auth(&w.admin).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let audit = w.call("GET", "/v1/audit", Value::Null).await.to_string();
    assert!(audit.contains(receipt["digest"].as_str().unwrap()) && !audit.contains("anna"), "{audit}");
    let foreign = w.http.get(w.server.url("/v1/holds")).bearer_auth(&annotator).send().await.unwrap();
    assert_eq!(foreign.status(), 403);
}

/// Different enough for both to be kept.
fn correction(id: &str) -> Value {
    let (prompt, wrong, right) = match id {
        "anna-0" => (
            "Can I return the kettle?",
            "you can return it within fourteen days of delivery",
            "you can return it within thirty days of delivery",
        ),
        _ => (
            "Who pays for shipping to the islands?",
            "the customer always pays for it, whatever is ordered",
            "the shop always pays for it, whatever is ordered",
        ),
    };
    json!({ "interaction_id": id, "prompt": prompt, "wrong_answer": wrong, "corrected_answer": right })
}

async fn wait_for_dataset(w: &World) -> Value {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let found = w.call("GET", "/v1/datasets", Value::Null).await;
        if found.as_array().is_some_and(|d| !d.is_empty()) {
            return found;
        }
        assert!(Instant::now() < deadline, "no dataset: {}", w.server.log().unwrap());
        // a correction that comes while a look at them runs starts no other: a vote does when it is over
        let vote = w.http.post(w.server.url("/v1/corrections")).bearer_auth(&w.admin).json(&correction("bert-0"));
        vote.send().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_hold_keeps_records_until_it_is_lifted() {
    let w = World::start();
    w.events("1", &[interaction("of-a-1-only", "anna"), interaction("of-b-1-only", "bert"), rejected("of-a-1-only")])
        .await;
    let hold = w.call("PUT", "/v1/holds/case-7", json!({ "user_id": "anna", "reason": "court" })).await;
    assert_eq!(hold["subject_kind"], "user_key");
    let row = w.erase(json!({ "user_id": "anna" })).await;
    assert_eq!((&row["state"], &row["receipt"]["held"]["holds"]), (&json!("held"), &json!(["case-7"])));
    assert_eq!(row["receipt"]["held"]["rows"]["interactions"], 1);
    assert_eq!(w.number("SELECT count(*) FROM interactions").await, 2);
    let lifted = w.call("DELETE", "/v1/holds/case-7", Value::Null).await;
    assert_eq!(lifted["erasures"], json!([row["erasure_id"]]));
    let row = w.ended(row["erasure_id"].as_str().unwrap()).await;
    assert_eq!((&row["state"], &row["receipt"]["rows"]["interactions"]), (&json!("done"), &json!(1)));
    assert_eq!(w.number("SELECT count(*) FROM interactions").await, 1);
    assert_eq!(naming(&w.server, &["of-a-1-only"]), Vec::<PathBuf>::new());
    let bad = w.http.post(w.server.url("/v1/erasures")).bearer_auth(&w.admin);
    let bad = bad.json(&json!({ "user_id": "x", "user_key": "y", "reason": "r" })).send().await.unwrap();
    assert_eq!(bad.json::<Value>().await.unwrap()["code"], "bad_subject");
}
