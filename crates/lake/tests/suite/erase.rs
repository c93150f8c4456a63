//! Erasure of a person: afterwards no file of the lake holds a key or an interaction id of theirs, whether in the clear or inside
//! Parquet; everybody else's rows are there once; readers of version ranges see no new rows.

use crate::support::{Device, answer, app, at, config, feedback, interaction, number, open};
use chrono::{DateTime, Utc};
use deltalake::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use flywheel_lake::{Erasure, Lake, Subjects, Table, Versions};
use flywheel_telemetry::UserKeys;
use flywheel_types::LabelKind;
use flywheel_types::wire::{EventV1, FeedbackV1, InteractionV1};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn key(user: &str) -> String {
    UserKeys::new(&[0; 32]).key(&app(), user).unwrap()
}

fn by(user: &str, id: &str, when: DateTime<Utc>) -> EventV1 {
    EventV1::Interaction(InteractionV1 { user_id: Some(user.into()), ..interaction(id, when) })
}

fn of(user: &str) -> Subjects {
    Subjects { users: [key(user)].into(), ..Subjects::default() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { out.extend(files(&path)) } else { out.push(path) }
    }
    out
}

/// The file as it is, and what is inside when it is Parquet.
fn content(path: &Path) -> String {
    let mut text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    if path.extension().is_some_and(|e| e == "parquet") {
        let reader = ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(path).unwrap()).unwrap();
        for batch in reader.build().unwrap() {
            let mut json = arrow::json::LineDelimitedWriter::new(Vec::new());
            json.write(&batch.unwrap()).unwrap();
            text.push_str(&String::from_utf8(json.into_inner()).unwrap());
        }
    }
    text
}

/// Files that name one of `needles`.
fn naming(folder: &Path, needles: &[&str]) -> Vec<PathBuf> {
    let named = |p: &PathBuf| needles.iter().any(|n| content(p).contains(n));
    files(folder).into_iter().filter(named).collect()
}

/// All parts of an erasure, as the pipeline's step calls them.
async fn erase(lake: &Lake, who: &Subjects, held: &Subjects) -> std::collections::BTreeMap<&'static str, (u64, u64)> {
    lake.flush().await.unwrap();
    let interactions = lake.interactions_of(&app(), who, held).await.unwrap();
    let erasure = Erasure { who: who.clone(), held: held.clone(), interactions };
    let removed = lake.erase(&app(), &erasure).await.unwrap();
    lake.purge_log().await.unwrap();
    let files = lake.superseded_files(&app(), DateTime::<Utc>::MAX_UTC).await.unwrap();
    lake.delete_superseded(files).await.unwrap();
    removed.into_iter().filter(|(_, r)| r.rows + r.held > 0).map(|(t, r)| (t, (r.rows, r.held))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_in_the_lake_names_an_erased_person() {
    let dir = tempfile::tempdir().unwrap();
    let (phone, other) = (Device::new(1), Device::new(2));
    let lake = open(dir.path()).await;
    let day = |n: i64| at(n * 24 * 60);
    // several days and files, joined and not, labels from her and from a stranger, and a record that names her answer
    for n in 0..3 {
        let events = vec![by("anna", &format!("anna-{n}"), day(n)), by("bert", &format!("bert-{n}"), day(n))];
        phone.send(&lake, n as u64 + 1, day(n), events).await.unwrap();
        let labels =
            vec![feedback(&format!("anna-{n}"), LabelKind::Rejected, day(n)), answer(&format!("o-{n}"), day(n))];
        other.send(&lake, n as u64 + 1, day(n), labels).await.unwrap();
        lake.flush().await.unwrap();
    }
    lake.outcomes_advance(&app(), &Versions::default(), &lake.versions()).await.unwrap();
    lake.compact(Table::Interactions).await.unwrap();
    let mut bad = by("anna", "anna-3", day(2));
    if let EventV1::Interaction(x) = &mut bad {
        x.retrieval = vec![x.retrieval[0].clone(); 200];
    }
    let own = EventV1::Feedback(FeedbackV1 {
        interaction_id: "anna-0".parse().unwrap(),
        at: day(2),
        label: LabelKind::Rejected,
        reason: None,
        user_id: Some("anna".into()),
    });
    phone.send(&lake, 9, day(2), vec![own, bad]).await.unwrap();
    let before = lake.version(Table::Interactions);
    let needles = ["anna-0", "anna-1", "anna-2", &key("anna")];
    assert!(naming(dir.path(), &needles).len() >= 5, "{:?}", naming(dir.path(), &needles));

    let done = erase(&lake, &of("anna"), &Subjects::default()).await;
    assert_eq!(done["interactions"], (3, 0));
    assert_eq!(done["feedback"], (4, 0), "also what others said of her answers");
    assert_eq!(naming(dir.path(), &needles), Vec::<PathBuf>::new());
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions").await, 6);
    let bert = "SELECT count(DISTINCT interaction_id) FROM interactions WHERE interaction_id LIKE 'bert-%'";
    assert_eq!(number(&lake, &app(), bert).await, 3);
    let gained = lake.rows_between(&app(), Table::Interactions, before, lake.version(Table::Interactions)).await;
    assert!(gained.unwrap().is_empty(), "rows that were written again are not new");
    assert_eq!(erase(&lake, &of("anna"), &Subjects::default()).await, [].into(), "it can be repeated");
    // her retries are still known, and a restart finds a whole lake
    let again = phone.send(&lake, 1, day(3), vec![by("anna", "anna-0", day(0))]).await.unwrap();
    assert!(again.duplicate_batch);
    drop(lake);
    let lake = open(dir.path()).await;
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions").await, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_is_erased_except_for_whom_a_hold_protects() {
    let dir = tempfile::tempdir().unwrap();
    let (phone, other) = (Device::new(1), Device::new(2));
    let lake = open(dir.path()).await;
    phone
        .send(&lake, 1, at(0), vec![by("anna", "of-a-1-only", at(0)), by("bert", "of-b-1-only", at(0))])
        .await
        .unwrap();
    phone.send(&lake, 2, at(1), vec![feedback("of-b-1-only", LabelKind::Rejected, at(1))]).await.unwrap();
    other.send(&lake, 1, at(1), vec![answer("of-o-1-only", at(1)), by("anna", "of-a-2-only", at(1))]).await.unwrap();
    let device = Subjects { installs: [phone.install.to_string()].into(), ..Subjects::default() };
    let done = erase(&lake, &device, &of("anna")).await;
    assert_eq!(done["interactions"], (1, 1), "bert's goes, anna's is held");
    assert_eq!(done["feedback"], (1, 0));
    let left =
        "SELECT count(*) FROM interactions WHERE interaction_id IN ('of-a-1-only', 'of-a-2-only', 'of-o-1-only')";
    assert_eq!(number(&lake, &app(), left).await, 3);
    assert_eq!(naming(dir.path(), &["of-b-1-only"]), Vec::<PathBuf>::new());
    let done = erase(&lake, &device, &Subjects::default()).await;
    assert_eq!(done["interactions"], (1, 0), "the hold was lifted");
    assert_eq!(naming(dir.path(), &["of-a-1-only", &phone.install.to_string()]), Vec::<PathBuf>::new());
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions").await, 2);
}

/// Intake, commits and compaction go on while people are erased: nothing acknowledged of others is lost or doubled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasures_run_beside_intake_and_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let quick =
        flywheel_lake::LakeConfig { commit_interval: std::time::Duration::from_millis(50), ..config(dir.path()) };
    let lake = Arc::new(Lake::open(quick).await.unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, joiner) = (Arc::clone(&lake), Arc::clone(&lake));
    let (stop_writing, stop_joining) = (Arc::clone(&stop), Arc::clone(&stop));
    let writing = tokio::spawn(async move {
        let (device, mut seq) = (Device::new(7), 0);
        while !stop_writing.load(Ordering::Relaxed) {
            seq += 1;
            let events = vec![answer(&format!("w-{seq}"), at(0)), by("bert", &format!("bert-{seq}"), at(0))];
            device.send(&writer, seq, at(0), events).await.unwrap();
        }
        seq
    });
    let joining = tokio::spawn(async move {
        while !stop_joining.load(Ordering::Relaxed) {
            joiner.compact(Table::Interactions).await.unwrap();
        }
    });
    let phone = Device::new(8);
    for round in 0..5u64 {
        let user = format!("user-{round}");
        let ids: Vec<String> = (0..20).map(|i| format!("gone-{round}-{i}")).collect();
        for (i, id) in ids.iter().enumerate() {
            phone.send(&lake, round * 20 + i as u64 + 1, at(0), vec![by(&user, id, at(0))]).await.unwrap();
        }
        let done = erase(&lake, &of(&user), &Subjects::default()).await;
        assert_eq!(done["interactions"], (20, 0));
    }
    stop.store(true, Ordering::Relaxed);
    let batches = writing.await.unwrap();
    joining.await.unwrap();
    lake.flush().await.unwrap();
    let mut needles: Vec<String> = (0..5).map(|round| format!("gone-{round}-")).collect();
    needles.extend((0..5).map(|round| key(&format!("user-{round}"))));
    let needles: Vec<&str> = needles.iter().map(String::as_str).collect();
    assert_eq!(naming(dir.path(), &needles), Vec::<PathBuf>::new());
    let expected = i64::try_from(batches * 2).unwrap();
    assert_eq!(number(&lake, &app(), "SELECT count(*) FROM interactions").await, expected);
    assert_eq!(number(&lake, &app(), "SELECT count(DISTINCT interaction_id) FROM interactions").await, expected);
}
