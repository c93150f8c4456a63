//! `train` and `merge`: an adapter that learns, repeats and resumes; merged weights that compute the same; norms that are
//! trained alone.

use super::Place;
use super::quantize::{interrupt, until};
use super::tiny::Tiny;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{Adapter, Decoder, Storage};
use serde_json::{Value, json};
use std::fs;
use std::process::Stdio;

fn conversations(n: usize) -> String {
    let line = |i: usize| {
        json!({ "messages": [
            { "role": "system", "content": "Answer." },
            { "role": "user", "content": format!("What comes after {i}?") },
            { "role": "assistant", "content": format!("{}", i + 1) },
        ] })
    };
    let held_out = json!({ "split": "holdout", "messages": [{ "role": "assistant", "content": "x" }] });
    (0..n).map(|i| format!("{}\n", line(i))).chain([format!("{held_out}\n")]).collect()
}

fn place() -> Place {
    let place = Place::new(Tiny::default());
    fs::write(place.at("data.jsonl"), conversations(12)).unwrap();
    place
}

/// Logits of some tokens, all positions.
fn logits(model: &Decoder) -> Vec<f32> {
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % 256).collect();
    let mut out = Vec::new();
    model
        .visit_logits(&tokens, 0..tokens.len(), &mut |_, row| {
            out.extend_from_slice(row);
            Ok(())
        })
        .unwrap();
    out
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn an_adapter_learns_and_its_merge_computes_the_same() {
    let place = place();
    let run = "train base.gguf data.jsonl a.gguf --steps 12 --lr 0.01 --targets q,v,down --rank 4 --json";
    let made = place.ok(&format!("{run} --report losses.json")).json();
    assert_eq!(made["conversations"], 12, "the held-out line trains nothing");
    assert!(made["last_loss"].as_f64().unwrap() < 0.8 * made["first_loss"].as_f64().unwrap(), "{made}");
    let losses: Value = serde_json::from_slice(&place.bytes("losses.json")).unwrap();
    assert_eq!((losses["steps"].as_array().unwrap().len(), losses["recipe"]["rank"].clone()), (12, json!(4)));
    place.ok(&run.replace("a.gguf", "b.gguf"));
    assert_eq!(place.bytes("a.gguf"), place.bytes("b.gguf"), "the same seed, the same adapter");
    place.ok(&run.replace("a.gguf", "c.gguf --seed 8"));
    assert_ne!(place.bytes("a.gguf"), place.bytes("c.gguf"));
    let seen = place.ok("inspect a.gguf --json").json();
    assert_eq!((seen["adapter"]["rank"].clone(), seen["adapter"]["matrices"].clone()), (json!(4), json!(6)));

    place.ok("merge base.gguf a.gguf merged.gguf --type f32");
    let base = Decoder::load_with(&place.open("base.gguf"), Storage::F32).unwrap();
    let adapter = Adapter::from_gguf(&place.open("a.gguf")).unwrap();
    let adapted = logits(&base.with_adapter(&adapter).unwrap());
    let merged = logits(&Decoder::load_with(&place.open("merged.gguf"), Storage::F32).unwrap());
    assert!(largest_difference(&adapted, &merged) < 1e-3, "{}", largest_difference(&adapted, &merged));
    assert!(largest_difference(&logits(&base), &merged) > 0.1, "the adapter changes something");
    let base_nll = |extra: &str| {
        let seen = place.ok(&format!("eval base.gguf --text data.jsonl --window 64 --json{extra}")).json();
        seen["perplexity"]["nll"].as_f64().unwrap()
    };
    fs::write(place.at("data.jsonl"), conversations(12).lines().take(12).collect::<Vec<_>>().join("\n")).unwrap();
    assert!(base_nll(" --adapter a.gguf") < base_nll("") - 0.2);
}

#[test]
fn another_base_is_refused_unless_it_is_allowed() {
    let place = place();
    place.ok("train base.gguf data.jsonl a.gguf --steps 1");
    Tiny { seed: 2, ..Tiny::default() }.write(&place.at("other.gguf"));
    place.fails(1, "merge other.gguf a.gguf m.gguf", "trained on base");
    assert!(!place.at("m.gguf").exists());
    let allowed = place.ok("merge other.gguf a.gguf m.gguf --allow-other-base");
    assert!(allowed.err.contains("the base is not checked"), "{allowed:?}");
    assert!(Gguf::open(&place.at("m.gguf")).is_ok());
    Tiny { width: 128, ..Tiny::default() }.write(&place.at("wide.gguf"));
    place.fails(1, "merge wide.gguf a.gguf w.gguf --allow-other-base", "the model's matrix is");
    place.fails(1, "merge base.gguf base.gguf w.gguf", "general.type");
    place.fails(1, "eval other.gguf --adapter a.gguf --speed", "trained on base");
}

#[test]
fn data_that_cannot_be_trained_on_is_refused_by_its_line() {
    let place = place();
    fs::write(place.at("bad.jsonl"), "{\"messages\": []}\n").unwrap();
    place.fails(1, "train base.gguf bad.jsonl x.gguf", "does not end with an answer");
    fs::write(place.at("bad.jsonl"), "\n{\"text\": 1}\n").unwrap();
    place.fails(1, "train base.gguf bad.jsonl x.gguf", "line 2");
    fs::write(place.at("bad.jsonl"), "").unwrap();
    place.fails(1, "train base.gguf bad.jsonl x.gguf", "nothing to train on");
    assert!(!place.at("x.gguf").exists() && !place.at("x.gguf.state").exists());
}

#[test]
fn a_run_that_was_stopped_goes_on_to_the_same_adapter() {
    let place = Place::new(Tiny { layers: 8, width: 128, ffn: 512, ..Tiny::default() });
    fs::write(place.at("data.jsonl"), conversations(40)).unwrap();
    let run = |out: &str| format!("train base.gguf data.jsonl {out} --steps 120 --json");
    place.ok(&run("whole.gguf"));
    let child = place.command(&run("out.gguf")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the first state", || place.at("out.gguf.state").exists());
    assert_eq!(interrupt(child), Some(130));
    assert!(!place.at("out.gguf").exists());
    let ended = place.ok(&run("out.gguf"));
    assert!(ended.json()["resumed_at"].as_u64().unwrap() >= 10, "{ended:?}");
    assert!(ended.err.contains("went on after step"), "{ended:?}");
    assert_eq!(place.bytes("out.gguf"), place.bytes("whole.gguf"));
    assert!(!place.at("out.gguf.state").exists());
}

/// A place whose data leave out whole answers, which are measured.
fn measured_place() -> Place {
    let place = place();
    let line = |(i, line): (usize, &str)| {
        let split = if i < 12 { "train" } else { "holdout" };
        line.replacen('{', &format!("{{\"split\":\"{split}\","), 1) + "\n"
    };
    let lines: String = conversations(14).lines().take(14).enumerate().map(line).collect();
    fs::write(place.at("data.jsonl"), lines).unwrap();
    place
}

#[test]
fn an_adapter_is_trained_for_a_format_with_a_teacher_and_for_peft() {
    let place = measured_place();
    let run = "train base.gguf data.jsonl q.gguf --steps 8 --lr 0.003 --grid q4_0 --teacher base.gguf --teacher-share 1 --peft q --json";
    let made = place.ok(run).json();
    let [before, after] = [0, 1].map(|i| made["divergence"][i].as_f64().unwrap());
    assert!(before > 0.0 && after < before, "the format costs {before}, and after training for it {after}");
    place.ok("merge base.gguf q.gguf own.gguf --type f32");
    place.ok("merge base.gguf q peft.gguf --type f32");
    let [own, peft] = ["own.gguf", "peft.gguf"]
        .map(|f| logits(&Decoder::load_with(&Gguf::open(&place.at(f)).unwrap(), Storage::F32).unwrap()));
    assert!(largest_difference(&own, &peft) < 1e-4);
    place.fails(2, "train base.gguf data.jsonl x.gguf --grid q3_k", "is no weight format");
    place.fails(2, "train base.gguf data.jsonl x.gguf --teacher-share 1", "--teacher");
}

#[test]
fn norms_alone_make_a_model_that_differs_in_its_norms_only() {
    let place = measured_place();
    let run = "train base.gguf data.jsonl n.gguf --norms --steps 12 --lr 0.003 --grid q4_0 --teacher base.gguf --teacher-share 1 --json";
    let made = place.ok(&format!("{run} --report report.json")).json();
    let [before, after] = [0, 1].map(|i| made["divergence"][i].as_f64().unwrap());
    assert!(before > 0.0 && after < before, "the format costs {before}, and after training for it {after}");
    assert_eq!((&made["norms"], &made["trained_values"]), (&json!(5), &json!(5 * 64)), "{made}");
    assert_eq!(made["model_bytes"], place.bytes("n.gguf").len(), "{made}");
    let report: Value = serde_json::from_slice(&place.bytes("report.json")).unwrap();
    assert_eq!((&report["trains"], &report["recipe"]["rank"]), (&json!("norms"), &Value::Null));
    let (base, new) = (place.open("base.gguf"), place.open("n.gguf"));
    assert_eq!(base.metadata(), new.metadata());
    assert_eq!(base.tensors().len(), new.tensors().len());
    for (a, b) in base.tensors().iter().zip(new.tensors()) {
        assert_eq!((&a.name, &a.dims, a.ty), (&b.name, &b.dims, b.ty));
        assert_eq!(base.bytes(a) == new.bytes(b), !a.name.ends_with("norm.weight"), "{}", a.name);
    }
    place.ok(&run.replace("n.gguf", "again.gguf"));
    assert_eq!(place.bytes("n.gguf"), place.bytes("again.gguf"), "the same seed, the same model");
    // without a grid the loss of the text falls, and the file's own loss is what training ended with
    let plain = "train base.gguf data.jsonl p.gguf --norms --steps 30 --batch 12 --lr 0.01 --schedule constant --json";
    let made = place.ok(plain).json();
    let [first, last] = ["first_loss", "last_loss"].map(|l| made[l].as_f64().unwrap());
    assert!(last < 0.9 * first, "{made}");
    let one_more = "train p.gguf data.jsonl x.gguf --norms --steps 1 --batch 12 --json";
    let now = place.ok(one_more).json()["first_loss"].as_f64().unwrap();
    assert!((now - last).abs() < 0.1 * last, "{now} after {last}");
}

#[test]
fn flags_of_adapters_are_refused_for_norms() {
    let place = place();
    for flag in ["--rank 8", "--alpha 16", "--rank-stabilized", "--dropout 0", "--targets q", "--peft folder"] {
        let name = flag.split(' ').next().unwrap();
        place.fails(2, &format!("train base.gguf data.jsonl x.gguf --norms {flag}"), name);
    }
    place.fails(2, "train base.gguf data.jsonl x.gguf --norms --teacher x.gguf", "OUT must be another file");
    assert!(!place.at("x.gguf").exists() && !place.at("x.gguf.state").exists());
}
