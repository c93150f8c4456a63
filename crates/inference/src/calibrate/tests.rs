//! Calibration on tiny models: against the whole decoder, broken models, and the statistics by hand.

use super::*;
use crate::linalg::Storage;
use crate::model::tests::{some_tokens, tiny_file, tiny_file_with};
use crate::model::{Arch, Step};

fn texts(seed: u32) -> Vec<Vec<u32>> {
    (0..3).map(|i| some_tokens(20 + i as usize, seed + i)).collect()
}

fn go(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn streaming_sees_what_the_whole_decoder_computes() {
    for arch in [Arch::Llama, Arch::Qwen2] {
        let file = tiny_file(arch);
        let whole = Decoder::load_with(&file, Storage::F32).unwrap();
        let mut seen: Vec<(Site, InputStats)> = Vec::new();
        for text in texts(1) {
            let mut cache = whole.new_sequence();
            let mut x = vec![0.0; text.len() * 24];
            for (t, row) in text.iter().zip(x.chunks_exact_mut(24)) {
                whole.weights.embedding.row(*t as usize, row);
            }
            let mut at = 0;
            let steps = &mut [Step { cache: &mut cache, tokens: &text }];
            whole.run_blocks(0, steps, &mut x, &mut |site, rows| {
                if at == seen.len() {
                    seen.push((site, InputStats::new(rows.len() / text.len())));
                }
                assert_eq!(seen[at].0, site);
                seen[at].1.add(rows).unwrap();
                at += 1;
            });
        }
        let c = calibrate(&file, &texts(1), &mut go).unwrap();
        assert_eq!(c.inputs.len(), 2 * 4 + 1);
        for (input, (site, stats)) in c.inputs.iter().zip(&seen) {
            assert_eq!(&input.stats, stats, "{site:?} {:?}", input.tensors);
        }
        assert_eq!(c.inputs[2].tensors, ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]);
        assert_eq!(c.inputs[8].tensors, ["token_embd.weight"], "tied: the embedding makes the logits");
        let imatrix = c.imatrix(vec!["noise".into()]).unwrap();
        assert_eq!(imatrix.tensors().count(), 2 * 7 + 1);
        assert_eq!(imatrix.get("blk.1.ffn_down.weight").unwrap().len(), 40);
        assert_eq!((imatrix.chunks, imatrix.chunk_tokens), (3, 22));
    }
}

#[test]
fn texts_decide_and_threads_do_not() {
    let file = tiny_file(Arch::Llama);
    let run = |seed, threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| calibrate(&file, &texts(seed), &mut go)).unwrap()
    };
    assert_eq!(run(1, 1), run(1, 3));
    let (a, b) = (run(1, 2), run(50, 2));
    for (a, b) in a.inputs.iter().zip(&b.inputs) {
        assert_ne!(a.stats.sum2(), b.stats.sum2(), "{:?}", a.tensors);
    }
}

#[test]
fn a_broken_model_is_named_with_chunk_and_tensor() {
    let file = tiny_file_with(Arch::Llama, |_, parts| {
        // Only the text with token 7 is broken.
        let (_, _, values) = parts.iter_mut().find(|(n, ..)| n == "token_embd.weight").unwrap();
        values[7 * 24..8 * 24].fill(f32::NAN);
    });
    let texts = vec![vec![1, 2, 3], vec![4, 7, 5]];
    let e = calibrate(&file, &texts, &mut go).unwrap_err().to_string();
    assert!(e.contains("`blk.0.attn_q.weight`") && e.contains("chunk 1"), "{e}");
    let refuse = |texts: &[Vec<u32>]| calibrate(&file, texts, &mut go).unwrap_err().to_string();
    assert!(refuse(&[]).contains("no calibration text"));
    assert!(refuse(&[vec![1], vec![]]).contains("chunk 1 has no tokens"));
    assert!(refuse(&[vec![50]]).contains("token 50"));
    let stop = calibrate(&file, &[vec![1]], &mut |done, _| {
        if done == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stop, Err(ModelError::Cancelled)));
}

#[test]
fn statistics_by_hand() {
    let mut s = InputStats::new(2);
    s.add(&[1.0, 0.0, -3.0, 0.0]).unwrap();
    s.add(&[2.0, 0.0]).unwrap();
    assert_eq!((s.count, s.sum2(), s.max_abs()), (3, vec![14.0, 0.0], &[3.0, 0.0][..]));
    assert_eq!((s.mean_abs()[0], s.mean_square()[0]), (2.0, 14.0 / 3.0));
    assert_eq!(s.dead_channels(), [1]);
    // chunk ranges [-3, 1] and [0, 2]: 0.05 of the new, 0.95 of the old
    let (low, high) = s.running_range().unwrap();
    assert!((low + 2.85).abs() < 1e-6 && (high - 1.05).abs() < 1e-6, "{low} {high}");
    assert_eq!(s.add(&[0.0, 1.0, 2.0, f32::INFINITY]), Err((1, f32::INFINITY)));
    assert_eq!(s.count, 3, "a broken chunk adds nothing");

    let mut s = InputStats::new(10);
    let row = |sign: f32| -> Vec<f32> { (0..10).map(|j| if j == 4 { 9.0 } else { 1.0 } * sign).collect() };
    s.add(&[row(1.0), row(-1.0)].concat()).unwrap();
    // deviations: nine 1 and one 9, mean 1.8, limit 4.5
    assert_eq!(s.outlier_channels(), [4]);
}

#[test]
fn the_hessian_gives_the_mean_squared_output_error() {
    let (n, m) = (5, 7);
    let noise = |len: usize, seed: u64| crate::model::tests::noise(len, seed, 1.0);
    let (x, e) = (noise(m * n, 1), noise(3 * n, 2));
    let mut h = Hessian::new(n);
    h.add(&x[..3 * n]);
    h.add(&x[3 * n..]);
    let errors = row_errors(&e, &h.into_mean(), n);
    for (i, got) in errors.iter().enumerate() {
        let out = |t: usize| -> f32 { (0..n).map(|j| e[i * n + j] * x[t * n + j]).sum() };
        let want: f32 = (0..m).map(|t| out(t).powi(2)).sum::<f32>() / m as f32;
        assert!((got - f64::from(want)).abs() < 1e-5, "{got} {want}");
    }
}
