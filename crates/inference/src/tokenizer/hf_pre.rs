//! Which pre-tokenizer of the table a `tokenizer.json` describes. Recognised by structure and expression; a near
//! miss is refused, since it would still produce text, only worse text.

use super::TokenizerError;
use serde_json::Value as Json;

/// One step of a pre-tokenizer.
#[derive(Debug, PartialEq)]
enum Step {
    /// Split around matches, which stay.
    Split(String),
    /// Every digit by itself.
    Digits,
    /// Bytes to printable characters; `regex`: also cut as GPT-2 does.
    Bytes { regex: bool },
}

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BREAK: &str = "[\r\n]";
const CJK: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
/// How the long list of cased letters begins.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯ";

/// The name of a byte-level pre-tokenizer. `reasoning`: the vocabulary has DeepSeek's markup.
pub(super) fn byte_level(
    normalizer: Option<&Json>,
    pre: Option<&Json>,
    whole_words: bool,
    reasoning: bool,
) -> Result<&'static str, TokenizerError> {
    let normal = normalizer.map_or(Some("none"), kind);
    // Stock runs Qwen2 without its NFC; so do we.
    if !matches!(normal, Some("none" | "NFC")) && !is_empty_sequence(normalizer) {
        let what = format!("normalizer `{}` has no GGUF form", normal.unwrap_or("without type"));
        return Err(TokenizerError::vocabulary(what));
    }
    let mut steps = Vec::new();
    if let Some(pre) = pre {
        collect(pre, &mut steps)?;
    }
    let Some(name) = recognise(&steps, reasoning) else {
        return Err(TokenizerError::UnknownPre { name: describe(&steps), known: super::pretokenize::KNOWN.join(", ") });
    };
    if whole_words && name != "llama-bpe" {
        let what = format!("`ignore_merges` with pre-tokenizer `{name}`, which GGUF cannot say");
        return Err(TokenizerError::vocabulary(what));
    }
    Ok(name)
}

fn recognise(steps: &[Step], reasoning: bool) -> Option<&'static str> {
    use Step::{Bytes, Digits, Split};
    match steps {
        [Bytes { regex: true }] => Some("gpt-2"),
        [Digits, Bytes { regex: true }] => Some("smollm"),
        [Split(words), Bytes { regex: false }] if words == QWEN2 => {
            Some(if reasoning { "deepseek-r1-qwen" } else { "qwen2" })
        }
        [Split(words), Bytes { regex: false }] if words == LLAMA3 => Some("llama-bpe"),
        [Split(breaks), Split(letters), Split(punctuation), Split(end), Split(cjk), Digits, Bytes { regex: false }]
            if is_break(breaks)
                && letters.starts_with(DEEPSEEK_LETTERS)
                && punctuation == DEEPSEEK_PUNCTUATION
                && end == r"\s+$"
                && cjk == CJK =>
        {
            Some("deepseek-llm")
        }
        [Split(breaks), Split(letters), Split(punctuation), Split(cjk), Digits, Bytes { regex: false }]
            if is_break(breaks) && letters == r"\s?\p{L}+" && punctuation == r"\s?\p{P}+" && cjk == CJK =>
        {
            Some("deepseek-coder")
        }
        _ => None,
    }
}

fn is_break(pattern: &str) -> bool {
    pattern == BREAK || pattern == r"[\r\n]"
}

/// For SentencePiece models: whether a space is put in front; `None` if this is not one.
pub(super) fn sentencepiece(normalizer: Option<&Json>, pre: Option<&Json>) -> Option<bool> {
    const SPACE: &str = "▁";
    if let Some(pre) = pre {
        let is = |key: &str, value: &str| pre.get(key).is_some_and(|v| v == value);
        let whole = pre.get("split").is_none_or(|s| s == false);
        if !is("type", "Metaspace") || !is("replacement", SPACE) || !whole || normalizer.is_some() {
            return None;
        }
        return match pre.get("prepend_scheme").and_then(Json::as_str) {
            Some("first" | "always") => Some(true),
            Some("never") => Some(false),
            Some(_) => None,
            None => Some(pre.get("add_prefix_space").is_none_or(|a| a != false)),
        };
    }
    let steps = match normalizer?.get("normalizers") {
        Some(list) => list.as_array()?.iter().collect(),
        None => vec![normalizer?],
    };
    let prepends = |s: &Json| kind(s) == Some("Prepend") && s.get("prepend").is_some_and(|p| p == SPACE);
    let replaces = |s: &Json| {
        let from = s.get("pattern").and_then(|p| p.get("String"));
        kind(s) == Some("Replace") && from.is_some_and(|p| p == " ") && s.get("content").is_some_and(|c| c == SPACE)
    };
    match steps.as_slice() {
        [first, second] if prepends(first) && replaces(second) => Some(true),
        [only] if replaces(only) => Some(false),
        _ => None,
    }
}

fn kind(json: &Json) -> Option<&str> {
    json.get("type").and_then(Json::as_str)
}

fn is_empty_sequence(json: Option<&Json>) -> bool {
    json.and_then(|j| j.get("normalizers")).and_then(Json::as_array).is_some_and(Vec::is_empty)
}

/// Flattens sequences; the depth is limited by the JSON parser.
fn collect(json: &Json, out: &mut Vec<Step>) -> Result<(), TokenizerError> {
    let unknown =
        |what: String| Err(TokenizerError::UnknownPre { name: what, known: super::pretokenize::KNOWN.join(", ") });
    let flag = |key: &str, default: bool| json.get(key).and_then(Json::as_bool).unwrap_or(default);
    match kind(json) {
        Some("Sequence") => {
            let steps = json.get("pretokenizers").and_then(Json::as_array);
            steps.into_iter().flatten().try_for_each(|step| collect(step, out))
        }
        Some("ByteLevel") if !flag("add_prefix_space", true) => {
            out.push(Step::Bytes { regex: flag("use_regex", true) });
            Ok(())
        }
        Some("Digits") if flag("individual_digits", false) => {
            out.push(Step::Digits);
            Ok(())
        }
        Some("Split") if json.get("behavior").is_some_and(|b| b == "Isolated") && !flag("invert", false) => {
            match json.get("pattern").and_then(|p| p.get("Regex")).and_then(Json::as_str) {
                Some(pattern) => out.push(Step::Split(pattern.to_owned())),
                None => return unknown("Split without an expression".into()),
            }
            Ok(())
        }
        Some(other) => unknown(format!("{other} with options that no known model uses")),
        None => unknown("something without a type".into()),
    }
}

/// Names of the steps, for messages.
fn describe(steps: &[Step]) -> String {
    let names = steps.iter().map(|step| match step {
        Step::Split(pattern) => format!("Split {}", pattern.chars().take(40).collect::<String>()),
        Step::Digits => "Digits".to_owned(),
        Step::Bytes { regex } => format!("ByteLevel{}", if *regex { " with its expression" } else { "" }),
    });
    names.collect::<Vec<_>>().join(", ")
}
