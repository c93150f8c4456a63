//! What a query text can try, and that none of it reaches another app's rows, a file, or a state change.

use crate::support::{Device, answer, app, at, open, with_content};
use flywheel_lake::{Lake, QueryScope, SavedView, SqlLimits};
use flywheel_types::{AppId, ErrorKind};
use std::path::Path;

async fn two_apps(dir: &Path) -> Lake {
    let lake = open(dir).await;
    let device = Device::new(1);
    let victim = AppId::new("victim").unwrap();
    device.send(&lake, 1, at(0), vec![answer("mine", at(0))]).await.unwrap();
    let secret = with_content("theirs", at(0), "secret question", "secret answer");
    lake.ingestor().ingest(device.request(&victim, 1, at(0), vec![secret.clone()])).await.unwrap();
    lake.flush().await.unwrap();
    // One row of each app in Delta and one in memory.
    device.send(&lake, 2, at(1), vec![answer("mine-2", at(1))]).await.unwrap();
    lake.ingestor().ingest(device.request(&victim, 2, at(1), vec![secret])).await.unwrap();
    lake
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_other_than_select_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lake = two_apps(dir.path()).await;
    let outside = dir.path().join("stolen.csv");
    let path = outside.display();
    for query in [
        format!("CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION '{}'", dir.path().display()),
        format!("CREATE EXTERNAL TABLE t STORED AS DELTATABLE LOCATION '{}/tables/interactions'", dir.path().display()),
        format!("COPY (SELECT * FROM interactions) TO '{path}' STORED AS CSV"),
        format!("COPY interactions TO '{path}'"),
        "CREATE TABLE t AS SELECT * FROM interactions".into(),
        "CREATE VIEW v AS SELECT * FROM interactions".into(),
        "CREATE SCHEMA s".into(),
        "CREATE FUNCTION f() RETURNS INT RETURN 1".into(),
        "DROP TABLE interactions".into(),
        "INSERT INTO interactions SELECT * FROM interactions".into(),
        "DELETE FROM interactions".into(),
        "UPDATE interactions SET app = 'support-app'".into(),
        "TRUNCATE TABLE interactions".into(),
        "SET datafusion.catalog.information_schema = true".into(),
        "SHOW TABLES".into(),
        "SHOW ALL".into(),
        "EXPLAIN SELECT * FROM interactions".into(),
        "EXPLAIN ANALYZE SELECT * FROM interactions".into(),
        "DESCRIBE interactions".into(),
        "PREPARE p AS SELECT 1".into(),
        "EXECUTE p".into(),
        "BEGIN".into(),
        "RESET datafusion.execution.batch_size".into(),
        "SELECT 1; SELECT 2".into(),
        "SELECT 1; DROP TABLE interactions".into(),
        "SELECT * INTO t FROM interactions".into(),
        "WITH x AS (INSERT INTO interactions SELECT * FROM interactions) SELECT 1".into(),
        String::new(),
        ";".into(),
        "not sql".into(),
    ] {
        let e = lake.sql(&app(), &query, &SqlLimits::default()).await.err();
        assert_eq!(e.map(|e| (e.kind, e.code)), Some((ErrorKind::Invalid, "bad_query")), "{query}");
    }
    assert!(!outside.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_but_the_views_exists() {
    let dir = tempfile::tempdir().unwrap();
    let lake = two_apps(dir.path()).await;
    let file = walk(&dir.path().join("tables/interactions")).into_iter().find(|f| f.ends_with(".parquet")).unwrap();
    for query in [
        format!("SELECT * FROM '{file}'"),
        format!("SELECT * FROM \"{file}\""),
        format!("SELECT * FROM 'file://{file}'"),
        format!("SELECT * FROM read_parquet('{file}')"),
        format!("SELECT * FROM parquet_metadata('{file}')"),
        "SELECT * FROM '/etc/passwd'".into(),
        "SELECT * FROM read_csv('/etc/passwd')".into(),
        "SELECT * FROM information_schema.tables".into(),
        "SELECT * FROM information_schema.df_settings".into(),
        "SELECT * FROM lake.information_schema.columns".into(),
        "SELECT * FROM datafusion.public.interactions".into(),
        "SELECT * FROM generate_series(1, 1000000000000)".into(),
        "SELECT * FROM range(1, 10)".into(),
        "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT * FROM t".into(),
        "SELECT read_file('/etc/passwd')".into(),
        "SELECT getenv('HOME')".into(),
        // one call of these can take gigabytes or minutes
        "SELECT repeat('x', 2000000000)".into(),
        "SELECT lpad('x', 2000000000), rpad('x', 2000000000)".into(),
        "SELECT range(0, 10000000000)".into(),
        "SELECT unnest(generate_series(0, 10000000000))".into(),
        "SELECT array_repeat(1, 2000000000)".into(),
        "SELECT list_repeat(1, 2000000000), list_resize([1], 2000000000)".into(),
        "SELECT levenshtein(question_text, answer_text) FROM interactions".into(),
        "SELECT array_agg(answer_text) OVER (ORDER BY received_at) FROM interactions".into(),
        "SELECT * FROM (SELECT string_agg(answer_text, ',') OVER (PARTITION BY trust) AS s FROM interactions)".into(),
        "SELECT * FROM interactions WHERE interaction_id = $1".into(),
    ] {
        let e = lake.sql(&app(), &query, &SqlLimits::default()).await.err();
        assert_eq!(e.as_ref().map(|e| e.kind), Some(ErrorKind::Invalid), "{query}: {e:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_query_sees_rows_of_another_app() {
    let dir = tempfile::tempdir().unwrap();
    let lake = two_apps(dir.path()).await;
    for query in [
        "SELECT * FROM interactions",
        "SELECT * FROM lake.app.interactions",
        "SELECT * FROM \"interactions\" AS i",
        "SELECT * FROM interactions WHERE app = 'victim' OR app = 'support-app'",
        "SELECT * FROM interactions WHERE app = 'victim'",
        "SELECT * FROM interactions WHERE app <> 'support-app' OR true",
        "SELECT * FROM (SELECT * FROM interactions WHERE 1 = 1 OR app = 'victim') x",
        "WITH interactions AS (SELECT * FROM interactions) SELECT * FROM interactions",
        "WITH i AS (SELECT * FROM lake.app.interactions) SELECT * FROM i UNION ALL SELECT * FROM i",
        "SELECT * FROM interactions UNION SELECT * FROM interactions",
        "SELECT a.* FROM interactions a FULL OUTER JOIN interactions b ON a.app <> b.app",
        "SELECT b.* FROM interactions a CROSS JOIN interactions b",
        "SELECT a.* FROM interactions a LEFT JOIN interactions b ON false",
        "SELECT * FROM interactions i WHERE EXISTS (SELECT 1 FROM interactions j WHERE j.app <> i.app OR true)",
        "SELECT *, (SELECT max(answer_text) FROM interactions) AS m FROM interactions",
        "SELECT * FROM interactions, LATERAL (SELECT 1) AS l",
        "SELECT app, answer_text, interaction_id FROM interactions ORDER BY app DESC LIMIT 100",
        "SELECT max(app) AS app, max(question_text), max(interaction_id), count(*) FROM interactions",
        "SELECT app, count(*) FROM interactions GROUP BY ROLLUP (app)",
        "SELECT first_value(app) OVER (ORDER BY app DESC) AS f, interaction_id FROM interactions",
    ] {
        let result = lake.sql(&app(), query, &SqlLimits::default()).await.unwrap_or_else(|e| panic!("{query}: {e}"));
        let text = serde_json::to_string(&result.to_json().unwrap()).unwrap();
        for word in ["victim", "theirs", "secret"] {
            assert!(!text.contains(word), "{query} showed {text}");
        }
    }
    let n = crate::support::number(&lake, &app(), "SELECT count(*) FROM interactions").await;
    assert_eq!(n, 2, "and it sees its own rows");
    // Dispositions of the other app are counts of the other app.
    let n = crate::support::number(&lake, &app(), "SELECT sum(items) FROM dispositions").await;
    assert_eq!(n, 2);
}

fn saved(of: &[(&str, &str)]) -> QueryScope {
    let views = of.iter().map(|(name, query)| SavedView { name: (*name).into(), query: (*query).into() }).collect();
    QueryScope { app: app(), now: Some(at(30)), views }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_saved_view_shows_no_more_than_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let lake = two_apps(dir.path()).await;
    let limits = SqlLimits::default();
    for query in [
        "SELECT * FROM interactions",
        "SELECT * FROM lake.app.interactions WHERE app = 'victim' OR true",
        "WITH interactions AS (SELECT * FROM interactions) SELECT * FROM interactions",
    ] {
        let scope = saved(&[("v", query)]);
        let view = &scope.views[0];
        assert!(lake.check_view(&app(), view).await.is_ok(), "{query}");
        for outer in ["SELECT * FROM v", "SELECT * FROM lake.app.v WHERE app <> 'support-app' OR true"] {
            let result = lake.sql(scope.clone(), outer, &limits).await.unwrap();
            assert_eq!(result.rows(), 2, "{query}");
            let text = serde_json::to_string(&result.to_json().unwrap()).unwrap();
            assert!(!text.contains("victim") && !text.contains("secret"), "{query} showed {text}");
        }
    }
    // what is no SELECT over the tables is refused when it is saved, and again when it is used
    for query in
        ["DROP TABLE interactions", "SELECT 1; SELECT 2", "SELECT * FROM '/etc/passwd'", "SELECT * FROM v", "", "v"]
    {
        let scope = saved(&[("v", query)]);
        let view = &scope.views[0];
        assert_eq!(lake.check_view(&app(), view).await.unwrap_err().code, "bad_query", "{query}");
        assert_eq!(lake.sql(scope, "SELECT * FROM v", &limits).await.unwrap_err().code, "bad_query", "{query}");
    }
    // tables and built-in views cannot be hidden, and a name is no SQL
    let scope = saved(&[
        ("interactions", "SELECT 'x' AS interaction_id"),
        ("intake_24h", "SELECT 'x' AS source"),
        ("a\" CROSS JOIN \"interactions", "SELECT 1 AS one"),
    ]);
    let n = lake.sql(scope.clone(), "SELECT interaction_id FROM interactions", &limits).await.unwrap().rows();
    assert_eq!(n, 2);
    assert!(lake.view(scope.clone(), "intake_24h", &limits).await.unwrap().schema.column_with_name("items").is_some());
    let e = lake.view(scope, "a\" CROSS JOIN \"interactions", &limits).await.unwrap_err();
    assert_eq!(e.code, "bad_query");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_cut_or_cancel() {
    let dir = tempfile::tempdir().unwrap();
    let lake = open(dir.path()).await;
    let events = (0..500).map(|i| answer(&format!("i{i}"), at(0))).collect();
    Device::new(1).send(&lake, 1, at(0), events).await.unwrap();
    let limits = SqlLimits { max_rows: 10, ..SqlLimits::default() };
    let got = lake.sql(&app(), "SELECT interaction_id FROM interactions", &limits).await.unwrap();
    assert_eq!((got.rows(), got.truncated), (10, true));
    let got = lake.sql(&app(), "SELECT interaction_id FROM interactions LIMIT 10", &limits).await.unwrap();
    assert_eq!((got.rows(), got.truncated), (10, false));
    let limits = SqlLimits { max_bytes: 1000, ..SqlLimits::default() };
    assert!(lake.sql(&app(), "SELECT * FROM interactions", &limits).await.unwrap().truncated);
    let limits = SqlLimits { timeout: std::time::Duration::from_millis(300), ..SqlLimits::default() };
    let slow = "SELECT count(*) FROM interactions a, interactions b, interactions c, interactions d \
                WHERE a.ttft_ms + b.ttft_ms + c.ttft_ms + d.ttft_ms < 0";
    let begin = std::time::Instant::now();
    let e = lake.sql(&app(), slow, &limits).await.unwrap_err();
    assert_eq!((e.kind, e.code), (ErrorKind::Unavailable, "query_timeout"));
    assert!(begin.elapsed() < std::time::Duration::from_secs(5), "{:?}", begin.elapsed());
    let long = format!("SELECT '{}'", "x".repeat(40 << 10));
    assert_eq!(lake.sql(&app(), &long, &SqlLimits::default()).await.unwrap_err().code, "bad_query");
    let deep = format!("SELECT {}1{}", "(".repeat(5000), ")".repeat(5000));
    assert_eq!(lake.sql(&app(), &deep, &SqlLimits::default()).await.unwrap_err().kind, ErrorKind::Invalid);
}

fn walk(dir: &Path) -> Vec<String> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(walk(&path));
        } else {
            out.push(path.display().to_string());
        }
    }
    out
}
