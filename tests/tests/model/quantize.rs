//! `calibrate` and `quantize`: sizes, refusals, budgets, tensor packs, and runs that were stopped.

use super::Place;
use super::tiny::{Tiny, VOCAB, prose};
use flywheel_inference::gguf::TensorType;
use flywheel_inference::quantize::Imatrix;
use flywheel_inference::quantize::npu::NpuPack;
use serde_json::json;
use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Bytes of all tensors when matrices of rows of `block` weights take `bytes` a block, and the embedding another type.
fn tensor_bytes(model: &Tiny, ty: TensorType, output: TensorType) -> u64 {
    let of = |spec: &flywheel_inference::gguf::TensorSpec| {
        let n: u64 = spec.dims.iter().product();
        let ty = match spec.dims.len() {
            1 => TensorType::F32,
            _ if spec.name == "token_embd.weight" => output,
            _ => ty,
        };
        n / ty.block_len() as u64 * ty.block_bytes() as u64
    };
    model.specs().iter().map(of).sum()
}

#[test]
fn files_have_the_types_and_sizes_of_their_profile() {
    let model = Tiny::default();
    let place = Place::new(model);
    // tied: the embedding makes the logits; rows of 64 are no blocks of 256
    for (profile, ty, output) in [
        ("q8_0", TensorType::Q8_0, TensorType::Q8_0),
        ("q4_0", TensorType::Q4_0, TensorType::Q8_0),
        ("q5_1", TensorType::Q5_1, TensorType::Q8_0),
        ("f16", TensorType::F16, TensorType::F16),
    ] {
        let report = place.ok(&format!("quantize base.gguf {profile}.gguf --profile {profile} --json")).json();
        let made = place.open(&format!("{profile}.gguf"));
        let data: u64 = made.tensors().iter().map(|t| t.len as u64).sum();
        assert_eq!(data, tensor_bytes(&model, ty, output), "{profile}");
        assert_eq!(report["size_bytes"], json!(fs::metadata(place.at(&format!("{profile}.gguf"))).unwrap().len()));
        let bits = 8.0 * data as f64 / model.weights() as f64;
        assert!((report["bits_per_weight"].as_f64().unwrap() - bits).abs() < 1e-9, "{report}");
        assert_eq!(made.tensor("blk.0.attn_q.weight").unwrap().ty, ty);
        assert_eq!(made.tensor("token_embd.weight").unwrap().ty, output);
    }
    let report = place.ok("quantize base.gguf k.gguf --profile q4_k_m --report k.json").out;
    // only the down projections have rows of 256
    assert!(
        report.contains("12 tensors have rows that are not whole blocks") || report.contains("13 tensors"),
        "{report}"
    );
    let whole: serde_json::Value = serde_json::from_slice(&place.bytes("k.json")).unwrap();
    let row = |name: &str| whole["tensors"].as_array().unwrap().iter().find(|t| t["name"] == name).unwrap().clone();
    assert_eq!(row("blk.0.attn_q.weight")["fallback_from"], "Q4_K");
    assert_eq!(
        (row("blk.0.attn_q.weight")["to"].clone(), row("blk.0.ffn_norm.weight")["to"].clone()),
        (json!("Q5_0"), json!("F32"))
    );
    assert_eq!(
        whole["fallbacks"],
        json!(whole["tensors"].as_array().unwrap().iter().filter(|t| !t["fallback_from"].is_null()).count())
    );
    let before = place.names();
    place.fails(1, "quantize base.gguf s.gguf --profile q4_k_m --strict-types", "not whole blocks of");
    place.fails(1, "quantize q4_0.gguf s.gguf --profile q8_0", "already Q4_0");
    place.fails(1, "quantize base.gguf s.gguf --profile q4_0 --type absent.weight=Q8_0", "absent.weight");
    assert_eq!(place.names(), before, "a refused run leaves nothing");
    place.ok("quantize q4_0.gguf again.gguf --profile q8_0 --allow-requantize");
    place.ok("quantize base.gguf mixed.gguf --profile q4_0 --type blk.1.ffn_up.weight=Q8_0");
    assert_eq!(place.open("mixed.gguf").tensor("blk.1.ffn_up.weight").unwrap().ty, TensorType::Q8_0);
}

#[test]
fn an_importance_matrix_is_made_read_and_used() {
    let place = Place::new(Tiny::default());
    let made = place.ok("calibrate base.gguf --text text.txt --out imatrix.gguf --chunk 128 --json").json();
    assert_eq!(
        (made["tokens"].clone(), made["texts"].clone()),
        (json!(8000), json!(63)),
        "62 pieces of 128 and one of 64"
    );
    assert_eq!(made["inputs"].as_array().unwrap().len(), 2 * 4 + 1);
    let imatrix = Imatrix::read(&place.at("imatrix.gguf")).unwrap();
    assert_eq!((imatrix.tensors().count(), imatrix.datasets.clone()), (15, vec!["text.txt".to_owned()]));
    let means = imatrix.get("blk.1.ffn_down.weight").unwrap();
    assert!(means.len() == 256 && means.iter().all(|m| *m > 0.0));
    let seen = place.ok("inspect imatrix.gguf --json").json();
    assert_eq!((seen["kind"].clone(), seen["imatrix"]["matrices"].clone()), (json!("imatrix"), json!(15)));
    place.ok("quantize base.gguf plain.gguf --profile q4_1");
    place.ok("quantize base.gguf weighted.gguf --profile q4_1 --imatrix imatrix.gguf");
    assert_eq!(
        place.bytes("plain.gguf").len(),
        place.bytes("weighted.gguf").len() - {
            let (a, b) = (place.open("weighted.gguf"), place.open("plain.gguf"));
            (a.size_bytes() - b.size_bytes()) as usize
        }
    );
    let weighted = place.open("weighted.gguf");
    assert_eq!(weighted.str("quantize.imatrix.dataset").unwrap(), "text.txt");
    let name = "blk.0.attn_q.weight";
    assert_ne!(weighted.bytes(weighted.tensor(name).unwrap()), {
        let plain = place.open("plain.gguf");
        plain.bytes(plain.tensor(name).unwrap()).to_vec()
    });
    place.fails(1, "quantize base.gguf x.gguf --profile q4_0 --imatrix base.gguf", "not `imatrix`");
}

#[test]
fn sensitivity_is_reported_as_a_table_and_for_machines() {
    let place = Place::new(Tiny::default());
    place.ok("calibrate base.gguf --text text.txt --max-tokens 1000 --out i.gguf --sensitivity s.md");
    let table = fs::read_to_string(place.at("s.md")).unwrap();
    assert!(table.contains("| blk.1.ffn_down.weight |") && table.contains("Rank correlation"), "{table}");
    place.ok("calibrate base.gguf --text text.txt --max-tokens 1000 --out i.gguf --sensitivity s.json --sensitivity-type Q8_0");
    let whole: serde_json::Value = serde_json::from_slice(&place.bytes("s.json")).unwrap();
    assert_eq!((whole["matrices"].as_array().unwrap().len(), whole["ty"].clone()), (14, json!("Q8_0")));
}

#[test]
fn calibrated_files_are_better_and_a_budget_is_kept() {
    let place = Place::new(Tiny::default());
    let tuned = place
        .ok("quantize base.gguf tuned.gguf --profile q4_0 --text text.txt --chunk 128 --max-tokens 4000 --json")
        .json();
    let step = |name: &str| tuned["steps"][name].as_f64().unwrap();
    assert!(
        step("stored") < step("folded") && step("folded") <= step("weighted") && step("weighted") < step("rounded"),
        "{tuned}"
    );
    assert!(tuned["calibration"]["tokens"].as_u64().unwrap() <= 4200, "{tuned}");
    let least = place.bytes("tuned.gguf").len() as u64;
    for budget in [least + 4_000, least + 40_000] {
        let run = format!(
            "quantize base.gguf b{budget}.gguf --profile auto --budget {budget} --text text.txt --max-tokens 4000"
        );
        let shown = place.ok(&run).out;
        let size = fs::metadata(place.at(&format!("b{budget}.gguf"))).unwrap().len();
        assert!(size <= budget && size + 8_000 > budget, "{size} of {budget}: {shown}");
        assert!(shown.contains("expected rise of the loss"), "{shown}");
    }
    place.fails(
        1,
        "quantize base.gguf no.gguf --profile auto --budget 50kB --text text.txt --max-tokens 2000",
        "the smallest with these types is",
    );
    assert!(!place.names().iter().any(|n| n.starts_with("no.gguf") || n.ends_with(".parts")), "{:?}", place.names());
    let kld = |file: &str| {
        let seen = place
            .ok(&format!("eval {file} --base base.gguf --text text.txt --window 128 --max-tokens 2000 --json"))
            .json();
        seen["divergence"]["kld"].as_f64().unwrap()
    };
    place.ok("quantize base.gguf plain.gguf --profile q4_0");
    let (plain, tuned) = (kld("plain.gguf"), kld("tuned.gguf"));
    assert!(tuned < 0.9 * plain, "{tuned} against {plain}");
    assert!(kld(&format!("b{}.gguf", least + 40_000)) < tuned);
}

#[test]
fn a_tensor_pack_holds_what_its_manifest_says() {
    let model = Tiny::default();
    let place = Place::new(model);
    let made = place
        .ok("quantize base.gguf pack --profile npu-int4 --group 32 --text text.txt --max-tokens 1000 --json")
        .json();
    let pack = NpuPack::open(&place.at("pack")).unwrap();
    assert_eq!(made["weights_sha256"], json!(pack.manifest.weights_sha256));
    let entry = pack.manifest.tensors.iter().find(|t| t.name == "blk.0.ffn_up.weight").unwrap();
    assert_eq!((entry.rows, entry.columns, entry.bits, entry.group_len), (256, 64, 4, 32));
    let output = pack.manifest.tensors.iter().find(|t| t.name == "token_embd.weight").unwrap();
    assert_eq!((output.rows as u64, output.bits), (VOCAB, 8), "what makes the logits keeps 8 bits");
    let spec = model.specs().into_iter().find(|s| s.name == entry.name).unwrap();
    let (values, back) = (model.values(&spec), pack.tensor(&entry.name).unwrap());
    let error: f32 = values.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
    let power: f32 = values.iter().map(|a| a * a).sum();
    assert!((error / power).sqrt() < 0.25, "{}", (error / power).sqrt());
    let seen = place.ok("inspect pack --json").json();
    assert_eq!((seen["kind"].clone(), seen["manifest"]["profile"].clone()), (json!("tensor_pack"), json!("npu-int4")));
    place.fails(1, "quantize base.gguf pack --profile npu-int4", "the folder exists");
    place.fails(2, "quantize base.gguf p2 --profile npu-int8 --strict-types", "tensor pack");
    place.fails(2, "quantize base.gguf p2.gguf --profile q8_0 --group 32", "--group is for the npu profiles");
}

/// Asks the process to stop as Ctrl-C does, and waits for its exit code.
pub fn interrupt(mut child: Child) -> Option<i32> {
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    child.wait().unwrap().code()
}

/// Waits until something is there.
pub fn until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !there() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_run_that_was_stopped_leaves_no_file_and_goes_on_to_the_same_bytes() {
    let place = Place::new(Tiny { layers: 12, width: 128, ffn: 512, ..Tiny::default() });
    fs::write(place.at("text.txt"), prose(6_000)).unwrap();
    let run = |out: &str| format!("quantize base.gguf {out} --profile q4_0 --text text.txt");
    place.ok(&run("whole.gguf"));
    let child = place.command(&run("out.gguf")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let block = |n: usize| place.at("out.gguf.parts").join(format!("block-{n:05}.gguf"));
    until("the third block", || block(2).exists());
    assert_eq!(interrupt(child), Some(130));
    assert!(!place.at("out.gguf").exists() && !block(11).exists(), "{:?}", place.names());
    let first = fs::metadata(block(0)).unwrap().modified().unwrap();
    assert!(!place.names().iter().any(|n| n.starts_with('.')), "no temporary file: {:?}", place.names());
    let ran = place.ok(&run("out.gguf"));
    assert!(ran.err.contains("quantising block"), "progress is on standard error: {ran:?}");
    assert_eq!(place.bytes("out.gguf"), place.bytes("whole.gguf"));
    assert!(
        !place.at("out.gguf.parts").exists()
            && first <= fs::metadata(place.at("out.gguf")).unwrap().modified().unwrap()
    );
}
