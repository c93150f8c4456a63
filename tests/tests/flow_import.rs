//! History from a folder and from a bucket into the tables of a real server, over HTTP and with `flywheel import`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use arrow::array::{ArrayRef, Float32Array, RecordBatch, StringArray, TimestampMillisecondArray, UInt32Array};
use flywheel_tests::bucket::Bucket;
use flywheel_tests::{Server, client, unit_arguments};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 2026-02-01 12:00 UTC, milliseconds.
const NOON_MS: i64 = 1_769_947_200_000;
const DAY_MS: i64 = 86_400_000;

/// `n` answers of two days; every tenth without an id.
fn parquet(n: i64) -> Vec<u8> {
    let ids = (0..n).map(|i| (i % 10 != 9).then(|| format!("old-{i}")));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("interaction_id", Arc::new(StringArray::from_iter(ids))),
        (
            "received_at",
            Arc::new(TimestampMillisecondArray::from_iter_values((0..n).map(|i| NOON_MS + i % 2 * DAY_MS))),
        ),
        ("template_id", Arc::new(StringArray::from_iter_values((0..n).map(|i| format!("faq@{}", i % 3))))),
        ("ttft_ms", Arc::new(Float32Array::from_iter_values((0..n).map(|i| i as f32 / 2.0)))),
        ("output_tokens", Arc::new(UInt32Array::from_iter_values((0..n).map(|i| i as u32)))),
        ("note", Arc::new(StringArray::from_iter_values((0..n).map(|_| "ask anna@example.com".to_owned())))),
    ];
    let rows = RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, a)| (name, a, true))).unwrap();
    let mut out = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut out, rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    out
}

/// `n` judgements, and one line that is none.
fn lines(n: usize) -> Vec<u8> {
    let line = |i: usize| {
        format!(
            "{{\"kind\":\"feedback\",\"interaction_id\":\"old-{i}\",\"at\":\"2026-02-03T00:00:00Z\",\"label\":\"rejected\"}}\n"
        )
    };
    let text: String = (0..n).map(line).chain(["{\"kind\":\"feedback\"}\n".to_owned()]).collect();
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(text.as_bytes()).unwrap();
    out.finish().unwrap()
}

struct Flow {
    server: Server,
    http: reqwest::Client,
    token: String,
}

impl Flow {
    fn new(server: Server) -> Self {
        let token = server.token("operator").unwrap();
        Self { server, http: client().unwrap(), token }
    }

    async fn post(&self, token: &str, body: &Value) -> (u16, Value) {
        let request = self.http.post(self.server.url("/v1/imports")).bearer_auth(token).json(body);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    async fn get(&self, path: &str) -> Value {
        self.http.get(self.server.url(path)).bearer_auth(&self.token).send().await.unwrap().json().await.unwrap()
    }

    /// Imports and waits for the end of the job.
    async fn import(&self, body: &Value) -> Value {
        let (status, started) = self.post(&self.token, body).await;
        assert_eq!((status, &started["new"]), (200, &json!(true)), "{started}");
        let path = format!("/v1/jobs/{}", started["job_id"].as_str().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let job = self.get(&path).await;
            if !matches!(job["state"].as_str(), Some("queued" | "running")) {
                assert_eq!(job["state"], "succeeded", "{job}");
                return job["result"].clone();
            }
            assert!(Instant::now() < deadline, "{job}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn rows(&self, query: &str) -> Value {
        let request = self.http.post(self.server.url("/v1/sql")).bearer_auth(&self.token);
        let answer: Value = request.json(&json!({ "query": query })).send().await.unwrap().json().await.unwrap();
        assert!(answer["rows"].is_array(), "{answer}");
        answer["rows"].clone()
    }
}

const DISPOSITIONS: &str = "SELECT source, kind, disposition, coalesce(reason, ''), sum(items) FROM dispositions \
    GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3";

#[tokio::test]
async fn a_folder_is_imported_once_beside_live_telemetry() {
    let files = tempfile::tempdir().unwrap();
    fs::create_dir_all(files.path().join("2026/02")).unwrap();
    fs::write(files.path().join("2026/02/answers.parquet"), parquet(1000)).unwrap();
    fs::write(files.path().join("feedback.ndjson.gz"), lines(40)).unwrap();
    fs::write(files.path().join("broken.parquet"), b"PAR1 and nothing more").unwrap();
    let source = format!("file://{}/", files.path().display());
    let config = format!("[import]\nsources = [{source:?}]\n");
    let flow = Flow::new(Server::with_config(&unit_arguments().unwrap(), &config).unwrap());
    let key = flow.server.ingest_key().unwrap();
    let live = json!({ "interaction_id": "new-1", "at": "2026-03-02T00:00:00Z", "label": "accepted" });
    let sent = flow.http.post(flow.server.url("/v1/feedback")).header("x-fleet-ingest-key", &key).json(&live);
    assert_eq!(sent.send().await.unwrap().status(), 200);

    let body = json!({ "source": source, "table": "interactions" });
    let viewer = flow.server.token("viewer").unwrap();
    assert_eq!(flow.post(&viewer, &body).await.0, 403);
    let outside = json!({ "source": format!("{source}../"), "table": "interactions" });
    assert_eq!(flow.post(&flow.token, &outside).await.1["code"], "import_source_not_allowed");

    let result = flow.import(&body).await;
    assert_eq!(
        (&result["objects"], &result["done"], &result["rows"]),
        (&json!(3), &json!(3), &json!(1041)),
        "{result}"
    );
    assert_eq!(result["stored"], json!({ "interactions": 900, "feedback": 40 }));
    assert_eq!(result["quarantined"], json!({ "no_interaction_id": 100, "bad_event": 1 }));
    assert_eq!(result["failed"][0]["object"], "broken.parquet", "{result}");

    let query = "SELECT count(*), count(DISTINCT interaction_id), count(DISTINCT received_date), min(source), max(trust), \
                 sum(output_tokens), max(attrs['note']) FROM interactions WHERE received_date < DATE '2026-03-01'";
    let tokens: i64 = (0..1000).filter(|i| i % 10 != 9).sum();
    let expected = json!([[900, 900, 2, "import", "anonymous", tokens, "ask [email]"]]);
    assert_eq!(flow.rows(query).await, expected);
    assert_eq!(flow.rows("SELECT count(*) FROM feedback").await, json!([[41]]));
    let dispositions = json!([
        ["feedback", "feedback", "stored", "", 1],
        ["import", "feedback", "quarantined", "bad_event", 1],
        ["import", "feedback", "stored", "", 40],
        ["import", "interaction", "quarantined", "no_interaction_id", 100],
        ["import", "interaction", "stored", "", 900],
    ]);
    assert_eq!(flow.rows(DISPOSITIONS).await, dispositions);
    let shown = "SELECT count(*), count(*) FILTER (WHERE detail LIKE '2026/02/answers.parquet: row 10: %') FROM rejects \
                 WHERE source = 'import'";
    assert_eq!(flow.rows(shown).await, json!([[101, 1]]));

    // once more, with a name that is new and a file that is whole now
    fs::rename(files.path().join("feedback.ndjson.gz"), files.path().join("judgements.jsonl.gz")).unwrap();
    fs::write(files.path().join("broken.parquet"), parquet(10)).unwrap();
    let again = flow.import(&body).await;
    assert_eq!(
        (&again["rows"], &again["already"], &again["failed"]),
        (&json!(10), &json!(1041), &json!([])),
        "{again}"
    );
    assert_eq!(flow.rows("SELECT count(*) FROM interactions").await, json!([[909]]));
    assert_eq!(flow.rows("SELECT sum(items) FROM dispositions").await, json!([[1052]]));
    let audit = flow.get("/v1/audit").await;
    let actions: Vec<&str> = audit.as_array().unwrap().iter().filter_map(|a| a["action"].as_str()).collect();
    assert_eq!(actions.iter().filter(|a| **a == "import.start").count(), 2, "{actions:?}");
    assert_eq!(actions.iter().filter(|a| **a == "import.done").count(), 2, "{actions:?}");
}

#[tokio::test]
async fn a_bucket_is_imported_from_the_command_line() {
    let bucket = Bucket::start().unwrap();
    bucket.put("2025/answers.parquet", parquet(100));
    bucket.put("2025/judgements.jsonl.gz", lines(20));
    bucket.put("2025/_SUCCESS", Vec::new());
    bucket.put("2024/secret.jsonl.gz", lines(7));
    let launcher: Vec<String> = std::iter::once("env".to_owned()).chain(bucket.environment()).collect();
    let config = "[import]\nsources = [\"s3://history/2025\"]\n";
    let flow = Flow::new(Server::with_launcher(&unit_arguments().unwrap(), config, launcher).unwrap());
    let url = flow.server.url("");
    let import = |source: &str, more: &[&str]| {
        let mut arguments =
            vec!["import", source, "--app", "shop", "--follow", "--server", &url, "--token", &flow.token];
        arguments.extend(more);
        flow.server.command(&arguments)
    };
    let said = import("s3://history/2025/", &["--table", "interactions"]).unwrap();
    assert!(said.contains("2 objects: 121 rows read, 0 were there already"), "{said}");
    assert!(said.contains("stored interactions: 90") && said.contains("quarantined bad_event: 1"), "{said}");
    assert_eq!(
        flow.rows("SELECT count(*) AS n, (SELECT count(*) FROM feedback) AS m FROM interactions").await,
        json!([[90, 20]])
    );
    let said = import("s3://history/2025", &["--table", "interactions"]).unwrap();
    assert!(said.contains("2 objects: 0 rows read, 121 were there already"), "{said}");
    // one object, and one that is cut: it is named and the command fails
    let said = import("s3://history/2025/answers.parquet", &["--table", "interactions"]).unwrap();
    assert!(said.contains("1 objects: 0 rows read, 100 were there already"), "{said}");
    let whole = lines(500);
    bucket.put("2025/late.jsonl.gz", whole[..whole.len() / 2].to_vec());
    let failed = import("s3://history/2025/", &["--table", "interactions"]).unwrap_err().to_string();
    assert!(failed.contains("1 of 3 objects could not be read"), "{failed}");
    let elsewhere = import("s3://history/2024/", &[]).unwrap_err().to_string();
    assert!(elsewhere.contains("import_source_not_allowed"), "{elsewhere}");
    assert_eq!(flow.rows("SELECT count(*) FROM feedback").await, json!([[20]]));
}
