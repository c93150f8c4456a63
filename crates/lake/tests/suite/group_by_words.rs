//! Aggregations by columns of words answer what the straightforward query answers: over several files, rows that are only
//! acknowledged, NULLs, filters that some row groups meet as a whole, and more groups than are held at once.

use crate::support::{Device, answer, app, at, config};
use flywheel_lake::{Lake, LakeConfig, SqlLimits, Table};
use flywheel_telemetry::column::Micros;
use flywheel_telemetry::rows::InteractionRow;
use futures::stream;

/// Rows of one commit; a row group has 131,072.
const ROWS: u64 = 200_000;

/// Spread enough that nothing lines up.
fn mixed(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn word(kind: &str, n: u64) -> Option<std::borrow::Cow<'static, str>> {
    (n > 0).then(|| format!("{kind}-{n}").into())
}

fn row(n: u64, of: &'static str) -> InteractionRow<'static> {
    let r = mixed(n);
    let received = Micros(at(0).timestamp_micros() + n as i64 * 1000);
    InteractionRow {
        app: of.into(),
        received_date: received.day(),
        received_at: received,
        occurred_at: received,
        source: "events".into(),
        trust: "anonymous".into(),
        interaction_id: format!("i-{n}").into(),
        install_id: word("phone", r % 5000),
        template_id: word("template", (r >> 8) % 40),
        bundle: word("bundle", (r >> 16) % (1 + n / ROWS * 3)),
        device_class: word("class", (r >> 24) % 9),
        // many: more combinations with the template than are looked up in an array
        template_hash: word("hash", (r >> 20) % 30_000),
        ttft_ms: (!r.is_multiple_of(7)).then_some((r >> 32) as f64 / 1e6),
        output_tokens: Some((r >> 40) as i64 % 200),
        ..InteractionRow::default()
    }
}

async fn filled(dir: &std::path::Path) -> Lake {
    // the straightforward way needs much more
    let lake = Lake::open(LakeConfig { query_memory_bytes: 2 << 30, ..config(dir) }).await.unwrap();
    for commit in 0..3 {
        let numbers: Vec<u64> = (commit * ROWS..(commit + 1) * ROWS).collect();
        let batches: Vec<_> = numbers
            .chunks(10_000)
            .flat_map(|part| {
                let mine: Vec<_> = part.iter().map(|n| row(*n, "support-app")).collect();
                let other: Vec<_> = part.iter().step_by(10).map(|n| row(*n, "other-app")).collect();
                [InteractionRow::encode(&mine).unwrap(), InteractionRow::encode(&other).unwrap()]
            })
            .collect();
        assert!(lake.append_bulk(Table::Interactions, "test", commit + 1, stream::iter(batches)).await.unwrap());
    }
    assert!(!lake.append_bulk(Table::Interactions, "test", 3, stream::iter([])).await.unwrap(), "it is there already");
    // rows that are in the log alone
    let device = Device::new(1);
    let events = (0..50).map(|n| answer(&format!("fresh-{n}"), at(1))).collect();
    device.send(&lake, 1, at(1), events).await.unwrap();
    lake
}

async fn sql(lake: &Lake, query: &str) -> Vec<serde_json::Value> {
    let limits = SqlLimits {
        max_rows: 2_000_000,
        max_bytes: 1 << 30,
        timeout: std::time::Duration::from_secs(120),
        ..SqlLimits::default()
    };
    lake.sql(&app(), query, &limits).await.unwrap_or_else(|e| panic!("{query}: {e} {:?}", e.inside)).to_json().unwrap()
}

/// The same query by columns and by expressions that the fast way does not take.
async fn agrees(lake: &Lake, columns: &[&str], aggregates: &str, condition: &str) -> Vec<serde_json::Value> {
    let plain = columns.join(", ");
    let order = (1..=columns.len()).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
    let fast = format!("SELECT {plain}, {aggregates} FROM interactions {condition} GROUP BY {plain} ORDER BY {order}");
    let slow: Vec<String> = columns.iter().map(|c| format!("nullif({c}, 'no such word')")).collect();
    let names: Vec<String> = slow.iter().zip(columns).map(|(s, c)| format!("{s} AS {c}")).collect();
    let slow = format!(
        "SELECT {}, {aggregates} FROM interactions {condition} GROUP BY {} ORDER BY {order}",
        names.join(", "),
        slow.join(", ")
    );
    let (fast, slow) = (sql(lake, &fast).await, sql(lake, &slow).await);
    assert!(fast == slow, "{columns:?} {aggregates} {condition}: {} and {} groups", fast.len(), slow.len());
    fast
}

#[tokio::test]
async fn fast_and_straightforward_answers_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let lake = filled(dir.path()).await;
    let of = ["template_id", "bundle", "device_class"];
    let all = agrees(&lake, &of, "count(*) AS n", "").await;
    let total: i64 = all.iter().map(|r| r["n"].as_i64().unwrap()).sum();
    assert_eq!(total, 3 * ROWS as i64 + 50, "every row of the app once, and none of another");
    assert!(all.iter().any(|r| r.get("bundle").is_none()), "NULL is a group");
    let moment = |ms: i64| {
        let at = at(0) + chrono::Duration::milliseconds(ms);
        format!("WHERE received_at > TIMESTAMP '{}'", at.format("%Y-%m-%dT%H:%M:%S%.3fZ"))
    };
    // in the middle of a row group, between two, before and after all
    for ms in [300_000, 131_072, -1, 100_000_000] {
        agrees(&lake, &of, "count(*) AS n, min(ttft_ms) AS least, max(output_tokens) AS most", &moment(ms)).await;
    }
    let several = "count(*) AS n, count(template_id) AS t, sum(output_tokens) AS s, count(*) FILTER (WHERE bundle = 'bundle-1') AS b";
    agrees(&lake, &["device_class"], several, "").await;
    agrees(&lake, &["template_id"], several, "WHERE template_id LIKE '%-1_' OR bundle IS NULL").await;
    agrees(&lake, &["bundle", "template_id"], several, "WHERE ttft_ms > 2000 AND device_class <> 'class-3'").await;
    agrees(&lake, &["arm", "rollout_id"], several, "").await;
    let many =
        agrees(&lake, &["template_hash", "template_id"], "count(*) AS n, count(DISTINCT install_id) AS i", "").await;
    assert!(many.len() > 200_000, "{}", many.len());
    lake.flush().await.unwrap();
    assert_eq!(agrees(&lake, &of, "count(*) AS n", "").await, all, "the same rows from the table");
}
