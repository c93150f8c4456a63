//! Token ids against stock llama.cpp on a mixed Unicode text, round trips, special tokens, chat templates.

use super::*;
use crate::gguf::{Array, Value};
use crate::testing::model_file;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

const MIXED: &str = include_str!("testdata/mixed.txt");

fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(text)[..8])
}

fn ids_line(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// A file that holds only metadata.
fn gguf_of(metadata: &[(String, Value)]) -> Gguf {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    crate::gguf::write(&path, metadata, []).unwrap();
    Gguf::from_bytes(std::fs::read(&path).unwrap()).unwrap()
}

fn with(gguf: &Gguf, key: &str, value: Value) -> Gguf {
    let metadata: Vec<_> =
        gguf.metadata().iter().map(|(k, v)| (k.clone(), if k == key { value.clone() } else { v.clone() })).collect();
    gguf_of(&metadata)
}

#[test]
fn ids_equal_stock_llama_cpp_for_every_pre_tokenizer() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let model = Gguf::open(&path).unwrap();
    // Digests of the ids of libllama (llama.cpp 0.4.0) for the SmolLM2 vocabulary under each name: line by line
    // with special tokens parsed, and as one text without.
    let expected = [
        ("smollm", "76e4e202840c6b8f", "68600db6e97233c1"),
        ("gpt-2", "92cdb4a6b1f846d5", "8dbdbc36e311321f"),
        ("qwen2", "76e4e202840c6b8f", "c164cdf2db78ec5e"),
        ("deepseek-r1-qwen", "76e4e202840c6b8f", "c164cdf2db78ec5e"),
        ("llama-bpe", "76e4e202840c6b8f", "c164cdf2db78ec5e"),
        ("deepseek-llm", "69df4cd7fc7402e7", "1369c30de85ab04f"),
        ("deepseek-coder", "1152ee72cb43c641", "4c5a35fe0811b4f5"),
    ];
    for (pre, lines, whole) in expected {
        let t = Tokenizer::from_gguf(&with(&model, "tokenizer.ggml.pre", pre.into())).unwrap();
        let by_line: String = MIXED.lines().map(|l| ids_line(&t.encode(l, true)) + "\n").collect();
        assert_eq!(digest(&by_line), lines, "{pre}, by line");
        let text = MIXED.strip_suffix('\n').unwrap();
        assert_eq!(digest(&ids_line(&t.encode(text, false))), whole, "{pre}, whole text");
        assert_eq!(t.decode(&t.encode(text, false)), text, "{pre}");
    }
    let unknown = Tokenizer::from_gguf(&with(&model, "tokenizer.ggml.pre", "default".into()));
    assert!(matches!(unknown, Err(TokenizerError::UnknownPre { name, .. }) if name == "default"));
    let unknown = Tokenizer::from_gguf(&with(&model, "tokenizer.ggml.model", "t5".into()));
    assert!(matches!(unknown, Err(TokenizerError::UnknownModel { name }) if name == "t5"));
}

#[test]
fn special_tokens_of_the_real_model() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let model = Gguf::open(&path).unwrap();
    let t = Tokenizer::from_gguf(&model).unwrap();
    let s = t.special();
    assert_eq!(
        (s.bos, s.eos, s.eot, s.pad, s.unknown, s.add_bos),
        (Some(1), Some(2), Some(2), Some(2), Some(0), false)
    );
    assert_eq!(s.ends, [0, 2]);
    assert!(t.is_end(2) && !t.is_end(1));
    assert_eq!(t.vocab_size(), 49152);
    assert_eq!(t.encode("<|im_start|>user", true), [1, 4093]);
    assert!(!t.encode("<|im_start|>user", false).contains(&1), "text of a user is not markup");
    assert_eq!(t.decode(&[1, 4093, 2]), "user", "control tokens are not text");
    assert_eq!(&*t.piece(1, true), b"<|im_start|>");
    assert!(t.piece(u32::MAX, true).is_empty());
    // A message that contains markup cannot end its own turn.
    let template = ChatTemplate::from_gguf(&model).unwrap();
    let ids = t.encode_chat(&template, &[Message::user("hi<|im_end|>")], true).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 2, "system and user turn end once each");
    let plain = t.encode_chat(&template, &[Message::user("What is 2+2?")], true).unwrap();
    let rendered = template.render(&[Message::user("What is 2+2?")], true).unwrap();
    assert_eq!(plain, t.encode(&rendered, true), "without markup in messages both ways agree");
}

#[test]
fn streaming_gives_whole_characters() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let t = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    let ids = t.encode(MIXED, false);
    let mut stream = t.stream();
    let mut out = String::new();
    for &id in &ids {
        let text = stream.push(id);
        assert!(!text.contains('\u{fffd}'));
        out.push_str(&text);
    }
    assert_eq!(out + &stream.finish(), MIXED);
    // The first byte of a character alone: nothing until the end, then a replacement character.
    let first = ids.iter().copied().find(|&id| std::str::from_utf8(&t.piece(id, false)).is_err()).unwrap();
    let mut stream = t.stream();
    assert_eq!(stream.push(first), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

/// A SentencePiece vocabulary small enough to check by hand.
fn tiny_spm() -> Gguf {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".into(), "</s>".into()];
    let mut kinds = vec![2, 3, 3];
    let mut scores = vec![0.0; 3];
    for b in 0..256 {
        tokens.push(format!("<0x{b:02X}>"));
        kinds.push(6);
        scores.push(0.0);
    }
    for (text, score) in
        [("▁", -10.0), ("a", -11.0), ("b", -12.0), ("ab", -1.0), ("▁a", -2.0), ("▁ab", -3.0), ("é", -5.0)]
    {
        tokens.push(text.into());
        kinds.push(1);
        scores.push(score);
    }
    let pairs = [
        ("tokenizer.ggml.model", Value::from("llama")),
        ("tokenizer.ggml.tokens", Value::Array(Array::String(tokens))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))),
        ("tokenizer.ggml.scores", Value::Array(Array::F32(scores))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
    ];
    gguf_of(&pairs.map(|(k, v)| (k.to_owned(), v)))
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let t = Tokenizer::from_gguf(&tiny_spm()).unwrap();
    let texts = |ids: &[u32]| -> Vec<String> { ids.iter().map(|&i| t.token_text(i).unwrap().to_owned()).collect() };
    assert_eq!(texts(&t.encode("ab", false)), ["▁ab"]);
    // "ab" (-1) wins over "▁a" (-2); then "▁" + "ab" joins to "▁ab".
    assert_eq!(texts(&t.encode("a ab", false)), ["▁a", "▁ab"]);
    assert_eq!(texts(&t.encode("aé", false)), ["▁a", "é"]);
    assert_eq!(texts(&t.encode("ñ", false)), ["▁", "<0xC3>", "<0xB1>"]);
    assert_eq!(texts(&t.encode("a</s>b", true)), ["▁a", "</s>", "▁", "b"]);
    assert!(t.special().add_bos);
    for text in ["ab", "a ñ b", "  a", ""] {
        assert_eq!(t.decode(&t.encode(text, false)), text);
    }
}

#[test]
fn broken_vocabularies_are_refused() {
    let good = tiny_spm();
    let e = Tokenizer::from_gguf(&with(&good, "tokenizer.ggml.eos_token_id", Value::U32(9999))).unwrap_err();
    assert!(e.to_string().contains("eos token id 9999 is beyond"), "{e}");
    let e =
        Tokenizer::from_gguf(&with(&good, "tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0])))).unwrap_err();
    assert!(e.to_string().contains("1 usable scores"), "{e}");
    let kinds = Value::Array(Array::I32(vec![1; 3]));
    let e = Tokenizer::from_gguf(&with(&good, "tokenizer.ggml.token_type", kinds)).unwrap_err();
    assert!(e.to_string().contains("token types"), "{e}");
    let twice = Value::Array(Array::String(vec!["x".into(); 266]));
    let e = Tokenizer::from_gguf(&with(&good, "tokenizer.ggml.tokens", twice)).unwrap_err();
    assert!(e.to_string().contains("twice"), "{e}");
}

const SMOL_TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn known_templates_render_as_their_jinja_does() {
    // SmolLM2: the whole original template, checked with Jinja. The others: the parts that recognition looks for;
    // their expected texts follow the published templates by reading.
    let smol = ChatTemplate::recognise(SMOL_TEMPLATE).unwrap();
    assert_eq!(
        smol.render(&[Message::user("Hi"), Message::assistant("Yo")], true).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        smol.render(&[Message::system("S"), Message::user("Hi")], false).unwrap(),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    );
    let qwen = r"{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}...";
    assert_eq!(
        ChatTemplate::recognise(qwen).unwrap().render(&[Message::user("Hi")], true).unwrap(),
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let r1 = "{{ bos_token }}{{ ns.system_prompt }}{{'<｜User｜>' + message['content']}}{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{{'<｜Assistant｜><think>\\n'}}";
    let turns = [Message::system("S"), Message::user("Q"), Message::assistant("<think>t</think>A"), Message::user("R")];
    assert_eq!(
        ChatTemplate::recognise(r1).unwrap().render(&turns, true).unwrap(),
        "<｜begin▁of▁sentence｜>S<｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>R<｜Assistant｜><think>\n"
    );
    let llama3 = "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}";
    assert_eq!(
        ChatTemplate::recognise(llama3).unwrap().render(&[Message::user(" Hi ")], true).unwrap(),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
}

#[test]
fn unknown_templates_and_odd_conversations_are_refused() {
    for jinja in ["", "{{ '[INST] ' + message['content'] }}", "<|start_header_id|><|eot_id|>{{ strftime_now() }}"] {
        assert!(ChatTemplate::recognise(jinja).is_err(), "{jinja}");
    }
    let t = ChatTemplate::chat_ml();
    assert_eq!(t.render(&[], true), Err(ChatError::Empty));
    let late = [Message::user("a"), Message::system("b")];
    assert_eq!(t.render(&late, true), Err(ChatError::LateSystem { index: 1 }));
}

#[test]
fn wordpiece_equals_the_reference_tokenizer() {
    let Some(folder) = model_file("all-minilm-l6-v2") else { return };
    let t = WordPiece::open(&folder).unwrap();
    assert_eq!(t.vocab_size(), 30522);
    assert_eq!(t.encode("Hello, Wörld! 你好", 256), [101, 7592, 1010, 2088, 999, 100, 100, 102]);
    assert_eq!(t.encode("hello world", 3), [101, 7592, 102]);
    assert_eq!(t.encode("", 0), [101, 102]);
    // Digest of the ids of the `tokenizers` package 0.23, which parses no special token in this text.
    let by_line: String = MIXED.lines().map(|l| ids_line(&t.encode(l, 10_000)) + "\n").collect();
    assert_eq!(digest(&by_line), "a303a211df8c5cbc");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_survives_a_round_trip(text in "\\PC{0,40}|[ \\n\\ta-c0-9'é你]{0,60}") {
        use std::sync::OnceLock;
        static SPM: OnceLock<Tokenizer> = OnceLock::new();
        static BPE: OnceLock<Option<Tokenizer>> = OnceLock::new();
        let spm = SPM.get_or_init(|| Tokenizer::from_gguf(&tiny_spm()).unwrap());
        prop_assume!(!text.contains('▁'));
        prop_assert_eq!(spm.decode(&spm.encode(&text, false)), text.clone());
        let bpe = BPE.get_or_init(|| {
            let path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")?;
            Some(Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap())
        });
        if let Some(bpe) = bpe {
            prop_assert_eq!(bpe.decode(&bpe.encode(&text, false)), text);
        }
    }
}
