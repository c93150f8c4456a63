//! Points of a server's work at which it can be killed, as its files show them (inotify): nothing of the server is changed for
//! the test, and no time is guessed.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::collections::HashMap;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Tables that the phones fill.
pub const TABLES: [&str; 5] = ["interactions", "feedback", "device_events", "dispositions", "rejects"];

/// Something the server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    /// Nothing in particular: after some acknowledgements.
    Anywhere,
    /// A Parquet file is begun: inside a commit or a join.
    DataFile,
    /// A table has a new version, the others may not have theirs yet.
    Commit,
    /// Files of a table are read to be joined.
    Join,
    /// Joined files were committed.
    Joined,
    /// A checkpoint of a table is being written.
    Checkpoint,
    /// The write-ahead log begins a new file.
    Rotation,
    /// The duplicate state is being saved, before log files go.
    Snapshot,
    /// A log file was deleted.
    Freed,
}

impl Point {
    pub const ALL: [Self; 9] = [
        Self::Anywhere,
        Self::DataFile,
        Self::Commit,
        Self::Join,
        Self::Joined,
        Self::Checkpoint,
        Self::Rotation,
        Self::Snapshot,
        Self::Freed,
    ];

    /// Comes several times a second.
    pub fn is_frequent(self) -> bool {
        matches!(self, Self::DataFile | Self::Commit | Self::Join | Self::Rotation)
    }
}

#[derive(Debug, Clone)]
enum Place {
    Log,
    Versions(PathBuf),
    Partition,
}

/// Watches the folders of a lake.
pub struct Watch {
    notify: OwnedFd,
    places: HashMap<i32, Place>,
}

impl Watch {
    /// Of the lake in `folder`, as far as its folders are there.
    pub fn start(folder: &Path) -> Self {
        let notify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        let mut places = HashMap::new();
        let mut add = |path: &Path, place: Place, events: WatchFlags| {
            places.insert(inotify::add_watch(&notify, path, events).unwrap(), place);
        };
        let changes = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        add(&folder.join("log"), Place::Log, changes);
        for table in TABLES {
            let table = folder.join("tables").join(table);
            let versions = table.join("_delta_log");
            add(&versions, Place::Versions(versions.clone()), changes);
            for day in folders(&table).iter().flat_map(|app| folders(app)) {
                add(&day, Place::Partition, changes | WatchFlags::OPEN);
            }
        }
        Self { notify, places }
    }

    /// Waits until `point` came for the `times`-th time from now on; whether it did within `patience`.
    pub fn wait(&self, point: Point, times: u64, patience: Duration) -> bool {
        let mut buffer = vec![MaybeUninit::uninit(); 64 << 10];
        let mut reader = Reader::new(&self.notify, &mut buffer);
        let deadline = Instant::now() + patience;
        let mut left = times;
        while left > 0 {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().and_then(|n| n.to_str().ok()).unwrap_or_default();
                    if self.places.get(&event.wd()).is_some_and(|p| is_at(point, p, event.events(), name)) {
                        left -= 1;
                    }
                }
                Err(rustix::io::Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(e) => panic!("inotify: {e}"),
            }
        }
        true
    }
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().map(|e| e.unwrap().path());
    entries.filter(|p| p.is_dir() && !p.ends_with("_delta_log")).collect()
}

fn is_at(point: Point, place: &Place, events: ReadFlags, name: &str) -> bool {
    let made = events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
    let wal = name.starts_with("wal-");
    match (point, place) {
        // written under another name first
        (Point::DataFile, Place::Partition) => made && name.contains(".parquet#"),
        (Point::Join, Place::Partition) => events.contains(ReadFlags::OPEN) && name.ends_with(".parquet"),
        (Point::Commit, Place::Versions(_)) => made && name.ends_with(".json"),
        (Point::Joined, Place::Versions(folder)) => {
            made && name.ends_with(".json")
                && fs::read_to_string(folder.join(name)).is_ok_and(|t| t.contains("\"OPTIMIZE\""))
        }
        (Point::Checkpoint, Place::Versions(_)) => made && name.contains(".checkpoint"),
        (Point::Rotation, Place::Log) => events.contains(ReadFlags::CREATE) && wal,
        (Point::Freed, Place::Log) => events.contains(ReadFlags::DELETE) && wal,
        (Point::Snapshot, Place::Log) => events.contains(ReadFlags::CREATE) && name == "dedup.snap.tmp",
        _ => false,
    }
}
