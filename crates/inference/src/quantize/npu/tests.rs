//! Packs: every value within half a step of the base, documented layout, refusals.

use super::*;
use crate::model::Arch;
use crate::model::tests::{tiny_file, tiny_file_with};

fn go(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn options(profile: NpuProfile, grouping: Grouping) -> NpuOptions {
    NpuOptions { profile, grouping, imatrix: None }
}

#[test]
fn a_pack_holds_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let base = tiny_file(Arch::Qwen2);
    let mut errors = vec![];
    for (i, (profile, grouping)) in [
        (NpuProfile::Int4, Grouping::Channel),
        (NpuProfile::Int4, Grouping::Columns(8)),
        (NpuProfile::Int6, Grouping::Channel),
        (NpuProfile::Int8, Grouping::Columns(128)),
    ]
    .into_iter()
    .enumerate()
    {
        let out = folder.path().join(i.to_string());
        let manifest = export(&base, &out, &options(profile, grouping), &mut go).unwrap();
        let pack = NpuPack::open(&out).unwrap();
        assert_eq!(pack.manifest, manifest);
        assert_eq!(manifest.base_sha256, crate::model::base_digest(&base));
        let mut sum = 0.0;
        for (tensor, entry) in base.tensors().iter().zip(&manifest.tensors) {
            let (want, got) = (base.dequantize(tensor).unwrap(), pack.tensor(&tensor.name).unwrap());
            assert_eq!(entry.offset % 64, 0);
            if !is_matrix(tensor) {
                assert_eq!(want, got, "{}", tensor.name);
                continue;
            }
            assert_eq!(entry.bits, if tensor.name == "token_embd.weight" { 8 } else { profile.bits() });
            let square = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            let difference: Vec<f32> = want.iter().zip(&got).map(|(a, b)| a - b).collect();
            let relative = (square(&difference) / square(&want)).sqrt();
            assert!((relative - entry.relative_error).abs() < 1e-6, "{}", tensor.name);
            if entry.bits == 8 {
                assert!(difference.iter().all(|d| d.abs() <= 0.5 / 8.0));
            }
            sum += relative;
        }
        errors.push(sum);
    }
    // smaller groups and more bits are better
    assert!(errors[1] < errors[0] && errors[2] < errors[0] && errors[3] < errors[2], "{errors:?}");
}

#[test]
fn importance_moves_the_choice() {
    let folder = tempfile::tempdir().unwrap();
    let base = tiny_file(Arch::Llama);
    let name = "blk.0.attn_q.weight";
    let weights = base.dequantize(base.tensor(name).unwrap()).unwrap();
    let importance: Vec<f32> = (0..24).map(|j| if j < 4 { 1000.0 } else { 1.0 }).collect();
    let mut with = options(NpuProfile::Int4, Grouping::Channel);
    let error = |out: &Path, options: &NpuOptions| -> f32 {
        export(&base, out, options, &mut go).unwrap();
        let back = NpuPack::open(out).unwrap().tensor(name).unwrap();
        weights.iter().zip(back).enumerate().map(|(i, (a, b))| importance[i % 24] * (a - b).powi(2)).sum()
    };
    let plain = error(&folder.path().join("a"), &with);
    let mut imatrix = Imatrix::default();
    imatrix.add(name, &importance, 1).unwrap();
    with.imatrix = Some(imatrix);
    assert!(error(&folder.path().join("b"), &with) < 0.95 * plain);
}

#[test]
fn changed_packs_and_bad_bases_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("pack");
    let plain = options(NpuProfile::Int6, Grouping::Channel);
    let broken = tiny_file_with(Arch::Llama, |_, parts| parts[3].2[7] = f32::NAN);
    let e = export(&broken, &out, &plain, &mut go).unwrap_err().to_string();
    assert!(e.contains("blk.0.attn_q.weight") && e.contains("weight 7"), "{e}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    export(&tiny_file(Arch::Llama), &out, &plain, &mut go).unwrap();
    assert!(export(&tiny_file(Arch::Llama), &out, &plain, &mut go).unwrap_err().to_string().contains("exists"));
    let pack = NpuPack::open(&out).unwrap();
    assert!(pack.tensor("nope").unwrap_err().to_string().contains("nope"));
    let text = std::fs::read_to_string(out.join(MANIFEST)).unwrap();
    for (from, to, want) in [
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("\"rows\": 50", "\"rows\": 5000000", "not inside"),
        ("\"rows\": 50", "\"rows\": 18446744073709551615", "not inside"),
        ("\"bits\": 8", "\"bits\": 9", "not inside"),
    ] {
        std::fs::write(out.join(MANIFEST), text.replacen(from, to, 1)).unwrap();
        let e = NpuPack::open(&out).unwrap_err().to_string();
        assert!(e.contains(want), "{from}: {e}");
    }
    std::fs::write(out.join(MANIFEST), &text).unwrap();
    let mut weights = std::fs::read(out.join(WEIGHTS)).unwrap();
    weights[100] ^= 1;
    std::fs::write(out.join(WEIGHTS), weights).unwrap();
    assert!(NpuPack::open(&out).unwrap_err().to_string().contains("copy it again"));
    assert!("npu-int5".parse::<NpuProfile>().unwrap_err().contains("npu-int4"));
}
