//! Token ids against stock llama.cpp: its own vocabulary test files, and a Unicode corpus of ours; and the same ids
//! from `tokenizer.json`.

use super::*;
use crate::testing::{model_file, vocab_file};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

/// One JSON string a line.
const UNICODE: &str = include_str!("testdata/unicode.jsonl");
/// A name, then one digest for the ids of each line of the corpus, as libllama (llama.cpp 0.4.0) gives them without
/// parsing special tokens.
const UNICODE_IDS: &str = include_str!("testdata/unicode.ids");
const SMOLLM: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

fn corpus() -> Vec<String> {
    UNICODE.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn digest(ids: &[u32]) -> String {
    let text = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    hex::encode(&Sha256::digest(text)[..4])
}

/// The vocabulary of a name of the table; `None` when it is not on this machine.
fn vocabulary(name: &str) -> Option<Gguf> {
    let path = match name {
        "smollm" => model_file(SMOLLM)?,
        "deepseek-r1-qwen" => vocab_file("ggml-vocab-qwen2.gguf")?,
        other => vocab_file(&format!("ggml-vocab-{other}.gguf"))?,
    };
    Some(Gguf::open(&path).unwrap())
}

fn tokenizer(name: &str, gguf: &Gguf) -> Tokenizer {
    let mut metadata = gguf.metadata().to_vec();
    if name == "deepseek-r1-qwen" {
        metadata.retain(|(k, _)| k != "tokenizer.ggml.pre");
        metadata.push(("tokenizer.ggml.pre".into(), name.into()));
    }
    Tokenizer::from_metadata(&Metadata::new(metadata)).unwrap()
}

#[test]
fn ids_equal_the_vocabulary_test_files_of_llama_cpp() {
    for name in ["gpt-2", "llama-bpe", "deepseek-llm", "deepseek-coder", "qwen2", "llama-spm"] {
        let Some(gguf) = vocabulary(name) else { return };
        let read = |ending: &str| {
            std::fs::read_to_string(vocab_file(&format!("ggml-vocab-{name}.gguf.{ending}")).unwrap()).unwrap()
        };
        let t = tokenizer(name, &gguf);
        let (texts, ids) = (read("inp"), read("out"));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        let ids: Vec<&str> = ids.lines().collect();
        // A separator ends the last text, too; the empty line behind it belongs to nothing.
        assert!(texts.len() >= ids.len() && ids.len() > 40, "{name}: {} texts, {} lines", texts.len(), ids.len());
        for (text, want) in texts.iter().zip(&ids) {
            let want: Vec<u32> = want.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(t.encode(text, false), want, "{name}: {text:?}");
        }
    }
}

#[test]
fn ids_equal_stock_llama_cpp_on_a_unicode_corpus() {
    let corpus = corpus();
    assert!(corpus.len() >= 200);
    for line in UNICODE_IDS.lines() {
        let mut fields = line.split(' ');
        let name = fields.next().unwrap();
        let Some(gguf) = vocabulary(name) else { continue };
        let t = tokenizer(name, &gguf);
        let want: Vec<&str> = fields.collect();
        assert_eq!(want.len(), corpus.len());
        let wrong: Vec<(&String, Vec<u32>)> = corpus
            .iter()
            .zip(&want)
            .map(|(text, want)| (text, t.encode(text, false), want))
            .filter(|(_, ids, want)| digest(ids) != **want)
            .map(|(text, ids, _)| (text, ids))
            .collect();
        assert!(wrong.is_empty(), "{name}: {} lines differ: {wrong:?}", wrong.len());
        // SentencePiece has no other word for a space than this character.
        for text in corpus.iter().filter(|t| name != "llama-spm" || !t.contains('▁')) {
            assert_eq!(&t.decode(&t.encode(text, false)), text, "{name}");
        }
    }
}

/// `tokenizer.json` as the model's authors would have published it.
fn hf_json(gguf: &Gguf, pre: &Json) -> Json {
    let tokens: &[String] = gguf.required("tokenizer.ggml.tokens").unwrap();
    let kinds: &[i32] = gguf.required("tokenizer.ggml.token_type").unwrap();
    let merges: &[String] = gguf.required("tokenizer.ggml.merges").unwrap();
    let entries = || tokens.iter().zip(kinds).enumerate();
    // Padding has no token there.
    let vocab: serde_json::Map<String, Json> =
        entries().filter(|(_, (_, k))| **k == 1).map(|(id, (t, _))| (t.clone(), json!(id))).collect();
    let added: Vec<Json> = entries()
        .filter(|(_, (_, k))| [3, 4].contains(*k))
        .map(|(id, (t, k))| json!({ "id": id, "content": t, "special": *k == 3 }))
        .collect();
    let whole = gguf.str("tokenizer.ggml.pre").unwrap() == "llama-bpe";
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre,
        "post_processor": { "type": "ByteLevel", "add_prefix_space": true },
        "model": { "type": "BPE", "unk_token": null, "vocab": vocab, "merges": merges, "ignore_merges": whole },
    })
}

fn bytes(regex: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex })
}

fn split_by(pattern: &str) -> Json {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

fn sequence(steps: &[Json]) -> Json {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

const DIGITS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn pre_json(name: &str) -> Json {
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let cjk = split_by("[一-龥ࠀ-一가-\u{d7ff}]+");
    match name {
        "gpt-2" => bytes(true),
        "smollm" => sequence(&[digits, bytes(true)]),
        "qwen2" | "deepseek-r1-qwen" => sequence(&[split_by(&DIGITS.replace("DIGITS", r"\p{N}")), bytes(false)]),
        "llama-bpe" => sequence(&[split_by(&DIGITS.replace("DIGITS", r"\p{N}{1,3}")), bytes(false)]),
        "deepseek-coder" => {
            sequence(&[split_by("[\r\n]"), split_by(r"\s?\p{L}+"), split_by(r"\s?\p{P}+"), cjk, digits, bytes(false)])
        }
        "deepseek-llm" => sequence(&[
            split_by("[\r\n]"),
            split_by(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷ]+"),
            split_by(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split_by(r"\s+$"),
            cjk,
            digits,
            bytes(false),
        ]),
        other => panic!("{other}"),
    }
}

#[test]
fn a_tokenizer_json_gives_the_same_tokenizer() {
    let corpus = corpus();
    for name in ["gpt-2", "smollm", "qwen2", "llama-bpe", "deepseek-coder", "deepseek-llm"] {
        let Some(gguf) = vocabulary(name) else { continue };
        let text = hf_json(&gguf, &pre_json(name)).to_string();
        let hf = HfTokenizer::parse(HfFiles { tokenizer: &text, ..HfFiles::default() }).unwrap();
        let metadata =
            Metadata::new(hf.metadata(gguf.required::<&[String]>("tokenizer.ggml.tokens").unwrap().len()).unwrap());
        for key in ["pre", "tokens", "merges"] {
            let key = format!("tokenizer.ggml.{key}");
            assert!(metadata.get(&key) == gguf.get(&key), "{name}: {key} differs");
        }
        let kinds = |m: &Metadata| m.required::<&[i32]>("tokenizer.ggml.token_type").unwrap().to_vec();
        for (id, (new, old)) in kinds(&metadata).into_iter().zip(kinds(&gguf)).enumerate() {
            // Older files keep markup that is not marked as special among the user-defined tokens.
            let markup =
                old == 4 && metadata.required::<&[String]>("tokenizer.ggml.tokens").unwrap()[id].starts_with('<');
            assert!(new == old || markup && new == 3, "{name}: token {id} is {new}, was {old}");
        }
        let (ours, theirs) = (Tokenizer::from_metadata(&metadata).unwrap(), tokenizer(name, &gguf));
        for text in &corpus {
            assert_eq!(ours.encode(text, true), theirs.encode(text, true), "{name}");
        }
    }
}

#[test]
fn a_sentencepiece_tokenizer_json_gives_the_same_ids() {
    let Some(gguf) = vocabulary("llama-spm") else { return };
    let tokens: &[String] = gguf.required("tokenizer.ggml.tokens").unwrap();
    let kinds: &[i32] = gguf.required("tokenizer.ggml.token_type").unwrap();
    let scores: &[f32] = gguf.required("tokenizer.ggml.scores").unwrap();
    let ids: std::collections::HashMap<&str, usize> = tokens.iter().enumerate().map(|(i, t)| (t.as_str(), i)).collect();
    // Every way to make a token of two others, in order of the score of what they make.
    let mut merges: Vec<(f32, [&str; 2])> = Vec::new();
    for (token, score) in tokens.iter().zip(scores).zip(kinds).filter(|(_, k)| **k == 1).map(|(t, _)| t) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = cuts.filter(|(l, r)| ids.contains_key(l) && ids.contains_key(r));
        merges.extend(known.map(|(l, r)| (-score, [l, r])));
    }
    merges.sort_by(|a, b| a.0.total_cmp(&b.0));
    let merges: Vec<[&str; 2]> = merges.into_iter().map(|(_, m)| m).collect();
    let added: Vec<Json> =
        tokens[..3].iter().enumerate().map(|(i, t)| json!({ "id": i, "content": t, "special": true })).collect();
    let spm = |normalizer: Json, pre: Json| {
        json!({
            "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre,
            "post_processor": { "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }] },
            "model": { "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": ids, "merges": merges },
        })
        .to_string()
    };
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prepend = json!({ "type": "Prepend", "prepend": "▁" });
    let legacy = spm(json!({ "type": "Sequence", "normalizers": [prepend, replace] }), Json::Null);
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false });
    let config = r#"{ "bos_token": "<s>", "eos_token": { "content": "</s>" }, "unk_token": "<unk>" }"#;
    for text in [legacy, spm(Json::Null, metaspace)] {
        let files = HfFiles { tokenizer: &text, tokenizer_config: Some(config), ..HfFiles::default() };
        let hf = HfTokenizer::parse(files).unwrap();
        let metadata = Metadata::new(hf.metadata(32_000).unwrap());
        for key in
            ["model", "tokens", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"]
        {
            let key = format!("tokenizer.ggml.{key}");
            assert!(metadata.get(&key) == gguf.get(&key), "{key} differs");
        }
        let (ours, theirs) = (Tokenizer::from_metadata(&metadata).unwrap(), tokenizer("llama-spm", &gguf));
        for text in corpus() {
            assert_eq!(ours.encode(&text, true), theirs.encode(&text, true), "{text:?}");
        }
    }
}

/// A tokenizer of a handful of tokens, changed as a test wants.
fn small(change: impl FnOnce(&mut Json)) -> String {
    let mut json = json!({
        "added_tokens": [{ "id": 5, "content": "<|end|>", "special": false }, { "id": 7, "content": "<tool>" }],
        "pre_tokenizer": bytes(true),
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġa": 4 }, "merges": ["a b", "Ġ a"] },
    });
    change(&mut json);
    json.to_string()
}

fn parse(text: &str, config: Option<&str>) -> Result<HfTokenizer, TokenizerError> {
    HfTokenizer::parse(HfFiles { tokenizer: text, tokenizer_config: config, ..HfFiles::default() })
}

#[test]
fn special_tokens_holes_and_templates_are_taken_over() {
    let config = r#"{ "eos_token": "<|end|>", "add_bos_token": true, "chat_template": [{ "name": "default", "template": "T" }] }"#;
    let hf = parse(&small(|_| ()), Some(config)).unwrap();
    assert_eq!(hf.vocab_size(), 8);
    let metadata = Metadata::new(hf.metadata(10).unwrap());
    assert_eq!(metadata.u32("tokenizer.ggml.eos_token_id").unwrap(), 5);
    assert_eq!(metadata.required::<&[i32]>("tokenizer.ggml.token_type").unwrap(), [1, 1, 1, 1, 1, 3, 5, 4, 5, 5]);
    assert_eq!(metadata.required::<&[String]>("tokenizer.ggml.tokens").unwrap()[6], "[PAD6]");
    // There is no bos that could be added.
    assert!(!metadata.required::<bool>("tokenizer.ggml.add_bos_token").unwrap());
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap(), "T");
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(t.encode("ab a<tool><|end|>", true), [2, 4, 7, 5]);
    assert!(t.is_end(5));
    let files = HfFiles { config: Some(r#"{ "eos_token_id": [1, 2], "bos_token_id": 0 }"#), ..HfFiles::default() };
    let text = small(|_| ());
    let hf = HfTokenizer::parse(HfFiles { tokenizer: &text, chat_template: Some("file"), ..files }).unwrap();
    let metadata = Metadata::new(hf.metadata(8).unwrap());
    assert_eq!(metadata.u32("tokenizer.ggml.eos_token_id").unwrap(), 1);
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap(), "file");
}

#[test]
fn tokenizers_without_a_gguf_form_are_refused() {
    let refused = |change: &dyn Fn(&mut Json), message: &str| {
        let error = parse(&small(change), None).unwrap_err().to_string();
        assert!(error.contains(message), "`{error}` does not say `{message}`");
    };
    refused(&|j| j["model"]["type"] = json!("Unigram"), "tokenizer model `Unigram`");
    refused(&|j| j["model"]["vocab"]["c"] = json!(0), "tokens `a` and `c` have the same id 0");
    refused(&|j| j["model"]["vocab"]["c"] = json!(4_000_000_000u32), "ids up to 4000000001");
    refused(&|j| j["model"]["merges"][0] = json!("ab"), "merge `ab` is not two tokens");
    refused(&|j| j["model"]["merges"] = json!([["a", 1]]), "model");
    refused(&|j| j["model"]["ignore_merges"] = json!(true), "`ignore_merges` with pre-tokenizer `gpt-2`");
    refused(&|j| j["model"]["end_of_word_suffix"] = json!("</w>"), "prefixes or suffixes");
    refused(&|j| j["normalizer"] = json!({ "type": "Lowercase" }), "normalizer `Lowercase`");
    refused(&|j| j["pre_tokenizer"] = Json::Null, "pre-tokenizer ``");
    refused(&|j| j["pre_tokenizer"]["add_prefix_space"] = json!(true), "ByteLevel with options");
    refused(&|j| j["pre_tokenizer"] = json!({ "type": "Whitespace" }), "pre-tokenizer `Whitespace");
    refused(&|j| j["pre_tokenizer"] = sequence(&[split_by(r"\p{N}{1,2}"), bytes(false)]), r"Split \p{N}{1,2}");
    refused(&|j| j["added_tokens"][0]["id"] = json!(0), "added token `<|end|>` has the id 0 of token `a`");
    let error = parse(&small(|_| ()), Some(r#"{ "bos_token": "<s>" }"#)).unwrap_err().to_string();
    assert!(error.contains("`<s>`, the token of bos_token_id, is not in the vocabulary"), "{error}");
    let error = parse(&small(|_| ()), None).unwrap().metadata(7).unwrap_err().to_string();
    assert!(error.contains("8 tokens, but the embedding has only 7 rows"), "{error}");
    assert!(parse("{", None).is_err());
}
