//! Downloader tests with small chunks: every cut, every order of gaps.

use super::*;
use crate::transport::{Fault, MemoryHttp};
use flywheel_types::Digest;
use proptest::prelude::*;

const CHUNK: usize = 64;

fn blob_of(bytes: &[u8]) -> Blob {
    let sha256 = Digest::of(bytes);
    Blob {
        path: format!("blobs/{sha256}.bin"),
        length: bytes.len() as u64,
        sha256,
        chunk_size: CHUNK as u64,
        chunks: bytes.chunks(CHUNK).map(Digest::of).collect(),
    }
}

struct Free;
impl BlobControl for Free {
    fn may_continue(&self, _: u64) -> Result<(), Wait> {
        Ok(())
    }
    fn before_write(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

fn setup(bytes: &[u8]) -> (MemoryHttp, HttpBlobs, Blob, tempfile::TempDir) {
    let http = MemoryHttp::new();
    let blob = blob_of(bytes);
    let source = HttpBlobs::new(Arc::new(http.clone()), "http://h/t", Durability::Relaxed, 3);
    http.put(source.url(&blob), bytes.to_vec());
    (http, source, blob, tempfile::tempdir().unwrap())
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

#[test]
fn address_carries_the_digest_twice() {
    let (_, source, blob, _dir) = setup(b"x");
    let d = blob.sha256;
    assert_eq!(source.url(&blob), format!("http://h/t/blobs/{d}.{d}.bin"));
}

#[test]
fn empty_file_and_exact_multiples_work() {
    for len in [0, 1, CHUNK, CHUNK * 2, CHUNK * 2 + 1] {
        let bytes = content(len);
        let (_, source, blob, dir) = setup(&bytes);
        let Go::Done(path) = run(source.obtain(&blob, dir.path(), &Free)).unwrap() else { panic!() };
        assert_eq!(std::fs::read(path).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no side files stay");
    }
}

#[test]
fn chunk_damaged_on_disk_between_two_runs_is_fetched_again() {
    let bytes = content(CHUNK * 5);
    let (http, source, blob, dir) = setup(&bytes);
    http.fail_next("blobs", Fault::CutAfter(CHUNK * 3 + 5));
    http.fail_next("blobs", Fault::Unreachable);
    run(source.obtain(&blob, dir.path(), &Free)).unwrap_err();
    let part = partial::data_path(&source.path(&blob, dir.path()));
    let mut stored = std::fs::read(&part).unwrap();
    assert_eq!(stored.len(), CHUNK * 3);
    stored[CHUNK + 3] ^= 1;
    std::fs::write(&part, stored).unwrap();
    let before = http.body_bytes();
    let Go::Done(path) = run(source.obtain(&blob, dir.path(), &Free)).unwrap() else { panic!() };
    assert_eq!(std::fs::read(path).unwrap(), bytes);
    assert_eq!(http.body_bytes() - before, 3 * CHUNK as u64, "two missing chunks and the damaged one");
}

#[test]
fn side_car_of_another_file_is_not_believed() {
    let bytes = content(CHUNK * 3);
    let (_, source, blob, dir) = setup(&bytes);
    let path = source.path(&blob, dir.path());
    std::fs::write(partial::data_path(&path), vec![0; CHUNK * 3]).unwrap();
    let mut other = partial::Partial::new(&blob_of(&content(CHUNK * 2)));
    other.set(0, true);
    other.save(&path, Durability::Relaxed).unwrap();
    let Go::Done(path) = run(source.obtain(&blob, dir.path(), &Free)).unwrap() else { panic!() };
    assert_eq!(std::fs::read(path).unwrap(), bytes);
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => (0usize..700).prop_map(Fault::CutAfter),
        2 => (0usize..700).prop_map(Fault::FlipByte),
        1 => (1usize..200).prop_map(Fault::ExtraBytes),
        1 => Just(Fault::IgnoreRange),
        1 => Just(Fault::RangeFromZero),
        1 => Just(Fault::OtherEtag),
        1 => Just(Fault::AnswerLost),
        1 => Just(Fault::Unreachable),
        1 => Just(Fault::Status(416, None)),
        1 => Just(Fault::Status(502, None)),
    ]
}

proptest! {
    /// Any sequence of faults ends in the right bytes once the faults end, and the final name never holds others.
    #[test]
    fn any_faults_end_in_the_right_bytes(len in 0usize..700, faults in proptest::collection::vec(fault(), 0..30)) {
        let bytes = content(len);
        let (http, source, blob, dir) = setup(&bytes);
        let rounds = faults.len() + 2;
        for f in faults {
            http.fail_next("blobs", f);
        }
        let mut done = false;
        for _ in 0..rounds {
            let got = run(source.obtain(&blob, dir.path(), &Free));
            let path = source.path(&blob, dir.path());
            if path.exists() {
                prop_assert_eq!(&std::fs::read(&path).unwrap(), &bytes);
            }
            done |= matches!(got, Ok(Go::Done(_)));
        }
        prop_assert!(done);
    }
}
