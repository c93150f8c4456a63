//! Arrow Flight SQL against the real binary: the rows of `POST /v1/sql` under the same rules, caps that end a result with an error,
//! and queries of which nothing is left a second after their cap or their client.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use arrow::array::{AsArray as _, RecordBatch};
use arrow_flight::error::FlightError;
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::sql::{
    CommandGetDbSchemas, CommandGetPrimaryKeys, CommandGetTables, CommandGetXdbcTypeInfo, SqlInfo,
};
use arrow_flight::{FlightInfo, IpcMessage};
use flywheel_tests::{Server, client, unit_arguments};
use futures::TryStreamExt as _;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tonic::Code;
use tonic::transport::Channel;

type Client = FlightSqlServiceClient<Channel>;

/// From the end of a query to the last of its work.
const SOON: Duration = Duration::from_secs(1);
/// Goes through more than 10¹² pairs without handing out a row, in a few megabytes.
const ENDLESS: &str = "WITH x AS (SELECT a.ttft_ms + b.ttft_ms + c.ttft_ms AS t FROM interactions a, interactions b, interactions c \
                       WHERE c.interaction_id < 'i-11') SELECT count(*) FROM x JOIN x AS y ON x.t + y.t < 0";

/// A server with events of two apps.
struct Bench {
    server: Server,
    http: reqwest::Client,
    address: String,
    token: String,
    rival: String,
}

fn event(id: &str, ttft_ms: f64) -> Value {
    json!({
        "kind": "interaction", "interaction_id": id, "at": "2026-03-02T00:00:00Z", "template_id": "faq",
        "bundle": "0".repeat(64), "ttft_ms": ttft_ms,
    })
}

impl Bench {
    /// `limits` are further lines of `[flight]`; `events` those of the app `shop`.
    async fn start(limits: &str, events: &[Value]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let lines = format!("[flight]\nlisten = \"{address}\"\n{limits}");
        let server = Server::with_config(&unit_arguments().unwrap(), &lines).unwrap();
        server.command(&["app", "create", "rival"]).unwrap();
        let rival = ["token", "create", "--app", "rival", "--role", "operator", "--name", "rival"];
        let (token, rival) = (server.token("operator").unwrap(), server.command(&rival).unwrap());
        let out = Self { server, http: client().unwrap(), address, token, rival };
        let rivals_key = out.server.command(&["ingest-key", "create", "--app", "rival"]).unwrap();
        out.send(&out.server.ingest_key().unwrap(), events).await;
        out.send(&rivals_key, &[event("r-1", 1.0)]).await;
        out
    }

    async fn send(&self, key: &str, events: &[Value]) {
        let body = events.iter().map(|e| format!("{e}\n")).collect::<String>();
        let request = self.http.post(self.server.url("/v1/events")).header("x-fleet-ingest-key", key);
        let answer = request.header("content-type", "application/x-ndjson").body(body).send().await.unwrap();
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(answer, json!({ "stored": events.len(), "duplicate": 0, "quarantined": 0 }));
    }

    async fn client(&self, token: &str) -> Client {
        let channel = Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap();
        let mut out = FlightSqlServiceClient::new(channel);
        if !token.is_empty() {
            out.set_token(token.to_owned());
        }
        out
    }

    /// Rows over HTTP, as arrays in the order of the columns.
    async fn over_http(&self, query: &str) -> Value {
        let request = self.http.post(self.server.url("/v1/sql")).bearer_auth(&self.token);
        let answer: Value = request.json(&json!({ "query": query })).send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["truncated"], false, "{answer}");
        answer["rows"].clone()
    }

    async fn gauge(&self, name: &str) -> f64 {
        let text = self.http.get(self.server.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let line =
            text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).unwrap_or_else(|| panic!("{text}"));
        line.parse().unwrap()
    }

    /// Until no query runs and none holds memory; fails when that takes too long.
    async fn until_idle(&self, what: &str) {
        let begin = Instant::now();
        loop {
            let mut left = Vec::new();
            for name in ["flywheel_queries_running", "flywheel_query_tasks", "flywheel_query_memory_bytes"] {
                left.push(self.gauge(name).await);
            }
            if left == [0.0; 3] {
                return;
            }
            assert!(begin.elapsed() < SOON, "{what}: {left:?} after {:?}", begin.elapsed());
        }
    }
}

/// All rows behind the tickets of an answer.
async fn fetch(client: &mut Client, info: FlightInfo) -> Result<Vec<RecordBatch>, FlightError> {
    let mut out = Vec::new();
    for endpoint in info.endpoint {
        out.extend(client.do_get(endpoint.ticket.unwrap()).await?.try_collect::<Vec<_>>().await?);
    }
    Ok(out)
}

async fn query(client: &mut Client, query: &str) -> Result<Vec<RecordBatch>, FlightError> {
    let info = client.execute(query.to_owned(), None).await?;
    fetch(client, info).await
}

/// As `POST /v1/sql` writes them.
fn rows(batches: &[RecordBatch]) -> Value {
    let mut writer = arrow::json::WriterBuilder::new()
        .with_explicit_nulls(true)
        .build::<_, arrow::json::writer::JsonArray>(Vec::new());
    writer.write_batches(&batches.iter().collect::<Vec<_>>()).unwrap();
    writer.finish().unwrap();
    let bytes = writer.into_inner();
    let rows: Vec<Value> = if bytes.is_empty() { Vec::new() } else { serde_json::from_slice(&bytes).unwrap() };
    let names: Vec<String> =
        batches.first().map_or_else(Vec::new, |b| b.schema().fields().iter().map(|f| f.name().clone()).collect());
    rows.iter().map(|row| names.iter().map(|n| row[n].clone()).collect::<Value>()).collect()
}

/// Status and message of a call that fails.
fn failure<T>(result: Result<T, FlightError>) -> (Code, String) {
    match result {
        Err(FlightError::Tonic(status)) => (status.code(), status.message().to_owned()),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it did not fail"),
    }
}

#[tokio::test]
async fn the_rows_are_those_of_http_and_of_the_own_app() {
    let b = Bench::start("", &[event("i-1", 700.0), event("i-2", 900.5), event("i-3", 1.25)]).await;
    let mut shop = b.client(&b.token).await;
    for text in [
        "SELECT count(*) AS n, sum(ttft_ms) AS total FROM interactions",
        "SELECT interaction_id, ttft_ms, received_at, received_date, chunk_ids, locale FROM interactions ORDER BY interaction_id",
        "SELECT interaction_id FROM interactions WHERE interaction_id = 'r-1' OR app = 'rival'",
        "SELECT * FROM interactions WHERE interaction_id = 'i-2'",
    ] {
        assert_eq!(rows(&query(&mut shop, text).await.unwrap()), b.over_http(text).await, "{text}");
    }
    let ids = "SELECT interaction_id FROM interactions ORDER BY 1";
    assert_eq!(rows(&query(&mut shop, ids).await.unwrap()), json!([["i-1"], ["i-2"], ["i-3"]]));

    // the columns are known before the rows, and are those of the rows
    let info = shop.execute(ids.to_owned(), None).await.unwrap();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let columns = info.clone().try_decode_schema().unwrap();
    assert_eq!(fetch(&mut shop, info).await.unwrap()[0].schema().as_ref(), &columns);

    let mut prepared = shop.prepare(ids.to_owned(), None).await.unwrap();
    assert_eq!(
        (prepared.dataset_schema().unwrap(), prepared.parameter_schema().unwrap().fields().len()),
        (&columns, 0)
    );
    let info = prepared.execute().await.unwrap();
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([["i-1"], ["i-2"], ["i-3"]]));
    prepared.close().await.unwrap();

    // another app: its own rows, and nothing with a foreign ticket
    let mut rival = b.client(&b.rival).await;
    assert_eq!(rows(&query(&mut rival, ids).await.unwrap()), json!([["r-1"]]));
    assert_eq!(failure(rival.do_get(ticket.clone()).await).0, Code::NotFound);
    let again: Vec<RecordBatch> = shop.do_get(ticket).await.unwrap().try_collect().await.unwrap();
    assert_eq!(rows(&again), json!([["i-1"], ["i-2"], ["i-3"]]), "a ticket is good more than once");

    // a token for all apps names the app, as over HTTP
    let all = b.server.command(&["token", "create", "--role", "admin", "--name", "all"]).unwrap();
    let mut all = b.client(&all).await;
    let (code, message) = failure(query(&mut all, ids).await);
    assert!(code == Code::InvalidArgument && message.contains("x-fleet-app"), "{code:?}: {message}");
    all.set_header("x-fleet-app", "rival");
    assert_eq!(rows(&query(&mut all, ids).await.unwrap()), json!([["r-1"]]));
    b.until_idle("all were read").await;
}

#[tokio::test]
async fn only_an_operators_token_opens_it() {
    let b = Bench::start("", &[event("i-1", 700.0)]).await;
    let ids = "SELECT interaction_id FROM interactions";
    let mut shop = b.client(&b.token).await;
    let ticket = shop.execute(ids.to_owned(), None).await.unwrap().endpoint[0].ticket.clone().unwrap();
    let viewer = b.server.token("viewer").unwrap();
    for (token, expected) in
        [("", Code::Unauthenticated), ("wrong", Code::Unauthenticated), (&viewer, Code::PermissionDenied)]
    {
        let mut other = b.client(token).await;
        assert_eq!(failure(other.execute(ids.to_owned(), None).await).0, expected, "{token}");
        assert_eq!(failure(other.do_get(ticket.clone()).await).0, expected, "{token}");
        assert_eq!(failure(other.prepare(ids.to_owned(), None).await.map(|_| ())).0, expected, "{token}");
        assert_eq!(failure(other.get_catalogs().await).0, expected, "{token}");
        assert_eq!(failure(other.execute_update("DELETE FROM interactions".into(), None).await).0, expected, "{token}");
    }
    // a password is a token; whoever has one asks with it from then on
    let mut basic = b.client("").await;
    basic.handshake("anybody", &b.token).await.unwrap();
    assert_eq!(basic.token(), Some(&b.token));
    assert_eq!(rows(&query(&mut basic, ids).await.unwrap()), json!([["i-1"]]));
    for (password, expected) in [("wrong", "no_valid_token"), (&viewer, "role_too_low")] {
        let e = b.client("").await.handshake("anybody", password).await.unwrap_err().to_string();
        assert!(e.contains(expected), "{e}");
    }
    // and it reads only
    let (code, message) = failure(query(&mut shop, "DROP TABLE interactions").await);
    assert!(code == Code::InvalidArgument && message.contains("only SELECT"), "{message}");
    let (code, message) = failure(shop.execute_update("DELETE FROM interactions".into(), None).await);
    assert!(code == Code::Unimplemented && message.contains("read_only"), "{message}");
    let (code, message) = failure(query(&mut shop, "SELECT * FROM interactions WHERE interaction_id = $1").await);
    assert!(code == Code::InvalidArgument && message.contains("parameters"), "{message}");
}

#[tokio::test]
async fn what_there_is_can_be_asked() {
    let b = Bench::start("timeout_s = 7", &[event("i-1", 700.0)]).await;
    let mut shop = b.client(&b.token).await;
    let info = shop.get_catalogs().await.unwrap();
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([["lake"]]));
    let info = shop.get_db_schemas(CommandGetDbSchemas::default()).await.unwrap();
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([["lake", "app"]]));
    let info = shop.get_table_types().await.unwrap();
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([["TABLE"]]));
    let asked = CommandGetTables { table_name_filter_pattern: Some("%er_cti%".into()), ..CommandGetTables::default() };
    let info = shop.get_tables(asked).await.unwrap();
    let expected = json!([["lake", "app", "interactions", "TABLE"]]);
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), expected);

    // the columns that are told are the columns that come
    let info = shop.get_tables(CommandGetTables { include_schema: true, ..CommandGetTables::default() }).await.unwrap();
    let found = fetch(&mut shop, info).await.unwrap();
    assert!(found[0].num_rows() >= 6, "{}", found[0].num_rows());
    let (tables, schemas) = (found[0].column(2).as_string::<i32>(), found[0].column(4).as_binary::<i32>());
    for row in 0..found[0].num_rows() {
        let name = tables.value(row);
        let bytes = schemas.value(row).to_vec();
        let told = arrow::datatypes::Schema::try_from(IpcMessage(bytes.into())).unwrap();
        let info = shop.execute(format!("SELECT * FROM {name}"), None).await.unwrap();
        assert_eq!(info.try_decode_schema().unwrap(), told, "{name}");
    }
    let info = shop.get_sql_info(vec![SqlInfo::FlightSqlServerName, SqlInfo::FlightSqlServerReadOnly]).await.unwrap();
    assert_eq!(fetch(&mut shop, info).await.unwrap()[0].num_rows(), 2);
    let asked = CommandGetPrimaryKeys { table: "interactions".into(), ..CommandGetPrimaryKeys::default() };
    let info = shop.get_primary_keys(asked).await.unwrap();
    assert_eq!(info.clone().try_decode_schema().unwrap().field(4).name(), "key_name");
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([]));
    let info = shop.get_xdbc_type_info(CommandGetXdbcTypeInfo::default()).await.unwrap();
    assert_eq!(info.clone().try_decode_schema().unwrap().field(0).name(), "type_name");
    assert_eq!(rows(&fetch(&mut shop, info).await.unwrap()), json!([]));
}

fn three_hundred() -> Vec<Value> {
    (0..300).map(|i| event(&format!("i-{i}"), f64::from(i))).collect()
}

#[tokio::test]
async fn past_a_cap_a_result_ends_with_an_error_and_its_query_is_gone() {
    let b = Bench::start("timeout_s = 2\nmax_rows = 250\nmax_bytes = 100000", &three_hundred()).await;
    let mut shop = b.client(&b.token).await;
    let whole = query(&mut shop, "SELECT interaction_id FROM interactions LIMIT 250").await.unwrap();
    assert_eq!(whole.iter().map(RecordBatch::num_rows).sum::<usize>(), 250);

    let info = shop.execute("SELECT interaction_id FROM interactions".into(), None).await.unwrap();
    let mut stream = shop.do_get(info.endpoint[0].ticket.clone().unwrap()).await.unwrap();
    let mut seen = 0;
    let (code, message) = loop {
        match stream.try_next().await {
            Ok(batch) => seen += batch.expect("not silently").num_rows(),
            Err(e) => break failure::<()>(Err(e)),
        }
    };
    assert_eq!((code, seen), (Code::ResourceExhausted, 250));
    assert!(message.contains("250 rows") && message.contains("LIMIT"), "{message}");
    b.until_idle("rows").await;

    let wide = format!("SELECT interaction_id, '{}' AS filler FROM interactions LIMIT 200", "x".repeat(1000));
    let (code, message) = failure(query(&mut shop, &wide).await);
    assert!(code == Code::ResourceExhausted && message.contains("100000 bytes"), "{message}");
    b.until_idle("bytes").await;

    let hungry = "SELECT array_agg(concat(a.interaction_id, b.interaction_id, c.interaction_id)) \
                  FROM interactions a, interactions b, interactions c";
    let (code, message) = failure(query(&mut shop, hungry).await);
    let known = [(Code::ResourceExhausted, "query_too_large"), (Code::DeadlineExceeded, "query_timeout")];
    assert!(known.iter().any(|(c, m)| code == *c && message.contains(m)), "{code:?}: {message}");
    b.until_idle("memory").await;

    let info = shop.execute(ENDLESS.to_owned(), None).await.unwrap();
    let begin = Instant::now();
    let (code, message) = failure(fetch(&mut shop, info).await);
    assert!(code == Code::DeadlineExceeded && message.contains("longer than 2 s"), "{code:?}: {message}");
    assert!(begin.elapsed() < Duration::from_secs(2) + SOON, "{:?}", begin.elapsed());
    b.until_idle("time").await;
}

#[tokio::test]
async fn a_query_ends_with_its_client() {
    let b = Bench::start("", &three_hundred()).await;
    let endless_rows = "SELECT a.interaction_id FROM interactions a, interactions b, interactions c, interactions d";
    for text in [ENDLESS, endless_rows] {
        let mut shop = b.client(&b.token).await;
        let info = shop.execute(text.to_owned(), None).await.unwrap();
        let ticket = info.endpoint[0].ticket.clone().unwrap();
        let reading = tokio::spawn(async move {
            let mut stream = shop.do_get(ticket).await.unwrap();
            // nobody reads more than this much: the rest waits in the server
            stream.try_next().await.unwrap();
            std::future::pending::<()>().await;
        });
        let begin = Instant::now();
        while b.gauge("flywheel_queries_running").await < 1.0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "{text} does not run");
        }
        reading.abort();
        assert!(reading.await.unwrap_err().is_cancelled());
        b.until_idle(text).await;
    }
    // the same over HTTP
    let request = b.http.post(b.server.url("/v1/sql")).bearer_auth(&b.token).json(&json!({ "query": ENDLESS }));
    let asking = tokio::spawn(request.send());
    let begin = Instant::now();
    while b.gauge("flywheel_queries_running").await < 1.0 {
        assert!(begin.elapsed() < Duration::from_secs(5), "it does not run");
    }
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    b.until_idle("over HTTP").await;
}

#[tokio::test]
async fn the_driver_of_adbc_reads_the_same() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let modules = "import adbc_driver_flightsql.dbapi, adbc_driver_manager, pyarrow";
    if !Command::new(&python).args(["-c", modules]).output().is_ok_and(|o| o.status.success()) {
        println!("left out: {python} has no adbc-driver-flightsql, adbc-driver-manager or pyarrow (set PYTHON)");
        return;
    }
    let b = Bench::start("max_rows = 10000", &three_hundred()).await;
    let viewer = b.server.token("viewer").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/flight_sql.py");
    let (flight, http) = (format!("grpc://{}", b.address), b.server.url(""));
    let mut command = Command::new(python);
    command.arg(script).args(["--flight", &flight, "--http", &http, "--token", &b.token]);
    command.args(["--other-app", &b.rival, "--viewer", &viewer]).env("NO_PROXY", "127.0.0.1");
    let out = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    let mut ids: Vec<String> = (0..300).map(|i| format!("i-{i}")).collect();
    ids.sort();
    assert_eq!((&found["same"], &found["ids"], &found["prepared"]), (&json!(5), &json!(ids), &json!(ids)), "{found}");
    assert_eq!((&found["with_password"], &found["other_app"]), (&json!(300), &json!(1)), "{found}");
    assert_eq!((&found["catalogs"], &found["schemas"]), (&json!(["lake"]), &json!(["app"])), "{found}");
    for table in ["device_events", "dispositions", "feedback", "interactions", "outcomes", "rejects"] {
        assert!(found["tables"].as_array().unwrap().contains(&json!(table)), "{table}: {found}");
    }
    assert_eq!((&found["table_types"], &found["server"]), (&json!(["TABLE"]), &json!("Flywheel")));
    assert!(found["columns"].as_u64().unwrap() > 50, "{found}");
    for (what, status) in [
        ("insert", "INVALID_ARGUMENT"),
        ("too_many_rows", "INTERNAL"),
        ("wrong_token", "UNAUTHENTICATED"),
        ("wrong_password", "UNAUTHENTICATED"),
        ("viewer", "UNAUTHORIZED"),
        ("cancelled", "CANCELLED"),
    ] {
        assert_eq!(found[what], status, "{what}: {found}");
    }
    assert!(found["cancelled_after_s"].as_f64().unwrap() < 1.0, "{found}");
    b.until_idle("the driver is done").await;
}
