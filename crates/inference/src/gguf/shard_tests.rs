//! Sets of shards: what is split reads as one file again, and every way in which a set can be wrong has its own
//! message (models.md 7, case 5).

use super::*;
use crate::quantize::{Profile, QuantizeOptions, quantize};
use std::{fs, ops::ControlFlow, path::PathBuf};
use tempfile::TempDir;

/// A limit that makes three shards of [`whole`].
const LIMIT: u64 = 16_000;

/// Metadata, and five F16 tensors of 2,048, 4,096, 6,144 … bytes.
fn whole() -> Gguf {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let metadata = [
        ("general.architecture", Value::from("llama")),
        ("general.alignment", Value::U32(64)),
        ("llama.block_count", Value::U32(1)),
        ("tokenizer.ggml.tokens", Value::Array(Array::String((0..100).map(|i| format!("token {i}")).collect()))),
    ]
    .map(|(k, v)| (k.to_owned(), v));
    let tensors = (1..6u64).map(|i| {
        let name = if i == 1 { "token_embd.weight".to_owned() } else { format!("blk.0.part_{i}.weight") };
        let values = (0..1024 * i).map(|v| half::f16::from_f32((v % 97) as f32 / 8.0 - i as f32));
        let bytes: Vec<u8> = values.flat_map(half::f16::to_le_bytes).collect();
        (TensorSpec { name, dims: vec![256, 4 * i], ty: TensorType::F16 }, TensorData::Bytes(bytes.into()))
    });
    write(&path, &metadata, tensors).unwrap();
    Gguf::from_bytes(fs::read(path).unwrap()).unwrap()
}

fn split(file: &Gguf, max: u64) -> (TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let shards = write_shards(&folder.path().join("m"), file.metadata(), file.contents(), max).unwrap();
    for (path, size) in &shards {
        assert_eq!(fs::metadata(path).unwrap().len(), *size);
        assert!(*size <= max, "{} has {size} bytes", path.display());
    }
    let paths = shards.into_iter().map(|(path, _)| path).collect();
    (folder, paths)
}

fn same(a: &Gguf, b: &Gguf) {
    assert_eq!(a.metadata(), b.metadata());
    assert_eq!(a.tensors().len(), b.tensors().len());
    for (x, y) in a.tensors().iter().zip(b.tensors()) {
        assert_eq!((x.spec(), a.bytes(x)), (y.spec(), b.bytes(y)));
        assert_eq!(a.dequantize(x).unwrap(), b.dequantize(y).unwrap());
    }
}

/// Writes a shard anew with other keys and a part of its tensors.
fn change(path: &Path, keys: &[(&str, Option<Value>)], keep: usize) {
    let head = read::parse(&fs::read(path).unwrap()).unwrap();
    let file = Gguf::assemble(vec![(Source::open(path).unwrap(), head)]);
    let mut metadata = read::parse(&fs::read(path).unwrap()).unwrap().metadata;
    for (key, value) in keys {
        metadata.retain(|(k, _)| k != key);
        metadata.extend(value.clone().map(|v| ((*key).to_owned(), v)));
    }
    write(path, &metadata, file.contents().take(keep)).unwrap();
}

#[test]
fn a_set_reads_as_the_file_it_was_made_from() {
    let file = whole();
    for max in [11_000, LIMIT, 20_000, 1 << 20] {
        let (folder, paths) = split(&file, max);
        let set = Gguf::open(&paths[0]).unwrap();
        assert_eq!(set.n_files(), paths.len());
        same(&set, &file);
        assert_eq!(set.size_bytes(), paths.iter().map(|p| fs::metadata(p).unwrap().len()).sum::<u64>());
        // Joined, it is the original byte for byte.
        let joined = folder.path().join("joined.gguf");
        let size = write(&joined, set.metadata(), set.contents()).unwrap();
        assert_eq!(size, file.size_bytes());
        same(&Gguf::open(&joined).unwrap(), &file);
    }
    let names = |max| split(&file, max).1.iter().map(|p| p.file_name().unwrap().to_owned()).collect::<Vec<_>>();
    let three: Vec<_> = (1..4).map(|i| format!("m-0000{i}-of-00003.gguf").into()).collect::<Vec<std::ffi::OsString>>();
    assert_eq!(names(LIMIT), three);
    assert_eq!(names(1 << 20).len(), 1);
}

#[test]
fn shards_carry_the_keys_that_stock_looks_for() {
    let (_folder, paths) = split(&whole(), LIMIT);
    for (no, path) in paths.iter().enumerate() {
        let head = read::parse(&fs::read(path).unwrap()).unwrap();
        let keys = Metadata::new(head.metadata);
        assert_eq!(keys.get("split.no"), Some(&Value::U16(no as u16)));
        assert_eq!(keys.get("split.count"), Some(&Value::U16(3)));
        assert_eq!(keys.get("split.tensors.count"), Some(&Value::I32(5)));
        assert_eq!(keys.get("general.architecture").is_some(), no == 0, "metadata is in the first shard only");
        assert_eq!(head.alignment, 64);
    }
}

#[test]
fn wrong_sets_are_refused_each_with_its_own_message() {
    let file = whole();
    let check = |damage: &dyn Fn(&[PathBuf]), open: usize, message: &str| {
        let (_folder, paths) = split(&file, LIMIT);
        damage(&paths);
        let error = Gguf::open(&paths[open]).unwrap_err().to_string();
        assert!(error.contains(message), "`{error}` does not say `{message}`");
    };
    let count = |n| ("split.count", Some(Value::U16(n)));
    check(&|p| fs::remove_file(&p[1]).unwrap(), 0, "m-00002-of-00003.gguf: shard 2 of 3 is missing");
    check(&|_| (), 1, "this is shard 2 of 3: open the first one");
    check(&|p| change(&p[1], &[count(4)], 9), 0, "a set of 4 shards, the first shard to one of 3");
    check(&|p| change(&p[2], &[count(1)], 9), 0, "a whole file under the name of shard 3 of 3");
    let copy = |p: &[PathBuf]| {
        fs::copy(&p[1], &p[2]).unwrap();
    };
    check(&copy, 0, "named as shard 3, but says that it is shard 2");
    check(&|p| change(&p[2], &[], 0), 0, "the shards hold 4 tensors, the first says 5");
    check(&|p| change(&p[0], &[("split.tensors.count", None)], 9), 0, "no metadata key `split.tensors.count`");
    check(&|p| change(&p[0], &[("split.no", Some(Value::U32(0)))], 9), 0, "`split.no` is u32, expected u16");
    let other = ("general.architecture", Some(Value::from("qwen2")));
    check(
        &|p| change(&p[1], std::slice::from_ref(&other), 9),
        0,
        "`general.architecture` is not what the first shard says",
    );
    let twice = |p: &[PathBuf]| {
        copy(p);
        change(&p[2], &[("split.no", Some(Value::U16(2)))], 9);
    };
    check(&twice, 0, "is in shard 2 and in shard 3");
    let cut = |p: &[PathBuf]| {
        let bytes = fs::read(&p[1]).unwrap();
        fs::write(&p[1], &bytes[..bytes.len() - 100]).unwrap();
    };
    check(&cut, 0, "m-00002-of-00003.gguf: not a valid GGUF file");
    let (folder, paths) = split(&file, LIMIT);
    let renamed = folder.path().join("model.gguf");
    fs::rename(&paths[0], &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err().to_string();
    assert!(error.contains("does not end in `-00001-of-00003.gguf`"), "{error}");
    let error = Gguf::from_bytes(fs::read(&renamed).unwrap()).unwrap_err().to_string();
    assert!(error.contains("shard 1 of 3 by itself"), "{error}");
}

#[test]
fn what_fits_no_shard_is_refused_and_nothing_is_left() {
    let (file, folder) = (whole(), tempfile::tempdir().unwrap());
    let error =
        |max| write_shards(&folder.path().join("m"), file.metadata(), file.contents(), max).unwrap_err().to_string();
    assert!(error(1_000).contains("the metadata alone takes"), "{}", error(1_000));
    assert!(error(10_000).contains("tensor `blk.0.part_5.weight` takes 10"), "{}", error(10_000));
    let failing = file.contents().map(|(spec, data)| match spec.name.as_str() {
        "blk.0.part_5.weight" => (spec, TensorData::Lazy(Box::new(|| Err(GgufError::tensor("t", "made to fail"))))),
        _ => (spec, data),
    });
    assert!(write_shards(&folder.path().join("m"), file.metadata(), failing, LIMIT).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    // Metadata that fills the first shard leaves it without tensors.
    let long = ("general.description".to_owned(), Value::String("d".repeat(7_600)));
    let metadata: Vec<_> = file.metadata().iter().cloned().chain([long]).collect();
    let shards = write_shards(&folder.path().join("m"), &metadata, file.contents(), 11_000).unwrap();
    assert!(read::parse(&fs::read(&shards[0].0).unwrap()).unwrap().tensors.is_empty());
    let set = Gguf::open(&shards[0].0).unwrap();
    assert_eq!((set.tensors().len(), set.metadata().len()), (5, metadata.len()));
}

#[test]
fn an_older_set_of_the_same_names_is_replaced_whole() {
    let file = whole();
    let (folder, old) = split(&file, LIMIT);
    let newer: Vec<_> = file.metadata().iter().cloned().chain([("x.y".to_owned(), Value::U8(1))]).collect();
    let new = write_shards(&folder.path().join("m"), &newer, file.contents(), LIMIT + 100).unwrap();
    assert_eq!(new.iter().map(|(p, _)| p.clone()).collect::<Vec<_>>(), old);
    assert_eq!(Gguf::open(&old[0]).unwrap().get("x.y"), Some(&Value::U8(1)));
}

#[test]
fn requantising_from_shards_gives_one_file_without_their_keys() {
    let (folder, paths) = split(&whole(), LIMIT);
    let set = Gguf::open(&paths[0]).unwrap();
    let out = folder.path().join("q.gguf");
    quantize(&set, &out, &QuantizeOptions::new(Profile::Q8_0), &mut |_| ControlFlow::Continue(())).unwrap();
    let head = read::parse(&fs::read(&out).unwrap()).unwrap();
    assert!(head.metadata.iter().all(|(k, _)| !k.starts_with("split.")));
    let quantised = Gguf::open(&out).unwrap();
    assert_eq!(quantised.tensors().len(), 5);
    assert!(quantised.tensors().iter().any(|t| t.ty == TensorType::Q8_0));
}
