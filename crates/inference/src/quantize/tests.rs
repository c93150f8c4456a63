//! Choice of types, refusals, report, and the real model.

use super::*;
use crate::codec;
use crate::gguf::{TensorData, write};
use crate::testing::model_file;
use std::path::PathBuf;

fn none(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Deterministic weights of moderate size.
fn weights(n: usize) -> Vec<f32> {
    let mut s = 7u32;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((s >> 8) as f32 / 8_388_608.0 - 1.0) * 0.1
        })
        .collect()
}

/// A tiny llama-shaped base in F16: `layers` blocks, rows of `row` (attention) and 512 (down projection).
fn base(folder: &Path, layers: usize, row: u64, tied: bool) -> PathBuf {
    let mut tensors = vec![("token_embd.weight".to_owned(), vec![row, 64])];
    for i in 0..layers {
        for (name, dims) in [
            ("attn_norm.weight", vec![row]),
            ("attn_q.weight", vec![row, 32]),
            ("attn_v.weight", vec![row, 32]),
            ("ffn_down.weight", vec![512, row]),
        ] {
            tensors.push((format!("blk.{i}.{name}"), dims));
        }
    }
    if !tied {
        tensors.push(("output.weight".to_owned(), vec![row, 64]));
    }
    let path = folder.join(format!("base-{layers}-{row}-{tied}.gguf"));
    let metadata = [
        ("general.architecture", Value::from("llama")),
        ("general.file_type", Value::U32(1)),
        ("llama.block_count", Value::U32(layers as u32)),
    ]
    .map(|(k, v)| (k.to_owned(), v));
    let entries = tensors.into_iter().map(|(name, dims)| {
        let ty = if dims.len() == 1 { TensorType::F32 } else { TensorType::F16 };
        let n = dims.iter().product::<u64>() as usize;
        let data = codec::quantize(ty, &weights(n), dims[0] as usize, None).unwrap();
        (TensorSpec { name, dims, ty }, TensorData::Bytes(data.into()))
    });
    write(&path, &metadata, entries).unwrap();
    path
}

fn types(report: &QuantizeReport, suffix: &str) -> Vec<&'static str> {
    report.tensors.iter().filter(|t| t.row.name.ends_with(suffix)).map(|t| t.row.to.name()).collect()
}

#[test]
fn mixes_are_those_of_stock() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let b = Gguf::open(&base(folder.path(), 16, 256, false)).unwrap();
    let r = quantize(&b, &out, &QuantizeOptions::new(Profile::Q4KM), &mut none).unwrap();
    let (k4, k6) = ("Q4_K", "Q6_K");
    // 16 layers: 0-1 and 14-15 by position, then every third from 2: 4, 7, 10, 13.
    let mixed = [k6, k6, k4, k4, k6, k4, k4, k6, k4, k4, k6, k4, k4, k6, k6, k6];
    assert_eq!(types(&r, "ffn_down.weight"), mixed);
    assert_eq!(types(&r, "attn_v.weight"), mixed);
    assert_eq!(types(&r, "attn_q.weight"), [k4; 16]);
    assert_eq!(types(&r, "attn_norm.weight"), ["F32"; 16]);
    assert_eq!((types(&r, "output.weight"), types(&r, "token_embd.weight")), (vec![k6], vec![k4]));
    let r = quantize(&b, &out, &QuantizeOptions::new(Profile::Q4KS), &mut none).unwrap();
    assert_eq!(types(&r, "attn_v.weight")[..5], ["Q5_K", "Q5_K", "Q5_K", "Q5_K", "Q4_K"]);
    assert_eq!(types(&r, "ffn_down.weight")[..3], ["Q5_K", "Q5_K", "Q4_K"]);
    let r = quantize(&b, &out, &QuantizeOptions::new(Profile::Q8_0), &mut none).unwrap();
    assert_eq!(types(&r, "output.weight"), ["Q8_0"]);
}

#[test]
fn narrow_rows_fall_back_and_the_report_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let b = Gguf::open(&base(folder.path(), 8, 64, true)).unwrap();
    let mut options = QuantizeOptions::new(Profile::Q4KM);
    let r = quantize(&b, &out, &options, &mut none).unwrap();
    assert_eq!(types(&r, "attn_q.weight"), ["Q5_0"; 8]);
    assert_eq!(types(&r, "token_embd.weight"), ["Q8_0"], "a tied embedding is the output layer");
    assert_eq!(types(&r, "ffn_down.weight")[2], "Q4_K", "rows of 512 need no fallback");
    assert_eq!(r.fallbacks().count(), 8 + 8 + 1);
    let file = Gguf::open(&out).unwrap();
    let bytes: usize = file.tensors().iter().map(|t| t.len).sum();
    let n: usize = file.tensors().iter().map(crate::gguf::TensorInfo::n_elements).sum();
    assert!((r.bits_per_weight() - 8.0 * bytes as f64 / n as f64).abs() < 1e-12);
    assert_eq!(r.size_bytes, file.size_bytes());
    assert!(r.to_string().contains("rows are not whole blocks: 17"), "{r}");
    options.strict_types = true;
    let e = quantize(&b, &out, &options, &mut none).unwrap_err();
    assert!(matches!(e, QuantizeError::Fallback { row_len: 64, .. }), "{e}");
}

#[test]
fn metadata_describes_the_new_file() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let b = Gguf::open(&base(folder.path(), 1, 256, true)).unwrap();
    quantize(&b, &out, &QuantizeOptions::new(Profile::Q6K), &mut none).unwrap();
    let q = Gguf::open(&out).unwrap();
    let keys: Vec<_> = q.metadata().iter().map(|(k, _)| k.as_str()).collect();
    assert_eq!(
        keys,
        ["general.architecture", "general.file_type", "llama.block_count", "general.quantization_version"]
    );
    assert_eq!(q.u32("general.file_type").unwrap(), 18);
    assert_eq!(q.u32("general.quantization_version").unwrap(), 2);
}

#[test]
fn refusals_name_the_tensor_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let path = base(folder.path(), 1, 256, true);
    let b = Gguf::open(&path).unwrap();
    let options = QuantizeOptions::new(Profile::Q4_0);

    // Not a number in one weight of the down projection.
    let mut bytes = std::fs::read(&path).unwrap();
    let t = b.tensor("blk.0.ffn_down.weight").unwrap();
    let at = bytes.len() - b.bytes(t).len() + 2 * 1000;
    bytes[at..at + 2].copy_from_slice(&[0x00, 0x7e]);
    let broken = Gguf::from_bytes(bytes).unwrap();
    let e = quantize(&broken, &out, &options, &mut none).unwrap_err().to_string();
    assert_eq!(e, "tensor `blk.0.ffn_down.weight`: weight 1000 is NaN: only finite values can be quantised");

    let first = folder.path().join("first.gguf");
    quantize(&b, &first, &options, &mut none).unwrap();
    let once = Gguf::open(&first).unwrap();
    let mut again = QuantizeOptions::new(Profile::Q8_0);
    let e = quantize(&once, &out, &again, &mut none).unwrap_err().to_string();
    assert!(e.contains("`token_embd.weight` is already Q6_K"), "{e}");
    again.allow_requantize = true;
    assert!(quantize(&once, &first, &again, &mut none).is_ok(), "even onto its own base: the map stays whole");

    let mut options = QuantizeOptions::new(Profile::Q4_0);
    options.overrides.insert("nope".into(), TensorType::Q8_0);
    assert!(matches!(quantize(&b, &out, &options, &mut none), Err(QuantizeError::UnknownOverride { .. })));

    let mut imatrix = Imatrix::default();
    let mut column = [1.0; 256];
    column[3] = 0.0;
    imatrix.add("blk.0.attn_q.weight", &column, 10).unwrap();
    let mut options = QuantizeOptions::new(Profile::Q4_0);
    options.imatrix = Some(imatrix);
    let e = quantize(&b, &out, &options, &mut none).unwrap_err().to_string();
    assert!(e.contains("`blk.0.attn_q.weight`: importance of column 3 is zero"), "{e}");
    options.fill_zero_importance = true;
    let r = quantize(&b, &out, &options, &mut none).unwrap();
    assert!(r.to_string().contains("`blk.0.attn_q.weight` has 1 channels without importance"), "{r}");
    std::fs::remove_file(&out).unwrap();
    let mut wrong = Imatrix::default();
    wrong.add("blk.0.attn_q.weight", &[1.0; 255], 1).unwrap();
    options.imatrix = Some(wrong);
    assert!(quantize(&b, &out, &options, &mut none).unwrap_err().to_string().contains("255 columns"));

    let mut calls = 0;
    let stop = quantize(&b, &out, &QuantizeOptions::new(Profile::Q4_0), &mut |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stop, Err(QuantizeError::Cancelled)));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|n| n.to_string_lossy().contains("q.gguf")), "{left:?}");
}

#[test]
fn importance_is_used_and_survives_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    let model = Gguf::open(&base(folder.path(), 1, 256, true)).unwrap();
    let mut imatrix = Imatrix::new(vec!["sample".into()], 2, 128);
    let sum2: Vec<f32> = (0..256).map(|i| 1.0 + (i % 7) as f32).collect();
    imatrix.add("blk.0.attn_q.weight", &sum2, 128).unwrap();
    imatrix.add("blk.0.attn_q.weight", &sum2, 128).unwrap();
    assert!(imatrix.add("blk.0.attn_q.weight", &[f32::NAN; 256], 1).is_err());
    assert!(imatrix.add("blk.0.attn_q.weight", &[1.0; 3], 1).is_err());
    let path = folder.path().join("imatrix.gguf");
    imatrix.write(&path).unwrap();
    assert_eq!(Imatrix::read(&path).unwrap(), imatrix);
    assert_eq!(imatrix.get("blk.0.attn_q.weight").unwrap()[6], 7.0 / 128.0);
    assert!(Imatrix::read(&base(folder.path(), 1, 256, true)).is_err());
    let mut options = QuantizeOptions::new(Profile::Q4_0);
    quantize(&model, &a, &options, &mut none).unwrap();
    options.imatrix = Some(imatrix);
    let report = quantize(&model, &b, &options, &mut none).unwrap();
    assert_eq!(report.tensors.iter().filter(|t| t.weighted).count(), 1);
    let (a, b) = (Gguf::open(&a).unwrap(), Gguf::open(&b).unwrap());
    for t in a.tensors() {
        let same = a.bytes(t) == b.bytes(b.tensor(&t.name).unwrap());
        assert_eq!(same, t.name != "blk.0.attn_q.weight", "{}", t.name);
    }
}

/// A block of zeros in an importance matrix must not make the file worse than none, let alone broken
/// (ggml-org/llama.cpp#8661).
#[test]
fn zero_importance_can_be_filled() {
    let folder = tempfile::tempdir().unwrap();
    let model = Gguf::open(&base(folder.path(), 1, 256, true)).unwrap();
    let out = folder.path().join("q.gguf");
    for (zeros, ty) in [(512, TensorType::Q4K), (300, TensorType::Q4K), (512, TensorType::Q4_0), (32, TensorType::Q5K)]
    {
        let mut options = QuantizeOptions::new(Profile::Q8_0);
        options.overrides.insert("blk.0.ffn_down.weight".into(), ty);
        let error = |options: &QuantizeOptions| {
            let r = quantize(&model, &out, options, &mut none).unwrap();
            r.tensors.iter().find(|t| t.row.to == ty).unwrap().relative_error
        };
        let plain = error(&options);
        let mut imatrix = Imatrix::default();
        let sum2: Vec<f32> = (0..512).map(|j| if j < zeros { 0.0 } else { 2.0 }).collect();
        imatrix.add("blk.0.ffn_down.weight", &sum2, 4).unwrap();
        options.imatrix = Some(imatrix);
        options.fill_zero_importance = true;
        let filled = error(&options);
        assert!(filled.is_finite() && filled <= plain * 1.01, "{ty} {zeros}: {filled} {plain}");
    }
}

#[test]
fn threads_do_not_change_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = Gguf::open(&base(folder.path(), 4, 256, true)).unwrap();
    let run = |threads| {
        let out = folder.path().join(format!("{threads}.gguf"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| quantize(&model, &out, &QuantizeOptions::new(Profile::Q4KM), &mut none)).unwrap();
        std::fs::read(out).unwrap()
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn profile_names_round_trip() {
    for p in Profile::ALL {
        assert_eq!(p.name().parse::<Profile>().unwrap(), p);
        assert_eq!(serde_json::from_str::<Profile>(&serde_json::to_string(&p).unwrap()).unwrap(), p);
    }
    assert_eq!("q4_k_m".parse::<Profile>().unwrap(), Profile::Q4KM);
    assert!("Q9".parse::<Profile>().unwrap_err().to_string().contains("Q4_K_M"));
}

/// The real model gets exactly the types and the size that stock gives it.
#[test]
fn the_real_model_quantises_as_stock_does() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let base = Gguf::open(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut options = QuantizeOptions::new(Profile::Q4KM);
    options.allow_requantize = true;
    let report = quantize(&base, &folder.path().join("q.gguf"), &options, &mut none).unwrap();
    let counts = report.counts();
    let n = |t| counts.get(&t).copied().unwrap_or(0);
    assert_eq!((n(TensorType::Q5_0), n(TensorType::Q8_0), n(TensorType::Q4K), n(TensorType::Q6K)), (166, 15, 16, 14));
    assert_eq!(report.size_bytes, 105_454_144);
    assert!((report.bits_per_weight() - 6.1655).abs() < 1e-4, "{}", report.bits_per_weight());
    let worst = report.tensors.iter().map(|t| t.relative_error).fold(0.0, f64::max);
    assert!(worst < 0.1, "{worst}");
}
