//! History from files: stored once whatever it is called and however often the work breaks off, beside everything else that
//! happens to the tables.

use crate::support::{Device, answer, app, at, number, open};
use arrow::array::{ArrayRef, Float64Array, Int32Array, RecordBatch, StringArray, TimestampMicrosecondArray};
use deltalake::parquet::arrow::ArrowWriter;
use deltalake::parquet::file::properties::WriterProperties;
use flywheel_lake::import::{Observer, Report, Request, Source};
use flywheel_lake::{Lake, Table, Versions};
use flywheel_types::{AppId, Error};
use serde_json::json;
use std::fs;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const COUNT: &str = "SELECT count(*) FROM interactions";
const DISTINCT: &str = "SELECT count(DISTINCT interaction_id) FROM interactions";
const ITEMS: &str = "SELECT sum(items) FROM dispositions";
const DAY_US: i64 = 86_400_000_000;

/// `n` answers, `days` of them in turn; every 100th has a wrong id.
fn answers(n: usize, days: i64) -> RecordBatch {
    let ids = (0..n).map(|i| if i % 100 == 99 { "not an id".to_owned() } else { format!("h-{i}") });
    let start = at(0).timestamp_micros() - 100 * DAY_US;
    let times = (0..n).map(|i| start + i as i64 % days * DAY_US + i as i64);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("interaction_id", Arc::new(StringArray::from_iter_values(ids))),
        ("event_at", Arc::new(TimestampMicrosecondArray::from_iter_values(times).with_timezone("UTC"))),
        ("ttft_ms", Arc::new(Float64Array::from_iter_values((0..n).map(|i| i as f64)))),
        ("battery", Arc::new(Int32Array::from_iter_values((0..n).map(|i| i as i32 % 100)))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn write(path: &Path, rows: &RecordBatch) {
    // small row groups, so that pieces begin inside and between them
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(300)).build();
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), rows.schema(), Some(properties)).unwrap();
    writer.write(rows).unwrap();
    writer.close().unwrap();
}

fn request(folder: &Path, app: &AppId, table: Option<Table>) -> Request {
    let url = url::Url::from_directory_path(folder).unwrap().to_string();
    let source = Source::open(&url, std::slice::from_ref(&url), []).unwrap();
    Request { app: app.clone(), source, table, form: None, start: at(0), piece_rows: 1000 }
}

async fn import(lake: &Lake, folder: &Path, table: Option<Table>) -> Result<Report, Error> {
    lake.importer().run(request(folder, &app(), table), Arc::new(|_| ControlFlow::Continue(()))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_bytes_are_stored_once_for_each_app() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lake = open(dir.path()).await;
    write(&files.path().join("a.parquet"), &answers(2500, 3));
    fs::create_dir_all(files.path().join("_delta_log")).unwrap();
    fs::write(files.path().join("_delta_log/0.json"), "{}").unwrap();
    fs::write(files.path().join("notes.csv"), "a,b").unwrap();
    let first = import(&lake, files.path(), Some(Table::Interactions)).await.unwrap();
    assert_eq!((first.objects, first.done, first.rows, first.already), (2, 2, 2500, 0));
    assert_eq!(json!(first.stored), json!({ "interactions": 2475 }));
    assert_eq!(json!(first.quarantined), json!({ "bad_interaction_id": 25 }));
    assert_eq!((first.passed_over, &first.passed_over_first[..]), (1, &["notes.csv".to_owned()][..]));
    assert_eq!((number(&lake, &app(), COUNT).await, number(&lake, &app(), DISTINCT).await), (2475, 2475));
    assert_eq!(number(&lake, &app(), ITEMS).await, 2500);
    let query = "SELECT count(*) FROM interactions WHERE trust = 'anonymous' AND source = 'import' AND \
                 received_at = event_at AND received_date = CAST(received_at AS DATE) AND attrs['battery'] IS NOT NULL";
    assert_eq!(number(&lake, &app(), query).await, 2475);
    assert_eq!(number(&lake, &app(), "SELECT count(DISTINCT received_date) FROM interactions").await, 3);
    assert_eq!(number(&lake, &app(), "SELECT CAST(sum(ttft_ms) AS BIGINT) FROM interactions").await, {
        (0..2500).filter(|i| i % 100 != 99).sum::<i64>()
    });
    let shown = "SELECT count(*) FROM rejects WHERE source = 'import' AND detail LIKE 'a.parquet: row 100: %'";
    assert_eq!(number(&lake, &app(), shown).await, 1);

    let before = lake.versions();
    fs::rename(files.path().join("a.parquet"), files.path().join("b.parquet")).unwrap();
    let again = import(&lake, files.path(), Some(Table::Interactions)).await.unwrap();
    assert_eq!((again.rows, again.already, again.failed.len()), (0, 2500, 0));
    assert_eq!(lake.versions(), before, "a repetition commits nothing");

    let other = AppId::new("other-app").unwrap();
    let theirs = request(files.path(), &other, Some(Table::Interactions));
    let report = lake.importer().run(theirs, Arc::new(|_| ControlFlow::Continue(()))).await.unwrap();
    assert_eq!(report.rows, 2500);
    assert_eq!((number(&lake, &other, COUNT).await, number(&lake, &app(), COUNT).await), (2475, 2475));
    drop(lake);
    let lake = open(dir.path()).await;
    assert_eq!(import(&lake, files.path(), Some(Table::Interactions)).await.unwrap().already, 2500);
    assert_eq!(number(&lake, &app(), COUNT).await, 2475);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_was_broken_off_goes_on_with_its_next_piece() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(&files.path().join("a.parquet"), &answers(3500, 1));
    let line = |i: usize| {
        format!(
            "{{\"kind\":\"feedback\",\"interaction_id\":\"h-{i}\",\"at\":\"2025-12-01T00:00:00Z\",\"label\":\"rejected\"}}\n"
        )
    };
    fs::write(files.path().join("b.jsonl"), (0..2200).map(line).collect::<String>()).unwrap();
    let (mut stops, mut already) = (0, 0);
    // stops after each piece that it commits, until there is none left
    loop {
        let lake = open(dir.path()).await;
        let stop: Observer =
            Arc::new(|r: &Report| if r.rows > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
        let got = lake.importer().run(request(files.path(), &app(), Some(Table::Interactions)), stop).await;
        let n = number(&lake, &app(), "SELECT sum(items) FROM dispositions").await;
        match got {
            Ok(report) => {
                assert_eq!((report.rows, report.already), (0, 5700));
                break;
            }
            Err(e) => assert_eq!(e.code, "import_stopped"),
        }
        assert!(n > already, "{n} rows after {already}");
        (stops, already) = (stops + 1, n);
    }
    assert_eq!((stops, already), (7, 5700));
    let lake = open(dir.path()).await;
    assert_eq!((number(&lake, &app(), COUNT).await, number(&lake, &app(), DISTINCT).await), (3465, 3465));
    let distinct = "SELECT count(DISTINCT interaction_id) FROM feedback";
    assert_eq!(
        (number(&lake, &app(), distinct).await, number(&lake, &app(), "SELECT count(*) FROM feedback").await),
        (2200, 2200)
    );
    // history is for queries: no step takes it for telemetry that came late
    let upto = lake.versions();
    let gained = lake.rows_between(&app(), Table::Interactions, 0, upto.interactions).await.unwrap();
    assert_eq!(gained.iter().map(RecordBatch::num_rows).sum::<usize>(), 0);
    assert_eq!(lake.outcomes_advance(&app(), &Versions::default(), &upto).await.unwrap(), 0);
    let due = lake.interaction_batch_after(&app(), 0, at(-1), at(60), chrono::Duration::zero(), &upto).await.unwrap();
    assert_eq!(due.1.interaction.len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_rows_and_their_counts_doubles_neither() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(&files.path().join("a.parquet"), &answers(1500, 2));
    let lake = open(dir.path()).await;
    import(&lake, files.path(), Some(Table::Interactions)).await.unwrap();
    drop(lake);
    // as if the process had died before the last commit of the counts
    let log = dir.path().join("tables/dispositions/_delta_log");
    let mut commits: Vec<_> = fs::read_dir(&log).unwrap().map(|e| e.unwrap().path()).collect();
    commits.retain(|p| p.extension().is_some_and(|e| e == "json"));
    commits.sort();
    fs::remove_file(commits.last().unwrap()).unwrap();
    let lake = open(dir.path()).await;
    assert_eq!(number(&lake, &app(), ITEMS).await, 1000);
    let before = lake.version(Table::Interactions);
    let report = import(&lake, files.path(), Some(Table::Interactions)).await.unwrap();
    assert_eq!((report.rows, report.already), (500, 1000));
    assert_eq!(lake.version(Table::Interactions), before, "the rows of the piece were there");
    assert_eq!((number(&lake, &app(), COUNT).await, number(&lake, &app(), ITEMS).await), (1485, 1500));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_cannot_be_read_costs_only_itself() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (lake, at) = (open(dir.path()).await, |name: &str| files.path().join(name));
    write(&at("b.parquet"), &answers(600, 1));
    let whole = fs::read(at("b.parquet")).unwrap();
    fs::write(at("a-cut.parquet"), &whole[..whole.len() / 2]).unwrap();
    fs::write(at("c-noise.parquet"), [b"PAR1", &vec![7u8; 500][..], b"PAR1"].concat()).unwrap();
    let mut flipped = whole.clone();
    flipped[200..4000].fill(0xff);
    fs::write(at("d-flipped.parquet"), flipped).unwrap();
    let strange = RecordBatch::try_from_iter([
        ("interaction_id", Arc::new(Float64Array::from(vec![1.5])) as ArrayRef),
        ("chunk_ids", Arc::new(Int32Array::from(vec![1])) as ArrayRef),
    ]);
    write(&at("e-strange.parquet"), &strange.unwrap());
    let line = "{\"kind\":\"device\",\"at\":\"2025-12-01T00:00:00Z\",\"event\":\"crashed\"}\n";
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    // more than a piece: none of it may be stored before the cut is found
    packed
        .write_all(&(0..5000).map(|i| line.replace("00Z", &format!("{:02}Z", i % 60))).collect::<String>().into_bytes())
        .unwrap();
    let packed = packed.finish().unwrap();
    fs::write(at("f-cut.jsonl.gz"), &packed[..packed.len() * 9 / 10]).unwrap();
    fs::write(at("g.jsonl"), line).unwrap();
    let report = import(&lake, files.path(), Some(Table::Interactions)).await.unwrap();
    let failed: Vec<&str> = report.failed.iter().map(|f| f.object.as_str()).collect();
    assert_eq!(
        failed,
        ["a-cut.parquet", "c-noise.parquet", "d-flipped.parquet", "e-strange.parquet", "f-cut.jsonl.gz"]
    );
    assert!(report.failed[3].reason.contains("chunk_ids"), "{:?}", report.failed[3]);
    assert_eq!((report.objects, report.done), (7, 7));
    assert_eq!(report.stored["interactions"], 594);
    assert_eq!(report.stored["device_events"], 1, "nothing of a file that was cut");
    assert!(report.failed.iter().all(|f| f.rows == 0), "{:?}", report.failed);
    assert_eq!(number(&lake, &app(), COUNT).await, 594);
    // repaired: only what is missing comes in
    fs::write(at("f-cut.jsonl.gz"), &packed).unwrap();
    let again = import(&lake, files.path(), None).await.unwrap();
    let failed: Vec<&str> = again.failed.iter().map(|f| f.object.as_str()).collect();
    assert_eq!(failed.len(), 5, "all Parquet files, because nothing says their table: {failed:?}");
    assert!(again.failed[0].reason.contains("`table`"), "{:?}", again.failed[0]);
    assert_eq!((again.stored["device_events"], again.already), (5000, 1));
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM device_events").await, 5001);
    let missing =
        lake.importer().run(request(&at("none"), &app(), None), Arc::new(|_| ControlFlow::Continue(()))).await;
    assert_eq!(missing.unwrap_err().code, "nothing_to_import");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_rows_vacuum_and_compaction_go_on_beside_an_import() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lake = Arc::new(open(dir.path()).await);
    write(&files.path().join("a.parquet"), &answers(12_000, 5));
    let running = {
        let (lake, files) = (Arc::clone(&lake), files.path().to_owned());
        tokio::spawn(async move { import(&lake, &files, Some(Table::Interactions)).await.unwrap() })
    };
    let (device, mut seq, mut last) = (Device::new(1), 0, 0);
    while !running.is_finished() || seq < 10 {
        seq += 1;
        device.send(&lake, seq, at(0), vec![answer(&format!("live-{seq}"), at(0))]).await.unwrap();
        lake.flush().await.unwrap();
        lake.vacuum(Table::Interactions, chrono::Duration::zero()).await.unwrap();
        if seq % 3 == 0 {
            lake.compact(Table::Interactions).await.unwrap();
        }
        let (n, distinct) = (number(&lake, &app(), COUNT).await, number(&lake, &app(), DISTINCT).await);
        assert!(n >= last && distinct >= n, "{n} rows after {last}, then {distinct} ids");
        last = n;
    }
    assert_eq!(running.await.unwrap().rows, 12_000);
    let expected = 11_880 + seq as i64;
    assert_eq!((number(&lake, &app(), COUNT).await, number(&lake, &app(), DISTINCT).await), (expected, expected));
    assert_eq!(number(&lake, &app(), ITEMS).await, 12_000 + seq as i64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_changes_while_it_is_read_is_refused() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lake = open(dir.path()).await;
    let line = "{\"kind\":\"device\",\"at\":\"2025-12-01T00:00:00Z\",\"event\":\"crashed\"}\n";
    let path = files.path().join("a.jsonl");
    fs::write(&path, line.repeat(1500)).unwrap();
    let (seen, growing) = (AtomicUsize::new(0), path.clone());
    // somebody appends after the first piece
    let grow: Observer = Arc::new(move |_: &Report| {
        if seen.fetch_add(1, Ordering::Relaxed) == 1 {
            fs::OpenOptions::new().append(true).open(&growing).unwrap().write_all(line.as_bytes()).unwrap();
        }
        ControlFlow::Continue(())
    });
    let report = lake.importer().run(request(files.path(), &app(), None), grow).await.unwrap();
    assert_eq!(report.failed.len(), 1, "{report:?}");
    assert!(report.failed[0].reason.contains("changed while it was read"), "{report:?}");
    assert_eq!((report.rows, report.failed[0].rows), (1000, 1000), "the piece before the change");
}
