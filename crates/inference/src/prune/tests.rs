//! Tests of pruning.

use super::*;
use crate::gguf::{Gguf, TensorType};
use crate::model::tests::{some_tokens, tiny_file};
use crate::model::{Arch, Decoder, Mask};
use crate::quantize::{Profile, QuantizeOptions, quantize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

fn go(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn logits(model: &Decoder) -> Vec<f32> {
    let mut out = vec![];
    model
        .visit_logits(&some_tokens(40, 3), 0..40, &mut |_, row| {
            out.extend_from_slice(row);
            Ok(())
        })
        .unwrap();
    out
}

fn exported(base: &Gguf, mask: &Mask) -> Result<(Gguf, Pruned), PruneError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.gguf");
    let pruned = export(base, mask, &path)?;
    Ok((Gguf::from_bytes(std::fs::read(path).unwrap()).unwrap(), pruned))
}

fn layers(of: &[usize]) -> Mask {
    Mask { layers: of.iter().copied().collect(), ..Mask::default() }
}

fn groups(of: &[(usize, usize)]) -> Mask {
    let mut groups: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    of.iter().for_each(|(layer, group)| {
        groups.entry(*layer).or_default().insert(*group);
    });
    Mask { groups, ..Mask::default() }
}

#[test]
fn a_file_without_a_layer_is_the_masked_model() {
    for arch in [Arch::Llama, Arch::Qwen2] {
        let base = tiny_file(arch);
        let whole = Decoder::load(&base).unwrap();
        for layer in 0..2 {
            let (file, pruned) = exported(&base, &layers(&[layer])).unwrap();
            let got = logits(&Decoder::load(&file).unwrap());
            assert_eq!(got, logits(&whole.with_mask(layers(&[layer])).unwrap()));
            assert_ne!(got, logits(&whole));
            assert_eq!((pruned.layers, pruned.heads, pruned.kv_heads), (1, 4, 2));
            assert!(pruned.weights_after < pruned.weights_before);
        }
    }
}

#[test]
fn a_file_without_head_groups_is_the_masked_model() {
    for arch in [Arch::Llama, Arch::Qwen2] {
        let base = tiny_file(arch);
        let mask = groups(&[(0, 1), (1, 0)]);
        let (file, pruned) = exported(&base, &mask).unwrap();
        assert_eq!((pruned.layers, pruned.heads, pruned.kv_heads), (2, 2, 1));
        let got = logits(&Decoder::load(&file).unwrap());
        let want = logits(&Decoder::load(&base).unwrap().with_mask(mask).unwrap());
        // sums of fewer terms round differently
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{arch:?}: {worst}");
    }
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let base = tiny_file(Arch::Llama);
    for (mask, text) in [
        (layers(&[0, 1]), "needs a layer"),
        (layers(&[2]), "layer 2 of a model of 2"),
        (groups(&[(0, 2), (1, 0)]), "head group 2 of a model of 2"),
        (groups(&[(0, 1)]), "all must lose the same number"),
        (groups(&[(0, 0), (0, 1), (1, 0), (1, 1)]), "needs a head"),
    ] {
        let got = exported(&base, &mask).unwrap_err().to_string();
        assert!(got.contains(text), "{got} should say {text}");
    }
    // a quantised projection whose heads are not whole blocks
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.gguf");
    quantize(&base, &path, &QuantizeOptions::new(Profile::Q8_0), &mut |_| ControlFlow::Continue(())).unwrap();
    let quantized = Gguf::open(&path).unwrap();
    assert_eq!(quantized.tensor("blk.0.attn_output.weight").unwrap().ty, TensorType::Q8_0);
    let got = exported(&quantized, &groups(&[(0, 1), (1, 0)])).unwrap_err().to_string();
    assert!(got.contains("blk.0.attn_output.weight") && got.contains("not whole blocks of Q8_0"), "{got}");
}

#[test]
fn damage_is_measured_and_chosen_by() {
    let base = tiny_file(Arch::Llama);
    let model = Decoder::load(&base).unwrap();
    let tokens = some_tokens(160, 4);
    let options = PruneOptions { tokens: &tokens, window: 20 };
    let report = measure(&model, options, &mut go).unwrap();
    assert_eq!(report.parts.len(), 2 + 2 * 2);
    assert!(report.parts.windows(2).all(|w| w[0].divergence.kld <= w[1].divergence.kld));
    // a layer: 24·(64 + 3·40) + 32·24 weights; a group of two query heads and one pair of key and value
    let of = |part| report.parts.iter().find(|d| d.part == part).unwrap();
    assert_eq!(of(Part::Layer { layer: 1 }).weights, 24 * (64 + 120) + 32 * 24);
    assert_eq!(of(Part::Group { layer: 1, group: 0 }).weights, 2 * 24 * 8 * 3);
    // the same figure as a comparison of the model with its exported rest
    let (file, _) = exported(&base, &layers(&[1])).unwrap();
    let rest = Decoder::load(&file).unwrap();
    let want = crate::eval::divergence(&model, &rest, &tokens, 20, &mut go).unwrap();
    assert_eq!(of(Part::Layer { layer: 1 }).divergence, want);
    let lines = report.markdown();
    assert!(lines.contains("| layer 1 | 5184 (50.00 %) |") && lines.lines().count() == 8, "{lines}");

    let chosen = choose_layers(&model, 1, options, &mut go).unwrap();
    let best = report.parts.iter().find_map(|d| match d.part {
        Part::Layer { layer } => Some(layer),
        Part::Group { .. } => None,
    });
    assert_eq!(Some(chosen[0].0), best);
    assert!(choose_layers(&model, 2, options, &mut go).is_err());
    let mask = choose_groups(&report, 2, 1).unwrap();
    for layer in 0..2 {
        let kld = |group| of(Part::Group { layer, group }).divergence.kld;
        assert_eq!(mask.groups[&layer], BTreeSet::from([usize::from(kld(1) < kld(0))]));
    }
    assert!(choose_groups(&report, 2, 2).is_err());
    assert!(measure(&model, options, &mut |_, _| ControlFlow::Break(())).is_err());
}

/// Two layers and a head group of every layer go; stock runs the file as we do.
#[test]
#[ignore = "a measurement of some minutes that needs SmolLM2"]
fn stock_runs_a_pruned_model_as_we_do() {
    use crate::stock_tests::{compare, there, windows};
    use crate::testing::{data_file, model_file};
    use crate::tokenizer::Tokenizer;
    let base = model_file("SmolLM2-135M-Instruct.Q4_1.gguf").filter(|_| there());
    let (Some(base), Some(text)) = (base, data_file("text/wiki.dev.raw")) else { return };
    let gguf = Gguf::open(&base).unwrap();
    let (model, tokenizer) = (Decoder::load(&gguf).unwrap(), Tokenizer::from_gguf(&gguf).unwrap());
    let text: String = std::fs::read_to_string(text).unwrap().chars().take(12_000).collect();
    let tokens = tokenizer.encode(&text, false);
    let options = PruneOptions { tokens: &tokens[..256], window: 128 };
    let report = measure(&model, options, &mut go).unwrap();
    println!("{}", report.markdown());
    let chosen = choose_layers(&model, 2, options, &mut go).unwrap();
    println!("layers in order: {:?}", chosen.iter().map(|(l, d)| (l, d.kld)).collect::<Vec<_>>());
    let folder = tempfile::tempdir().unwrap();
    let mut masks = vec![layers(&chosen.iter().map(|(l, _)| *l).collect::<Vec<_>>())];
    masks.push(Mask { layers: masks[0].layers.clone(), ..choose_groups(&report, model.config().layers, 1).unwrap() });
    for mask in masks {
        let path = folder.path().join("pruned.gguf");
        println!("{:?}", export(&gguf, &mask, &path).unwrap());
        let ours = Decoder::load(&Gguf::open(&path).unwrap()).unwrap();
        let d = crate::eval::divergence(&model, &ours, &tokens[..4 * 256], 256, &mut go).unwrap();
        println!("against the whole model: KLD {}, PPL {}", d.kld, d.other.perplexity);
        let d = compare(&path, &ours, &windows(&tokens, 256, 500)).unwrap();
        println!("against stock on the same file: {d:?}");
        // stock rounds activations to 8 bits
        assert!(d.positions >= 500 && d.kld < 1e-2 && d.top1 > 0.95, "{d:?}");
    }
}
