//! SmolLM2-135M where it was fetched (`cargo xtask model`): known figures, and an answer that everybody knows.

use super::{Place, tiny::Tiny};
use std::fs;
use std::path::PathBuf;

const NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model beside a tiny one, or a printed line.
fn place() -> Option<Place> {
    let folder = std::env::var_os("FLYWHEEL_MODELS").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/flywheel/models"));
    let model = folder.or_else(home)?.join(NAME);
    if !model.exists() {
        println!("skipped: {} is absent; `cargo xtask model` fetches it", model.display());
        return None;
    }
    let place = Place::new(Tiny::default());
    std::os::unix::fs::symlink(model, place.at("smol.gguf")).unwrap();
    Some(place)
}

#[test]
fn a_real_model_is_inspected_quantised_and_talked_to() {
    let Some(place) = place() else { return };
    let seen = place.ok("inspect smol.gguf --json").json();
    assert_eq!(seen["weights"], 134_515_008u64);
    assert_eq!((seen["model"]["layers"].clone(), seen["model"]["vocabulary"].clone()), (30.into(), 49_152.into()));
    assert!((seen["bits_per_weight"].as_f64().unwrap() - 5.74).abs() < 0.05, "{}", seen["bits_per_weight"]);
    assert_eq!(seen["warnings"], serde_json::json!([]));
    let said = fs::read_to_string(place.at("text.txt")).unwrap();
    fs::write(place.at("text.txt"), &said[..6000]).unwrap();
    let answer =
        place.command("chat smol.gguf --max-tokens 24 --prompt").arg("Name three primary colors.").output().unwrap();
    let answer = String::from_utf8(answer.stdout).unwrap();
    assert!(answer.contains("Red") && answer.contains("Blue"), "{answer}");
    place.fails(1, "quantize smol.gguf q8.gguf --profile q8_0", "already Q");
    place.ok("quantize smol.gguf q8.gguf --profile q8_0 --allow-requantize");
    // 8.5 bits a weight for all but the norms, and the vocabulary
    let bytes = fs::metadata(place.at("q8.gguf")).unwrap().len();
    assert!((142_000_000..147_000_000).contains(&bytes), "{bytes}");
    let d = place.ok("eval q8.gguf --base smol.gguf --text text.txt --window 256 --max-tokens 1024 --json").json();
    assert!(
        d["divergence"]["kld"].as_f64().unwrap() < 0.002 && d["divergence"]["top1"].as_f64().unwrap() > 0.97,
        "{d}"
    );
}
