//! Runs on small random models: what each step does, determinism, resuming, budgets, and folds that change nothing.

use super::*;
use crate::model::tests::{noise, reference, some_tokens, tiny_file, tiny_file_with};
use crate::model::{Arch, Decoder};
use crate::quantize::{Fold, Method, TunedTensor};

/// Two blocks of width 64, 4 heads over 2 key heads of 16, inner size 256; some input channels are much larger.
fn small(arch: Arch) -> Gguf {
    small_with(arch, false)
}

/// The same, also with an output matrix of its own.
fn small_with(arch: Arch, own_output: bool) -> Gguf {
    tiny_file_with(arch, |metadata, parts| {
        if own_output {
            parts.push(("output.weight".into(), vec![24, 50], Vec::new()));
        }
        let sizes = [
            ("embedding_length", 64u32),
            ("feed_forward_length", 256),
            ("attention.key_length", 16),
            ("attention.value_length", 16),
        ];
        for (key, value) in sizes {
            let key = format!("{}.{key}", arch.name());
            metadata.iter_mut().find(|(k, _)| *k == key).unwrap().1 = value.into();
        }
        for (i, (name, dims, values)) in parts.iter_mut().enumerate() {
            let wide = |d: u64| match d {
                24 => 64,
                40 => 256,
                32 => 64,
                16 => 32,
                other => other,
            };
            *dims = dims.iter().map(|d| wide(*d)).collect();
            let n = dims.iter().product::<u64>() as usize;
            *values = noise(n, 900 + i as u64, if name.contains("norm") { 1.5 } else { 0.3 });
            if name.ends_with("_norm.weight") {
                values.iter_mut().step_by(9).for_each(|v| *v *= 12.0);
            }
        }
    })
}

fn texts(seed: u32) -> Vec<Vec<u32>> {
    (0..4).map(|i| some_tokens(60, seed + i)).collect()
}

fn go(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn opened(path: &Path) -> Gguf {
    Gguf::from_bytes(std::fs::read(path).unwrap()).unwrap()
}

fn find<'r>(report: &'r TuneReport, name: &str) -> &'r TunedTensor {
    report.tensors.iter().find(|t| t.row.name == name).unwrap()
}

#[test]
fn folds_change_nothing_and_every_channel() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("f.gguf");
    for arch in [Arch::Llama, Arch::Qwen2] {
        let base = tiny_file(arch);
        let config = ModelConfig::from_gguf(&base, &mut Vec::new()).unwrap();
        let fold = Fold::noise(&config, 0.25, 7);
        fold.write(&base, &out, TensorType::F32).unwrap();
        let folded = opened(&out);
        let tokens = some_tokens(30, 9);
        let (before, after) = (reference(&base, arch, &tokens), reference(&folded, arch, &tokens));
        let change = before.iter().flatten().zip(after.iter().flatten()).map(|(a, b)| (a - b).abs());
        assert!(change.fold(0.0, f64::max) < 1e-4, "{arch:?}");
        let mut names =
            vec!["attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "ffn_gate.weight"];
        names.extend(["ffn_up.weight", "ffn_down.weight", "attn_norm.weight", "ffn_norm.weight"]);
        if arch == Arch::Qwen2 {
            names.push("attn_v.bias");
            let same = "blk.1.attn_q.bias";
            assert_eq!(folded.bytes(folded.tensor(same).unwrap()), base.bytes(base.tensor(same).unwrap()));
        }
        for name in names {
            let name = format!("blk.1.{name}");
            let value = |g: &Gguf| g.dequantize(g.tensor(&name).unwrap()).unwrap();
            assert!(value(&base).iter().zip(value(&folded)).all(|(a, b)| *a != b || *a == 0.0), "{name}");
        }
    }
}

#[test]
fn other_norms_are_refused_by_name() {
    let base = tiny_file_with(Arch::Llama, |metadata, _| metadata[0].1 = "gemma2".into());
    let out = tempfile::tempdir().unwrap();
    let e = Fold::default().write(&base, &out.path().join("f.gguf"), TensorType::F32).unwrap_err().to_string();
    assert!(e.contains("gemma2"), "{e}");
}

fn all_steps(profile: Profile) -> TuneOptions {
    TuneOptions { datasets: vec!["noise".into()], ..TuneOptions::new(Goal::Profile(profile)) }
}

#[test]
fn every_step_helps_and_every_matrix_is_better_than_rounded() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    for (arch, profile) in [(Arch::Llama, Profile::Q4_0), (Arch::Qwen2, Profile::Q4KM)] {
        let base = small(arch);
        let report = tune(&base, &out, &texts(1), &all_steps(profile), &mut go).unwrap();
        let steps = report.steps();
        assert!(steps.weighted < 0.95 * steps.rounded, "{arch:?} {steps:?}");
        assert!(steps.folded < 0.95 * steps.weighted, "{arch:?} {steps:?}");
        assert!(steps.stored < 0.9 * steps.folded, "{arch:?} {steps:?}");
        let calibrated: Vec<_> = report.tensors.iter().filter_map(|t| Some((t, t.errors?))).collect();
        assert_eq!(calibrated.len(), 15);
        for (t, e) in calibrated {
            // At 8 bits scales are not searched.
            let better = e.stored < e.rounded || (t.row.to == TensorType::Q8_0 && e.stored == e.rounded);
            assert!(e.stored <= e.folded && better && !t.not_compensated, "{} {e:?}", t.row.name);
        }
        assert!(matches!(
            find(&report, "blk.0.attn_q.weight").method,
            Method::Compensated { .. } | Method::CompensatedByDiagonal { .. }
        ));
        assert_eq!(find(&report, "token_embd.weight").method, Method::Rounded, "tied: also looked up");
        let file = opened(&out);
        assert_eq!(file.size_bytes(), report.size_bytes);
        assert_eq!(file.u32("general.file_type").unwrap(), profile.file_type());
        assert_eq!(
            (file.str("quantize.imatrix.dataset").unwrap(), file.u32("quantize.imatrix.chunks_count").unwrap()),
            ("noise", 4)
        );
        let order = |g: &Gguf| g.tensors().iter().map(|t| t.name.clone()).collect::<Vec<_>>();
        assert_eq!(order(&file), order(&base));
        Decoder::load(&file).unwrap().visit_logits(&[1, 2, 3], 0..3, &mut |_, _| Ok(())).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no parts are left");
    }
}

#[test]
fn steps_can_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let base = small(Arch::Llama);
    let options = TuneOptions { fold: false, compensate: false, ..all_steps(Profile::Q4_1) };
    let report = tune(&base, &out, &texts(1), &options, &mut go).unwrap();
    let all = report.tensors.iter().filter_map(|t| t.errors);
    assert!(all.clone().count() == 15 && all.clone().all(|e| e.stored == e.folded && e.folded == e.weighted));
    let file = opened(&out);
    for t in base.tensors().iter().filter(|t| t.name.contains("norm")) {
        assert_eq!(file.bytes(file.tensor(&t.name).unwrap()), base.bytes(t), "{}", t.name);
    }
}

#[test]
fn texts_decide_and_threads_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let base = small(Arch::Qwen2);
    let run = |seed, threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let texts = texts(seed);
        pool.install(|| tune(&base, &out, &texts, &all_steps(Profile::Q4_0), &mut go)).unwrap();
        std::fs::read(&out).unwrap()
    };
    let first = run(1, 1);
    assert_eq!(first, run(1, 3));
    assert_ne!(first, run(40, 1));
}

#[test]
fn a_stopped_run_continues_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (out, other) = (folder.path().join("q.gguf"), folder.path().join("whole.gguf"));
    let base = small(Arch::Llama);
    let options = all_steps(Profile::Q4_0);
    let whole = tune(&base, &other, &texts(1), &options, &mut go).unwrap();
    let stop_at = |layer: usize, options: &TuneOptions| {
        tune(&base, &out, &texts(1), options, &mut |p| {
            if p.done == layer { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    };
    assert!(matches!(stop_at(1, &options), Err(QuantizeError::Cancelled)));
    assert!(!out.exists());
    let part = folder.path().join("q.gguf.parts/block-00000.gguf");
    let kept = std::fs::metadata(&part).unwrap().modified().unwrap();
    assert!(matches!(stop_at(2, &options), Err(QuantizeError::Cancelled)));
    assert_eq!(std::fs::metadata(&part).unwrap().modified().unwrap(), kept, "the first block was not made again");
    let resumed = tune(&base, &out, &texts(1), &options, &mut go).unwrap();
    assert_eq!(resumed, whole);
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&other).unwrap());
    // Blocks of other options, and damaged ones, are made anew.
    let plain = TuneOptions { compensate: false, ..options.clone() };
    assert!(stop_at(1, &plain).is_err());
    std::fs::write(folder.path().join("q.gguf.parts/block-00001.gguf"), b"GGUF").unwrap();
    assert_eq!(tune(&base, &out, &texts(1), &options, &mut go).unwrap(), whole);
}

#[test]
fn broken_weights_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let base = tiny_file_with(Arch::Llama, |_, parts| {
        parts.iter_mut().find(|(n, ..)| n == "blk.1.ffn_up.weight").unwrap().2[5] = 1e38;
        parts.iter_mut().find(|(n, ..)| n == "blk.1.ffn_up.weight").unwrap().2[6] = 1e38;
    });
    let e = tune(&base, &out, &texts(1), &all_steps(Profile::Q8_0), &mut go).unwrap_err().to_string();
    assert!(e.contains("`blk.1.ffn_down.weight`") || e.contains("`blk.1.ffn_up.weight`"), "{e}");
    assert!(!out.exists());
    let coded = folder.path().join("coded.gguf");
    crate::quantize::quantize(
        &small(Arch::Llama),
        &coded,
        &crate::quantize::QuantizeOptions::new(Profile::Q8_0),
        &mut go,
    )
    .unwrap();
    let e = tune(&opened(&coded), &out, &texts(1), &all_steps(Profile::Q4_0), &mut go).unwrap_err();
    assert!(matches!(e, QuantizeError::AlreadyQuantized { .. }), "{e}");
    let e = tune(&base, &out, &[], &all_steps(Profile::Q8_0), &mut go).unwrap_err().to_string();
    assert!(e.contains("no calibration text"), "{e}");
}

#[test]
fn a_budget_is_kept_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let base = small(Arch::Llama);
    let uniform = tune(&base, &out, &texts(1), &all_steps(Profile::Q4_1), &mut go).unwrap();
    let options = TuneOptions::new(Goal::Budget(uniform.size_bytes));
    let report = tune(&base, &out, &texts(1), &options, &mut go).unwrap();
    let predicted = report.predicted.clone().unwrap();
    assert!(report.size_bytes <= uniform.size_bytes, "{predicted:?}");
    assert!(report.size_bytes as f64 >= 0.995 * uniform.size_bytes as f64, "{predicted:?}");
    assert_eq!(predicted.size_bytes, report.size_bytes);
    assert!(predicted.loss <= predicted.uniform_loss.unwrap(), "{predicted:?}");
    let embedding = find(&report, "token_embd.weight");
    assert!(embedding.row.to.bits_per_weight() >= TensorType::Q6K.bits_per_weight(), "floor of what makes the logits");
    assert_eq!(embedding.row.to, TensorType::Q8_0, "rows of 64 are no whole blocks of Q6_K");
    let lower = TuneOptions { floors: [("token_embd.weight".into(), TensorType::Q4_0)].into(), ..options.clone() };
    let report = tune(&base, &out, &texts(1), &lower, &mut go).unwrap();
    assert!(report.predicted.unwrap().loss <= predicted.loss);

    let e = tune(&base, &out, &texts(1), &TuneOptions::new(Goal::Budget(1000)), &mut go).unwrap_err();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a refusal leaves nothing");
    let QuantizeError::Budget { budget: 1000, least } = e else { panic!("{e}") };
    let report = tune(&base, &out, &texts(1), &TuneOptions::new(Goal::Budget(least)), &mut go).unwrap();
    assert_eq!(report.size_bytes, least, "the smallest size it names can be made");
}

/// Mean divergence of the file from the base, nats a token.
fn divergence(base: &Gguf, file: &Gguf, tokens: &[u32]) -> f64 {
    let logits = |gguf: &Gguf| {
        let mut rows = Vec::new();
        let decoder = Decoder::load_with(gguf, crate::model::Storage::F32).unwrap();
        let mut keep = |_, row: &[f32]| {
            rows.push(row.to_vec());
            Ok(())
        };
        decoder.visit_logits(tokens, 0..tokens.len(), &mut keep).unwrap();
        rows
    };
    let (a, b) = (logits(base), logits(file));
    a.iter().zip(&b).map(|(a, b)| crate::eval::kl_divergence(a, b)).sum::<f64>() / tokens.len() as f64
}

/// What the types of a looked-up embedding cost, counted by hand over the tokens of the texts: 240, so that all are measured.
#[test]
fn the_damage_to_a_looked_up_embedding_is_measured_on_the_tokens_in_use() {
    let base = small_with(Arch::Llama, true);
    let config = ModelConfig::from_gguf(&base, &mut Vec::new()).unwrap();
    let (texts, options) = (texts(1), TuneOptions::new(Goal::Budget(0)));
    let gradients = budget::gradients(&base, &texts, &mut go).unwrap();
    let found = budget::measure(&base, &config, &texts, &options, &gradients, &mut go).unwrap();
    assert_eq!(found.len(), 2 * 7 + 2);
    let embedding = found.iter().find(|c| c.name == "token_embd.weight").unwrap();
    let values = base.dequantize(base.tensor("token_embd.weight").unwrap()).unwrap();
    let mut last = f64::INFINITY;
    for ty in [TensorType::Q4_0, TensorType::Q5_0, TensorType::Q8_0] {
        let bytes = crate::codec::quantize(ty, &values, 64, None).unwrap();
        let back = crate::codec::dequantize(ty, &bytes, values.len()).unwrap();
        let of_token = |t: &u32| -> f64 {
            let row = *t as usize * 64..(*t as usize + 1) * 64;
            let errors = values[row.clone()].iter().zip(&back[row]).map(|(a, b)| f64::from(a - b).powi(2));
            errors.zip(&gradients.embedding_square).map(|(e, g)| e * f64::from(*g)).sum()
        };
        let want = 0.5 * texts.iter().flatten().map(of_token).sum::<f64>() / 240.0;
        let got = embedding.loss(ty).unwrap();
        assert!((got / want - 1.0).abs() < 1e-5 && got < 0.5 * last, "{ty}: {got} {want}");
        last = got;
    }
    assert_eq!(embedding.loss(TensorType::Q4K), None, "rows of 64 are no whole blocks of it");
    let floor = TuneOptions { floors: [("token_embd.weight".into(), TensorType::Q6K)].into(), ..options.clone() };
    let found = budget::measure(&base, &config, &texts, &floor, &gradients, &mut go).unwrap();
    let embedding = found.iter().find(|c| c.name == "token_embd.weight").unwrap();
    assert_eq!((embedding.loss(TensorType::Q5_1), embedding.loss(TensorType::Q8_0)), (None, Some(last)));
    let given = TuneOptions { overrides: floor.floors, ..options };
    let found = budget::measure(&base, &config, &texts, &given, &gradients, &mut go).unwrap();
    assert!(found.iter().all(|c| c.name != "token_embd.weight"), "its type is given");
    assert!(budget::gradients(&small(Arch::Llama), &texts, &mut go).unwrap().embedding_square.is_empty());
}

#[test]
fn a_budget_also_spends_bytes_on_a_looked_up_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q.gguf");
    let base = small_with(Arch::Llama, true);
    let embedding = base.tensor("token_embd.weight").unwrap();
    let run = |options: &TuneOptions| {
        let report = tune(&base, &out, &texts(1), options, &mut go)?;
        let file = opened(&out);
        assert_eq!(file.size_bytes(), report.size_bytes);
        let to = find(&report, "token_embd.weight").row.to;
        let plain = crate::codec::quantize(to, &base.dequantize(embedding).unwrap(), 64, None).unwrap();
        assert_eq!(file.bytes(file.tensor("token_embd.weight").unwrap()), plain, "what was measured is what is stored");
        Ok::<_, QuantizeError>((report, divergence(&base, &file, &some_tokens(90, 40))))
    };
    let old = [("token_embd.weight".to_owned(), TensorType::Q5_0)];
    let at = |budget: u64, overrides: &[(String, TensorType)]| {
        let overrides = overrides.iter().cloned().collect();
        run(&TuneOptions { overrides, ..TuneOptions::new(Goal::Budget(budget)) })
    };
    // Room for 8 bits everywhere: an embedding that has fewer is what is left to lose.
    let all_8_bits = crate::gguf::file_bytes(base.metadata(), &specs(&base, TensorType::Q8_0)).unwrap() + 1000;
    let ((large, far), (_, fixed)) = (at(all_8_bits, &[]).unwrap(), at(all_8_bits, &old).unwrap());
    assert!(large.size_bytes <= all_8_bits && find(&large, "token_embd.weight").row.to == TensorType::Q8_0);
    assert!(far < 0.5 * fixed, "{far} with 8 bits, {fixed} with 5");
    // Little room: it gives bytes to others, or gets them, as its damage says.
    let Err(QuantizeError::Budget { least, .. }) = at(1000, &[]) else { panic!("1000 bytes are enough") };
    let (small, _) = at(least, &[]).unwrap();
    assert_eq!((small.size_bytes, find(&small, "token_embd.weight").row.to.bits_per_weight()), (least, 4.5));
    let middle = least + (all_8_bits - least) / 3;
    let (report, _) = at(middle, &[]).unwrap();
    assert!(report.size_bytes <= middle && report.size_bytes as f64 > 0.99 * middle as f64, "{middle}: {report:?}");
    let predicted = report.predicted.unwrap();
    assert!(predicted.loss <= predicted.uniform_loss.unwrap());
}

/// The tensors of a file with all matrices of one type.
fn specs(base: &Gguf, ty: TensorType) -> Vec<crate::gguf::TensorSpec> {
    let one = |t: &crate::gguf::TensorInfo| if is_matrix(t) { ty } else { t.ty };
    base.tensors().iter().map(|t| crate::gguf::TensorSpec { ty: one(t), ..t.spec() }).collect()
}
