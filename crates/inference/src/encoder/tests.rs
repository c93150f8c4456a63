//! The encoder against reference vectors of the original model code.

use super::*;
use crate::testing::model_file;

fn open() -> Option<Encoder> {
    model_file("all-minilm-l6-v2").map(|folder| Encoder::open(&folder).unwrap())
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn vectors_equal_the_reference_implementation() {
    let Some(encoder) = open() else { return };
    let long = "word ".repeat(400);
    // First six of 384 values, from the `transformers` BertModel in double precision, mean pooled, unit length.
    let expected: [(&str, [f32; 6]); 7] = [
        (
            "How do I reset the router to factory settings?",
            [-0.0226384, -0.0032419, -0.0132548, 0.0349038, -0.0411277, 0.0585182],
        ),
        (
            "Hold the reset button for ten seconds until the light blinks.",
            [0.0274899, -0.0924824, 0.0059229, 0.0426949, -0.0211334, 0.0098944],
        ),
        (
            "The cafeteria serves pasta on Tuesdays.",
            [-0.0765124, -0.0094616, -0.008883, 0.0413443, -0.0936534, 0.0765709],
        ),
        ("如何重置路由器？", [0.0627407, 0.1037063, 0.0359276, 0.0262586, -0.0253266, 0.0455363]),
        ("", [-0.1188384, 0.0482987, -0.0025481, -0.0110112, 0.0519508, 0.0102917]),
        ("Naïve café — 12,345.67!", [0.0335429, 0.0197991, -0.028369, 0.0115139, -0.0034856, 0.0248599]),
        (&long, [-0.0081237, -0.095586, -0.0386731, 0.049662, -0.0437937, 0.0237198]),
    ];
    let vectors = encoder.embed(&expected.map(|(text, _)| text));
    for ((text, want), got) in expected.iter().zip(&vectors) {
        assert_eq!(got.len(), 384);
        for (w, g) in want.iter().zip(got) {
            assert!((w - g).abs() < 2e-6, "`{text}`: {g} instead of {w}");
        }
        assert!((cosine(got, got) - 1.0).abs() < 1e-5);
    }
    assert!((cosine(&vectors[0], &vectors[1]) - 0.471441).abs() < 1e-5);
    assert!((cosine(&vectors[0], &vectors[2]) - 0.036029).abs() < 1e-5);
    assert_eq!(encoder.count_tokens(&long), 402);
    assert_eq!((encoder.dims(), encoder.max_tokens()), (384, 256));
}

#[test]
fn a_vector_does_not_depend_on_batch_or_threads() {
    let Some(encoder) = open() else { return };
    let texts: Vec<String> = (0..60).map(|i| format!("{} text number {i}", "filler ".repeat(i % 23))).collect();
    let together = encoder.embed(&texts);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for i in [0, 17, 59] {
        let alone = pool.install(|| encoder.embed(&texts[i..=i]));
        assert_eq!(alone[0], together[i], "text {i}");
    }
    assert!(encoder.embed::<&str>(&[]).is_empty());
}

#[test]
fn broken_folders_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    let e = Encoder::open(empty.path()).unwrap_err().to_string();
    assert!(e.contains("config.json"), "{e}");
    let Some(good) = model_file("all-minilm-l6-v2") else { return };
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(good.join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("model.safetensors"), [0; 64]).unwrap();
    let e = Encoder::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains("model.safetensors"), "{e}");
    let config = std::fs::read_to_string(good.join("config.json")).unwrap();
    for (from, to, reason) in [
        ("\"bert\"", "\"roberta\"", "only `bert`"),
        ("\"gelu\"", "\"relu\"", "only `gelu`"),
        ("\"hidden_size\": 384", "\"hidden_size\": 385", "not a multiple"),
        ("\"vocab_size\": 30522", "\"vocab_size\": 100", "30522 tokens but 100"),
        ("\"vocab_size\": 30522", "\"vocab_size\": 99999999999", "absurdly"),
    ] {
        std::fs::write(folder.path().join("config.json"), config.replace(from, to)).unwrap();
        let e = Encoder::open(folder.path()).unwrap_err().to_string();
        assert!(e.contains(reason), "`{e}` does not say `{reason}`");
    }
}
