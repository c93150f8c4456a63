//! Reader and writer against hand-made bytes, round trips, and random damage.

use super::*;
use proptest::prelude::*;
use std::path::PathBuf;

fn temp(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("gguf-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir.join(name)
}

fn spec(name: &str, ty: TensorType, dims: &[u64]) -> TensorSpec {
    TensorSpec { name: name.into(), dims: dims.into(), ty }
}

fn sample_metadata() -> Vec<(String, Value)> {
    let array = Value::Array;
    [
        ("general.architecture", Value::from("llama")),
        ("a.u8", Value::U8(200)),
        ("a.i8", Value::I8(-5)),
        ("a.u16", Value::U16(65535)),
        ("a.i16", Value::I16(-2)),
        ("a.u32", Value::U32(7)),
        ("a.i32", Value::I32(-7)),
        ("a.f32", Value::F32(0.5)),
        ("a.bool", Value::Bool(true)),
        ("a.u64", Value::U64(1 << 40)),
        ("a.i64", Value::I64(-1)),
        ("a.f64", Value::F64(1e300)),
        ("b.strings", array(Array::String(vec!["Ġt".into(), String::new()]))),
        ("b.f32", array(Array::F32(vec![1.0, -1.0]))),
        ("b.i32", array(Array::I32(vec![3, 1]))),
        ("b.bool", array(Array::Bool(vec![true, false]))),
        ("b.u8", array(Array::U8(vec![1, 2, 3]))),
        ("b.u64", array(Array::U64(vec![]))),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .to_vec()
}

/// A small valid file: three tensors, one of them with padding behind it.
fn sample(name: &str) -> Vec<u8> {
    let path = temp(name);
    let f32s: Vec<u8> = [1.0f32, -2.0, 3.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    let q8: Vec<u8> = (0..68).collect();
    let tensors = vec![
        (spec("blk.0.norm", TensorType::F32, &[3]), TensorData::Bytes(f32s.clone().into())),
        (spec("blk.0.w", TensorType::Q8_0, &[32, 2]), TensorData::Lazy(Box::new(move || Ok(q8)))),
        (spec("last", TensorType::F16, &[1, 1, 1]), TensorData::Bytes(vec![0, 0x3c].into())),
    ];
    let size = write(&path, &sample_metadata(), tensors).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(size, bytes.len() as u64);
    bytes
}

#[test]
fn what_is_written_is_read_back_in_order() {
    let bytes = sample("round-trip.gguf");
    let g = Gguf::from_bytes(bytes.clone()).unwrap();
    assert_eq!((g.version(), g.alignment()), (3, 32));
    assert_eq!(g.metadata(), sample_metadata());
    let names: Vec<_> = g.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["blk.0.norm", "blk.0.w", "last"]);
    let w = g.tensor("blk.0.w").unwrap();
    assert_eq!((w.row_len(), w.rows(), w.n_elements(), w.len, w.offset), (32, 2, 64, 68, 32));
    assert_eq!(g.bytes(w), (0..68).collect::<Vec<u8>>());
    assert_eq!(g.dequantize(g.tensor("blk.0.norm").unwrap()).unwrap(), [1.0, -2.0, 3.5]);
    assert_eq!(g.dequantize(g.tensor("last").unwrap()).unwrap(), [1.0]);
    // The header is what the specification says, byte for byte.
    assert_eq!(bytes[..24], *b"GGUF\x03\0\0\0\x03\0\0\0\0\0\0\0\x12\0\0\0\0\0\0\0");
    assert_eq!(bytes.len() % 32, 0);
}

#[test]
fn typed_getters_name_the_key() {
    let g = Gguf::from_bytes(sample("getters.gguf")).unwrap();
    assert_eq!(g.u32("a.u32").unwrap(), 7);
    assert_eq!(g.str("general.architecture").unwrap(), "llama");
    assert_eq!(g.required::<&[i32]>("b.i32").unwrap(), [3, 1]);
    assert_eq!(g.optional::<bool>("none").unwrap(), None);
    let missing = g.u32("llama.block_count").unwrap_err().to_string();
    assert_eq!(missing, "the GGUF file has no metadata key `llama.block_count`");
    let wrong = g.u32("a.u16").unwrap_err().to_string();
    assert_eq!(wrong, "metadata key `a.u16` is u16, expected u32");
    let wrong = g.f32("b.strings").unwrap_err().to_string();
    assert_eq!(wrong, "metadata key `b.strings` is array of string, expected f32");
    assert!(matches!(g.tensor("x"), Err(GgufError::MissingTensor { name }) if name == "x"));
}

#[test]
fn alignment_of_the_metadata_is_honoured() {
    let path = temp("aligned.gguf");
    let metadata = [("general.alignment".to_owned(), Value::U32(128))];
    let tensor = |n: &str| (spec(n, TensorType::F32, &[1]), TensorData::Bytes(vec![1, 2, 3, 4].into()));
    write(&path, &metadata, [tensor("a"), tensor("b")]).unwrap();
    let g = Gguf::open(&path).unwrap();
    assert_eq!(g.alignment(), 128);
    assert_eq!(g.tensor("b").unwrap().offset, 128);
    assert_eq!(g.parts[0].data_start % 128, 0);
    assert_eq!(g.bytes(g.tensor("b").unwrap()), [1, 2, 3, 4]);
}

/// Builds headers that our writer would refuse.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn start(version: u32, tensors: u64, kv: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(version).u64(tensors).u64(kv)
    }
    fn u32(mut self, v: u32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn str(self, s: &str) -> Self {
        let mut this = self.u64(s.len() as u64);
        this.0.extend(s.as_bytes());
        this
    }
    fn kv_u32(self, key: &str, v: u32) -> Self {
        self.str(key).u32(4).u32(v)
    }
    fn tensor(self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let this = dims.iter().fold(self.str(name).u32(dims.len() as u32), |r, &d| r.u64(d));
        this.u32(ty).u64(offset)
    }
    fn data(mut self, n: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }
    fn error(self) -> String {
        Gguf::from_bytes(self.0).unwrap_err().to_string()
    }
}

#[test]
fn broken_headers_are_refused_with_the_reason() {
    let one = || Raw::start(3, 1, 0);
    let cases: Vec<(Raw, &str)> = vec![
        (Raw::default(), "truncated"),
        (Raw(b"GGML0123456789".to_vec()), "magic"),
        (Raw::start(1, 0, 0), "version 1"),
        (Raw::start(4, 0, 0), "version 4"),
        (Raw::start(3u32.swap_bytes(), 0, 0), "big-endian"),
        (Raw::start(3, 1 << 60, 0), "do not fit"),
        (Raw::start(3, 0, u64::MAX), "do not fit"),
        (Raw::start(3, 0, 1).u64(1 << 50), "do not fit"),
        (Raw::start(3, 0, 1).str("k").u32(13).data(0), "unknown type 13"),
        (Raw::start(3, 0, 1).str("k").u32(9).u32(9).data(64), "array of arrays"),
        (Raw::start(3, 0, 1).str("k").u32(9).u32(6).u64(1 << 61), "do not fit"),
        (Raw::start(3, 0, 1).str("k").u32(7).u32(2), "boolean is 2"),
        (Raw::start(3, 0, 2).kv_u32("k", 1).kv_u32("k", 2), "duplicate metadata key `k`"),
        (Raw::start(3, 0, 1).kv_u32("", 1), "empty metadata key"),
        (Raw::start(3, 0, 1).kv_u32("general.alignment", 0), "not a power of two"),
        (Raw::start(3, 0, 1).kv_u32("general.alignment", 3), "not a power of two"),
        (Raw::start(3, 0, 1).str("general.alignment").u32(10).u64(32), "is u64, expected u32"),
        (one().tensor(&"n".repeat(64), &[1], 0, 0).data(4), "name of 64 bytes"),
        (one().tensor("", &[1], 0, 0).data(4), "name of 0 bytes"),
        (one().tensor("t", &[1, 1, 1, 1, 1], 0, 0).data(4), "5 dimensions"),
        (one().tensor("t", &[], 0, 0).data(4), "0 dimensions"),
        (one().tensor("t", &[0], 0, 0).data(4), "cannot have shape [0]"),
        (one().tensor("t", &[33], 2, 0).data(64), "cannot have shape [33]"),
        (one().tensor("t", &[1 << 40, 1 << 40], 0, 0).data(4), "cannot have shape"),
        (one().tensor("t", &[1 << 63], 0, 0).data(4), "cannot have shape"),
        (one().tensor("t", &[1], 99, 0).data(4), "type unknown (99)"),
        (one().tensor("t", &[256], 23, 0).data(4), "type IQ4_XS (23)"),
        (one().tensor("t", &[1], 0, 32).data(64), "expected 0"),
        (one().tensor("t", &[8], 0, 0).data(31), "truncated"),
        (one().tensor("t", &[8], 0, 0).data(65), "33 bytes follow"),
        (Raw::start(3, 2, 0).tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 32).data(64), "duplicate tensor `t`"),
        (Raw::start(3, 2, 0).tensor("a", &[1], 0, 0).tensor("b", &[1], 0, 64).data(96), "expected 32"),
    ];
    for (i, (raw, reason)) in cases.into_iter().enumerate() {
        let error = raw.error();
        assert!(error.contains(reason), "case {i}: `{error}` does not say `{reason}`");
    }
    let mut not_utf8 = Raw::start(3, 0, 1).str("k").u32(8).u64(2);
    not_utf8.0.extend([0xff, 0xfe]);
    assert!(not_utf8.error().contains("not UTF-8"));
    // The same shapes are fine when nothing is wrong with them.
    assert!(Gguf::from_bytes(one().tensor("t", &[8], 0, 0).data(32).0).is_ok());
    assert!(Gguf::from_bytes(Raw::start(2, 0, 0).0).is_ok());
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = sample("truncate.gguf");
    let g = Gguf::from_bytes(bytes.clone()).unwrap();
    let last = g.tensor("last").unwrap();
    let end = g.parts[0].data_start + last.offset as usize + last.len;
    for n in 0..end {
        assert!(Gguf::from_bytes(bytes[..n].to_vec()).is_err(), "{n} of {end} bytes were accepted");
    }
    assert!(Gguf::from_bytes(bytes[..end].to_vec()).is_ok(), "final padding may be absent");
}

#[test]
fn the_writer_refuses_invalid_files_and_leaves_nothing() {
    let path = temp("refused.gguf");
    let one = |spec: TensorSpec, n: usize| [(spec, TensorData::Bytes(vec![0; n].into()))];
    let long = one(spec(&"n".repeat(64), TensorType::F32, &[1]), 4);
    assert!(write(&path, &[], long).unwrap_err().to_string().contains("longer than 63"));
    let shape = one(spec("t", TensorType::Q4K, &[255]), 4);
    assert!(write(&path, &[], shape).unwrap_err().to_string().contains("cannot have shape"));
    let short = one(spec("t", TensorType::F32, &[2]), 4);
    assert!(write(&path, &[], short).unwrap_err().to_string().contains("needs 8 bytes, got 4"));
    let twice = [("k".to_owned(), Value::U8(1)), ("k".to_owned(), Value::U8(1))];
    assert!(write(&path, &twice, []).unwrap_err().to_string().contains("given twice"));
    let align = [("general.alignment".to_owned(), Value::U32(24))];
    assert!(write(&path, &align, []).unwrap_err().to_string().contains("power of two"));
    let mut w = Writer::create(&path, &[], &[spec("t", TensorType::F32, &[1])]).unwrap();
    assert!(Writer::create(&path, &[], &[]).is_ok());
    w.push(&[0; 4]).unwrap();
    assert!(w.push(&[0; 4]).is_err(), "one tensor was announced");
    let w = Writer::create(&path, &[], &[spec("t", TensorType::F32, &[1])]).unwrap();
    assert!(w.finish().unwrap_err().to_string().contains("never given"));
    let folder = path.parent().unwrap();
    let left: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.contains("refused"))
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[test]
fn an_old_file_survives_a_failed_rewrite() {
    let path = temp("keep.gguf");
    write(&path, &[("k".to_owned(), Value::U8(1))], []).unwrap();
    let failing = TensorData::Lazy(Box::new(|| Err(GgufError::tensor("t", "made to fail"))));
    assert!(write(&path, &[], [(spec("t", TensorType::F32, &[1]), failing)]).is_err());
    assert_eq!(Gguf::open(&path).unwrap().get("k"), Some(&Value::U8(1)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Random damage anywhere in the head: an error or a file that is safe to read, never a panic.
    #[test]
    fn damaged_files_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
                                 cut in any::<prop::sample::Index>(), cut_it in any::<bool>()) {
        use std::sync::OnceLock;
        static BASE: OnceLock<Vec<u8>> = OnceLock::new();
        let mut bytes = BASE.get_or_init(|| sample("fuzz.gguf")).clone();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut_it {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(g) = Gguf::from_bytes(bytes) {
            for t in g.tensors() {
                prop_assert_eq!(g.bytes(t).len(), t.len);
                prop_assert_eq!(g.dequantize(t).unwrap().len(), t.n_elements());
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..512), version in 0u32..5) {
        if bytes.len() >= 24 {
            bytes[..4].copy_from_slice(b"GGUF");
            bytes[4..8].copy_from_slice(&version.to_le_bytes());
            // Small counts, so that the parser gets past them.
            bytes[9..16].fill(0);
            bytes[17..24].fill(0);
        }
        let _ = Gguf::from_bytes(bytes);
    }
}
