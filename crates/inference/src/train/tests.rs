//! Tests of the trainer on tiny random models.

use super::*;
use crate::model::tests::{some_tokens, tiny_file};
use crate::model::{Arch, Storage, Target};

fn decoder(arch: Arch) -> Decoder {
    Decoder::load_with(&tiny_file(arch), Storage::F32).unwrap()
}

/// Samples with a common beginning of 3 tokens.
fn samples() -> Vec<Sample> {
    [(14, 9), (5, 4), (33, 30), (8, 4), (21, 20)]
        .iter()
        .enumerate()
        .map(|(i, (len, from))| {
            let mut tokens = some_tokens(*len, i as u32 + 1);
            tokens[..3].copy_from_slice(&[5, 9, 2]);
            Sample::new(tokens, *from)
        })
        .collect()
}

fn all_targets() -> LoraConfig {
    LoraConfig { rank: 3, alpha: 4.0, targets: Target::ALL.into(), ..LoraConfig::default() }
}

fn config() -> TrainConfig {
    TrainConfig { steps: 6, batch: 3, pass_tokens: 40, learning_rate: 5e-3, ..TrainConfig::default() }
}

/// Loss (sum of nats) of all samples in f64-summed passes, and optionally the gradient.
fn loss(trainer: &Trainer, grads: &mut [f32]) -> f64 {
    let texts: Vec<&Sample> = trainer.samples.iter().collect();
    let (dropout, teacher) = (trainer.trainable.dropout(), trainer.teacher.as_ref());
    let pass = pass::Pass { dropout, noise: [1, 2, 3], ..trainer.pass(teacher) };
    pass.run(&texts, 1.0, grads)
}

/// Compares the gradient of every tensor with slopes at some of its values.
fn gradient_check(arch: Arch, trainable: impl Into<Trainable>, tensors: usize) {
    slopes(Trainer::new(&decoder(arch), trainable, config(), samples()).unwrap(), tensors);
}

fn slopes(mut t: Trainer, tensors: usize) {
    // B starts at zero, which would hide the gradient of A.
    if t.adapter().is_ok() {
        let noise = crate::model::tests::noise(t.params.len(), 5, 0.2);
        t.params.values_mut().iter_mut().zip(&noise).for_each(|(v, n)| *v += n);
        t.effective.update(&t.decoder.weights, &t.params, t.config.grid).unwrap();
    }
    let mut grads = vec![0.0; t.params.len()];
    loss(&t, &mut grads);
    let mut ranges: Vec<(String, std::ops::Range<usize>)> = t
        .params
        .slots()
        .flat_map(|s| [(s.target.tensor(s.layer) + ".a", s.a.clone()), (s.target.tensor(s.layer) + ".b", s.b.clone())])
        .collect();
    ranges.extend(t.params.parts().map(|(part, _)| (part.name(), t.params.part(part).unwrap())));
    assert_eq!(ranges.len(), tensors);
    assert_eq!(ranges.iter().map(|(_, r)| r.len()).sum::<usize>(), grads.len());
    let mut scratch = vec![0.0; grads.len()];
    let mut slope = |t: &mut Trainer, i: usize, h: f32| {
        let old = t.params.values()[i];
        let mut at = |v: f32| {
            t.params.values_mut()[i] = v;
            t.effective.update(&t.decoder.weights, &t.params, t.config.grid).unwrap();
            loss(t, &mut scratch)
        };
        let (high, low) = (at(old + h), at(old - h));
        at(old);
        (high - low) / (2.0 * f64::from(h))
    };
    for (name, range) in ranges {
        let scale = f64::from(grads[range.clone()].iter().fold(0.0f32, |a, g| a.max(g.abs())));
        for i in range.clone().step_by((range.len() / 12).max(1)) {
            let (got, want) = (f64::from(grads[i]), slope(&mut t, i, 4e-3));
            let error = (got - want).abs();
            assert!(error < 1e-2 * scale + 1e-2 * want.abs() + 2e-3, "{name}, value {i}: {got} and {want}");
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    gradient_check(Arch::Llama, all_targets(), 2 * 7 * 2);
    gradient_check(Arch::Qwen2, LoraConfig { rank_stabilized: true, ..all_targets() }, 2 * 7 * 2);
    gradient_check(Arch::Qwen3, all_targets(), 2 * 7 * 2);
}

#[test]
fn gradients_of_whole_tensors_match_finite_differences() {
    gradient_check(Arch::Llama, Trainable::Full, 2 + 2 * 9);
    gradient_check(Arch::Qwen2, Trainable::Full, 2 + 2 * 10);
    gradient_check(Arch::Qwen3, Trainable::Full, 2 + 2 * 11);
    gradient_check(Arch::Qwen3, Trainable::Norms, 1 + 2 * 4);
}

#[test]
fn gradients_match_with_dropout_and_few_targets() {
    let lora = LoraConfig { dropout: 0.3, targets: vec![Target::K, Target::O, Target::Down], ..all_targets() };
    gradient_check(Arch::Llama, lora, 2 * 3 * 2);
}

/// The grid of F32 rounds nothing, so that the way through a folded and rounded matrix has slopes.
#[test]
fn gradients_match_with_weights_a_teacher_and_a_grid() {
    let mut weighed = samples();
    for s in &mut weighed {
        s.weights = (s.answer_from..s.tokens.len()).map(|i| [0.5, 1.0, 0.0, 2.0][i % 4]).collect();
    }
    let grid = Some(WeightGrid::Gguf(crate::gguf::TensorType::F32));
    for (recompute, grid) in [(true, None), (false, grid)] {
        let c = TrainConfig { recompute, grid, ..config() };
        let d = decoder(Arch::Llama);
        let t = Trainer::new(&d, all_targets(), c, weighed.clone()).unwrap();
        let teacher = Decoder::load_with(&other_weights(), Storage::F32).unwrap();
        slopes(t.distill(&teacher, Distillation { temperature: 1.5, share: 0.6 }).unwrap(), 2 * 7 * 2);
    }
}

/// The tiny model with an embedding of its own.
fn other_weights() -> crate::gguf::Gguf {
    crate::model::tests::tiny_file_with(Arch::Llama, |_, parts| {
        parts[0].2 = crate::model::tests::noise(24 * 50, 77, 1.0);
    })
}

#[test]
fn computing_blocks_again_changes_no_bit() {
    let d = decoder(Arch::Qwen3);
    let run = |recompute: bool| {
        let lora = LoraConfig { dropout: 0.2, ..all_targets() };
        let mut t = Trainer::new(&d, lora, TrainConfig { recompute, ..config() }, samples()).unwrap();
        t.run(&mut |_| ControlFlow::Continue(())).unwrap();
        t.finish().unwrap()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn the_loss_counts_tokens_by_their_weights() {
    let d = decoder(Arch::Llama);
    let trainer = |s: Vec<Sample>| Trainer::new(&d, all_targets(), config(), s).unwrap();
    let one = |weights: Vec<f32>| Sample { weights, ..samples().swap_remove(0) };
    let nll = |weights: Vec<f32>| trainer(samples()).measure(&[one(weights)]).unwrap();
    let each: Vec<f64> = (0..5).map(|i| nll((0..5).map(|j| if i == j { 3.0 } else { 0.0 }).collect())).collect();
    let all = nll(vec![]);
    assert!((each.iter().sum::<f64>() / 5.0 - all).abs() < 1e-6, "{each:?} {all}");
    let half = nll(vec![1.0, 1.0, 0.0, 0.0, 2.0]);
    assert!((half - (each[0] + each[1] + 2.0 * each[4]) / 4.0).abs() < 1e-6);
    // only the proportions matter
    let step = |weight: f32| {
        let mut t = trainer(vec![one(vec![weight; 5]); 3]);
        (t.step().unwrap(), t.adapter().unwrap())
    };
    let ((report, plain), (_, heavy)) = (step(1.0), step(4.0));
    assert_eq!((report.answer_tokens, report.tokens), (15, 42));
    assert_eq!(plain, heavy);
    assert!(trainer(samples()).measure(&[Sample::new(vec![1], 1)]).is_err());
}

fn npu4() -> Option<WeightGrid> {
    Some(WeightGrid::Npu { profile: crate::quantize::npu::NpuProfile::Int4, group: 8 })
}

/// What the trainer promises for a format is what the merged and rounded model does.
#[test]
fn training_for_a_format_wins_back_what_rounding_costs() {
    let base = tiny_file(Arch::Llama);
    let d = Decoder::load_with(&base, Storage::F32).unwrap();
    let c = TrainConfig { steps: 40, batch: 5, grid: npu4(), pass_tokens: 100, ..config() };
    let how = Distillation { temperature: 1.0, share: 1.0 };
    let mut t = Trainer::new(&d, all_targets(), c.clone(), samples()).unwrap().distill(&d, how).unwrap();
    let before = t.divergence(&d, &samples()).unwrap();
    t.run(&mut |_| ControlFlow::Continue(())).unwrap();
    let after = t.divergence(&d, &samples()).unwrap();
    assert!(before > 0.01 && after < 0.6 * before, "{before} {after}");

    let adapter = t.adapter().unwrap();
    let merged = crate::model::merge(&base, &adapter, crate::model::MergedType::F32).unwrap();
    let merged = crate::model::tests::reopened(&merged.metadata.clone(), merged.tensors);
    let mut rounded = BTreeMap::new();
    for tensor in merged.tensors().iter().filter(|t| t.name.starts_with("blk") && t.dims.len() == 2) {
        let mut values = merged.dequantize(tensor).unwrap();
        npu4().unwrap().round(&mut values, tensor.dims[0] as usize, &tensor.name).unwrap();
        rounded.insert(tensor.name.clone(), values);
    }
    assert_eq!(rounded.len(), 14);
    let file = crate::model::tests::reopened(merged.metadata(), with_tensors(&merged, &rounded).unwrap());
    let real = Decoder::load_with(&file, Storage::F32).unwrap();
    let plain = Trainer::new(&real, Trainable::Norms, config(), samples()).unwrap();
    let got = plain.divergence(&d, &samples()).unwrap();
    assert!((got - after).abs() < 1e-5 + 1e-3 * after, "{got} {after}");
    let noisy = LoraConfig { dropout: 0.1, ..all_targets() };
    assert!(Trainer::new(&d, noisy, c, samples()).unwrap_err().to_string().contains("dropout"));
}

#[test]
fn norms_alone_repair_a_rounded_model() {
    let d = decoder(Arch::Llama);
    let c = TrainConfig { steps: 60, batch: 5, grid: npu4(), pass_tokens: 100, ..config() };
    let how = Distillation { temperature: 1.0, share: 1.0 };
    let mut t = Trainer::new(&d, Trainable::Norms, c, samples()).unwrap().distill(&d, how).unwrap();
    let before = t.divergence(&d, &samples()).unwrap();
    let first = t.step().unwrap().loss;
    assert!((f64::from(first) - before).abs() < 1e-4, "the loss is the divergence: {first} {before}");
    t.run(&mut |_| ControlFlow::Continue(())).unwrap();
    let after = t.divergence(&d, &samples()).unwrap();
    assert!(after < 0.9 * before, "{before} {after}");
    assert_eq!(t.tensors().len(), 5);
}

/// The tiny model with these types; rows of 24 and 40 fit F16 only, vectors of 24 may be anything.
fn stored(arch: Arch, ty: impl Fn(&str) -> crate::gguf::TensorType) -> crate::gguf::Gguf {
    let base = tiny_file(arch);
    let tensors = base.tensors().iter().map(|t| {
        let ty = ty(&t.name);
        let bytes = crate::codec::quantize(ty, &base.dequantize(t).unwrap(), t.row_len(), None).unwrap();
        (crate::gguf::TensorSpec { ty, ..t.spec() }, crate::gguf::TensorData::Bytes(bytes.into()))
    });
    crate::model::tests::reopened(base.metadata(), tensors.collect::<Vec<_>>())
}

/// The norms of heads too; matrices keep their bytes, norms become F32, and the file computes what the trainer does.
#[test]
fn a_file_with_trained_norms_computes_what_the_trainer_computes() {
    use crate::gguf::TensorType::{F16, F32};
    let teacher = decoder(Arch::Qwen3);
    let base =
        stored(Arch::Qwen3, |name| if name == "output_norm.weight" || name.contains("blk.0") { F16 } else { F32 });
    let d = Decoder::load_with(&base, Storage::F32).unwrap();
    for grid in [None, npu4()] {
        let c = TrainConfig { steps: 30, batch: 5, grid, pass_tokens: 100, ..config() };
        let how = Distillation { temperature: 1.0, share: 0.5 };
        let mut t = Trainer::new(&d, Trainable::Norms, c, samples()).unwrap().distill(&teacher, how).unwrap();
        let before = t.measure(&samples()).unwrap();
        t.run(&mut |_| ControlFlow::Continue(())).unwrap();
        let after = t.measure(&samples()).unwrap();
        assert!(after < 0.9 * before, "{grid:?}: {before} {after}");
        let trained = t.tensors();
        assert_eq!(trained.len(), 1 + 2 * 4);
        let file = crate::model::tests::reopened(base.metadata(), with_tensors(&base, &trained).unwrap());
        assert_eq!(file.metadata(), base.metadata());
        for (old, new) in base.tensors().iter().zip(file.tensors()) {
            assert_eq!((&old.name, &old.dims), (&new.name, &new.dims));
            match trained.get(&old.name) {
                Some(values) => {
                    assert_eq!((new.ty, &file.dequantize(new).unwrap()), (F32, values));
                    assert_ne!(&base.dequantize(old).unwrap(), values, "{}", old.name);
                }
                None => assert_eq!((old.ty, base.bytes(old)), (new.ty, file.bytes(new)), "{}", old.name),
            }
        }
        let loaded = Decoder::load_with(&file, Storage::F32).unwrap();
        let again = Trainer::new(&loaded, Trainable::Norms, TrainConfig { grid, ..config() }, samples()).unwrap();
        assert_eq!(again.measure(&samples()).unwrap(), after, "{grid:?}: to the bit");
        assert_eq!(again.divergence(&teacher, &samples()).unwrap(), t.divergence(&teacher, &samples()).unwrap());
        if grid.is_none() {
            let items = samples();
            let items: Vec<_> =
                items.iter().map(|s| crate::model::Scored { tokens: &s.tokens, from: s.answer_from }).collect();
            let nll: Vec<f64> = loaded.nll(&items).unwrap().into_iter().flatten().map(f64::from).collect();
            let mean = nll.iter().sum::<f64>() / nll.len() as f64;
            // The decoder keeps keys and values in f16.
            assert!((mean - after).abs() < 5e-3, "{mean} {after}");
        }
    }
}

#[test]
fn a_stopped_run_on_norms_ends_with_the_same_bits_and_is_no_run_on_adapters() {
    let d = decoder(Arch::Qwen3);
    let fresh = || Trainer::new(&d, Trainable::Norms, config(), samples()).unwrap();
    let (mut whole, mut first, mut second) = (fresh(), fresh(), fresh());
    whole.run(&mut |_| ControlFlow::Continue(())).unwrap();
    for _ in 0..4 {
        first.step().unwrap();
    }
    second.restore(&first.save()).unwrap();
    second.run(&mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((second.save(), second.tensors()), (whole.save(), whole.tensors()));
    let mut other = Trainer::new(&d, all_targets(), config(), samples()).unwrap();
    assert!(other.restore(&first.save()).unwrap_err().to_string().contains("another"));
}

#[test]
fn a_teacher_is_part_of_the_run() {
    let d = decoder(Arch::Llama);
    let how = Distillation { temperature: 2.0, share: 1.0 };
    let fresh = || Trainer::new(&d, all_targets(), config(), samples()).unwrap();
    let mut own = fresh().distill(&d, how).unwrap();
    let report = own.step().unwrap();
    assert!(report.loss.abs() < 1e-6 && report.grad_norm < 1e-5, "nothing to learn from itself: {report:?}");
    let e = fresh().restore(&own.save()).unwrap_err().to_string();
    assert!(e.contains("another"), "{e}");
    let warm = Distillation { temperature: 0.0, ..how };
    assert!(fresh().distill(&d, warm).unwrap_err().to_string().contains("temperature"));
    let small = crate::model::tests::tiny_file_with(Arch::Llama, |_, parts| {
        parts[0].1[1] = 49;
        parts[0].2.truncate(24 * 49);
    });
    let e = fresh().distill(&Decoder::load(&small).unwrap(), how).unwrap_err().to_string();
    assert!(e.contains("49 tokens, the student 50"), "{e}");
}

#[test]
fn the_training_pass_computes_what_the_decoder_computes() {
    let d = decoder(Arch::Qwen2);
    let mut t = Trainer::new(&d, all_targets(), config(), samples()).unwrap();
    for _ in 0..3 {
        t.step().unwrap();
    }
    let adapted = d.with_adapter(&t.adapter().unwrap()).unwrap();
    let items: Vec<_> =
        t.samples.iter().map(|s| crate::model::Scored { tokens: &s.tokens, from: s.answer_from }).collect();
    let want: f64 = adapted.nll(&items).unwrap().iter().flatten().map(|v| f64::from(*v)).sum();
    let got = loss(&t, &mut vec![0.0; t.params.len()]);
    // The decoder keeps keys and values in f16.
    assert!((got - want).abs() < 2e-2, "{got} {want}");
}

#[test]
fn loss_falls_and_the_cut_into_passes_changes_nothing_but_rounding() {
    let d = decoder(Arch::Llama);
    let run = |pass_tokens: usize| {
        let mut t =
            Trainer::new(&d, all_targets(), TrainConfig { steps: 40, pass_tokens, ..config() }, samples()).unwrap();
        let mut losses = vec![];
        t.run(&mut |r| {
            losses.push(r.loss);
            ControlFlow::Continue(())
        })
        .unwrap();
        losses
    };
    let (one, many) = (run(10_000), run(1));
    assert!((one[0] - many[0]).abs() < 1e-4, "{} {}", one[0], many[0]);
    let mean = |l: &[f32]| l.iter().sum::<f32>() / l.len() as f32;
    assert!(mean(&one[35..]) < 0.5 * mean(&one[..5]), "{one:?}");
}

#[test]
fn an_interrupted_run_ends_with_the_same_bits() {
    let d = decoder(Arch::Llama);
    let lora = LoraConfig { dropout: 0.1, ..all_targets() };
    let schedule = TrainConfig { schedule: Schedule::Cosine, warmup_steps: 2, weight_decay: 0.01, ..config() };
    let fresh = || Trainer::new(&d, lora.clone(), schedule.clone(), samples()).unwrap();
    let mut whole = fresh();
    whole.run(&mut |_| ControlFlow::Continue(())).unwrap();

    let mut first = fresh();
    let stopped = first.run(&mut |r| {
        if r.step == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(ModelError::Cancelled)));
    let bytes = first.save();
    let mut second = fresh();
    second.restore(&bytes).unwrap();
    assert_eq!(second.steps_done(), 4);
    second.run(&mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(second.save(), whole.save());
    assert_eq!(second.finish().unwrap(), whole.finish().unwrap());

    let mut cut = bytes.clone();
    cut.truncate(bytes.len() - 1);
    assert!(fresh().restore(&cut).unwrap_err().to_string().contains("damaged"));
    let mut flipped = bytes.clone();
    flipped[100] ^= 1;
    assert!(fresh().restore(&flipped).is_err());
    let mut other = Trainer::new(&d, lora.clone(), TrainConfig { seed: 1, ..schedule.clone() }, samples()).unwrap();
    assert!(other.restore(&bytes).unwrap_err().to_string().contains("another"));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let d = decoder(Arch::Llama);
    let run = |trainable: Trainable, threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut t = Trainer::new(&d, trainable, config(), samples()).unwrap();
            t.run(&mut |_| ControlFlow::Continue(())).unwrap();
            t.save()
        })
    };
    for trainable in [Trainable::Lora(all_targets()), Trainable::Full] {
        assert_eq!(run(trainable.clone(), 1), run(trainable, 4));
    }
}

#[test]
fn a_whole_model_learns_and_its_file_computes_what_the_trainer_computes() {
    let base = tiny_file(Arch::Qwen2);
    let d = Decoder::load_with(&base, Storage::F32).unwrap();
    let c = TrainConfig { steps: 30, batch: 5, weight_decay: 0.1, pass_tokens: 100, ..config() };
    let fresh = || Trainer::new(&d, Trainable::Full, c.clone(), samples()).unwrap();
    let mut t = fresh();
    let mut losses = vec![];
    let mut middle = vec![];
    for _ in 0..30 {
        if t.steps_done() == 12 {
            middle = t.save();
        }
        losses.push(t.step().unwrap().loss);
    }
    assert!(losses[29] < 0.2 * losses[0], "{losses:?}");
    let mut resumed = fresh();
    resumed.restore(&middle).unwrap();
    resumed.run(&mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(resumed.save(), t.save());

    let trained = t.tensors();
    assert_eq!(trained.len(), base.tensors().len());
    let file = crate::model::tests::reopened(base.metadata(), with_tensors(&base, &trained).unwrap());
    let again = Trainer::new(&Decoder::load_with(&file, Storage::F32).unwrap(), Trainable::Full, c, samples()).unwrap();
    assert_eq!(again.params.values(), t.params.values());
    assert!(again.adapter().unwrap_err().to_string().contains("whole tensors"));
    let short = [("output_norm.weight".to_owned(), vec![1.0])].into();
    assert!(with_tensors(&base, &short).err().unwrap().to_string().contains("1 trained values, the base has 24"));
    let broken = [("output_norm.weight".to_owned(), [vec![1.0; 23], vec![f32::INFINITY]].concat())].into();
    assert!(with_tensors(&base, &broken).err().unwrap().to_string().contains("trained value 23 is inf"));
    let unknown = [("rope_freqs.weight".to_owned(), vec![1.0])].into();
    assert!(with_tensors(&base, &unknown).err().unwrap().to_string().contains("no such tensor"));
}

#[test]
fn random_weights_have_the_wanted_spread_and_load() {
    let c = decoder(Arch::Llama).config().clone();
    let file = |seed| crate::model::tests::reopened(tiny_file(Arch::Llama).metadata(), random_model(&c, seed).unwrap());
    let spread = |name: &str, file: &crate::gguf::Gguf| {
        let v = file.dequantize(file.tensor(name).unwrap()).unwrap();
        (v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / v.len() as f64).sqrt()
    };
    let (a, b) = (file(1), file(1));
    assert!(a.tensors().iter().zip(b.tensors()).all(|(x, y)| a.bytes(x) == b.bytes(y)));
    assert_ne!(a.bytes(&a.tensors()[0]), file(2).bytes(&a.tensors()[0]));
    for (name, want) in [("token_embd.weight", 0.02), ("blk.1.ffn_down.weight", 0.01), ("blk.0.attn_norm.weight", 1.0)]
    {
        let got = spread(name, &a);
        assert!((got / want - 1.0).abs() < 0.1, "{name}: {got}");
    }
    assert!(Decoder::load(&a).is_ok());
    assert!(random_model(decoder(Arch::Qwen2).config(), 1).is_err());
}

#[test]
fn every_epoch_has_every_sample_once() {
    let t = Trainer::new(&decoder(Arch::Llama), all_targets(), config(), samples()).unwrap();
    let mut seen = vec![];
    for step in 0..5 {
        let t = Trainer { step, ..Trainer::new(&t.decoder, all_targets(), t.config.clone(), samples()).unwrap() };
        seen.extend(t.next_samples());
    }
    for epoch in seen.chunks(5) {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4]);
    }
}

#[test]
fn overflow_stops_with_a_name_and_keeps_the_adapter() {
    let d = decoder(Arch::Llama);
    let mut t = Trainer::new(&d, all_targets(), config(), samples()).unwrap();
    t.step().unwrap();
    t.params.values_mut().iter_mut().for_each(|v| *v *= 1e19);
    let before = t.save();
    let error = t.step().unwrap_err();
    assert!(matches!(&error, ModelError::NotFinite { .. }), "{error}");
    assert_eq!(t.save(), before);
}

#[test]
fn senseless_configurations_are_refused() {
    let d = decoder(Arch::Llama);
    let refuse = |l: LoraConfig, c: TrainConfig, s: Vec<Sample>| Trainer::new(&d, l, c, s).unwrap_err().to_string();
    assert!(refuse(LoraConfig { rank: 0, ..all_targets() }, config(), samples()).contains("rank"));
    assert!(refuse(LoraConfig { targets: vec![Target::Q; 2], ..all_targets() }, config(), samples()).contains("once"));
    assert!(refuse(all_targets(), TrainConfig { batch: 0, ..config() }, samples()).contains("batch"));
    assert!(refuse(all_targets(), config(), vec![]).contains("no training samples"));
    let late = Sample::new(vec![1, 2], 2);
    assert!(refuse(all_targets(), config(), vec![late]).contains("token 2 of 2"));
}

/// A vocabulary of single bytes and the given control tokens.
pub(super) fn byte_tokenizer(control: &[&str]) -> crate::tokenizer::Tokenizer {
    use crate::gguf::{Array, Gguf, Value, write};
    let bytes = (0..=255u8).map(|b| (format!("<0x{b:02X}>"), 6));
    let tokens: Vec<(String, i32)> = [("<unk>".to_owned(), 2)]
        .into_iter()
        .chain(control.iter().map(|c| ((*c).to_owned(), 3)))
        .chain(bytes)
        .collect();
    let scores = vec![0.0; tokens.len()];
    let (texts, kinds) = tokens.into_iter().unzip();
    let metadata = [
        ("tokenizer.ggml.model", Value::from("llama")),
        ("tokenizer.ggml.tokens", Value::Array(Array::String(texts))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))),
        ("tokenizer.ggml.scores", Value::Array(Array::F32(scores))),
        ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
        ("tokenizer.ggml.add_space_prefix", Value::Bool(false)),
    ]
    .map(|(key, value)| (key.to_owned(), value));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.gguf");
    write(&path, &metadata, []).unwrap();
    crate::tokenizer::Tokenizer::from_gguf(&Gguf::from_bytes(std::fs::read(&path).unwrap()).unwrap()).unwrap()
}
