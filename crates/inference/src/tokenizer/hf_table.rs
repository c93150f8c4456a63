//! The vocabulary part of `tokenizer.json` and its companions: texts and kinds by id, merges, special tokens.

use super::TokenizerError;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::{HashMap, HashSet};

#[derive(Deserialize)]
pub(super) struct Added {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub special: bool,
}
#[derive(Deserialize)]
pub(super) struct BpeJson {
    pub vocab: HashMap<String, u32>,
    pub merges: Vec<Merge>,
    pub unk_token: Option<String>,
    pub continuing_subword_prefix: Option<String>,
    pub end_of_word_suffix: Option<String>,
    #[serde(default)]
    pub byte_fallback: bool,
    #[serde(default)]
    pub ignore_merges: bool,
}
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Pair(String, String),
    Text(String),
}
#[derive(Deserialize, Default)]
pub(super) struct ConfigJson {
    pub bos_token: Option<Json>,
    pub eos_token: Option<Json>,
    pub pad_token: Option<Json>,
    pub unk_token: Option<Json>,
    pub add_bos_token: Option<bool>,
    pub chat_template: Option<Json>,
}

// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;
const BYTE: i32 = 6;

pub(super) fn refuse<T>(what: impl Into<String>) -> Result<T, TokenizerError> {
    Err(TokenizerError::vocabulary(what))
}

pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";

/// Stands at an id that no token has.
pub(super) fn filler(id: usize) -> String {
    format!("[PAD{id}]")
}

/// Texts and kinds by id.
pub(super) fn table(model: &BpeJson, added: &[Added]) -> Result<(Vec<String>, Vec<i32>), TokenizerError> {
    let n = model.vocab.len() + added.len();
    let ids = model.vocab.values().copied().chain(added.iter().map(|a| a.id));
    let len = ids.max().map_or(0, |m| m as usize + 1);
    // Holes exist; numbers out of the blue would only cost memory.
    if n == 0 || len > 2 * n {
        return refuse(format!("{n} tokens with ids up to {len}"));
    }
    let mut table: Vec<Option<(&str, i32)>> = vec![None; len];
    for (text, &id) in &model.vocab {
        if let Some((other, _)) = table[id as usize].replace((text, NORMAL)) {
            let (a, b) = if other < text.as_str() { (other, text.as_str()) } else { (text.as_str(), other) };
            return refuse(format!("tokens `{a}` and `{b}` have the same id {id}"));
        }
    }
    for token in added {
        let text = token.content.as_str();
        if let Some((other, _)) = table[token.id as usize]
            && other != text
        {
            return refuse(format!("added token `{text}` has the id {} of token `{other}`", token.id));
        }
        let control = token.special || looks_special(text);
        table[token.id as usize] = Some((text, if control { CONTROL } else { USER_DEFINED }));
    }
    Ok(table
        .into_iter()
        .enumerate()
        .map(|(id, entry)| entry.map_or_else(|| (filler(id), UNUSED), |(text, kind)| (text.to_owned(), kind)))
        .unzip())
}

/// Markup that its authors forgot to mark, as llama.cpp's converter decides.
fn looks_special(text: &str) -> bool {
    (text.starts_with("<|") && text.ends_with("|>")) || (text.starts_with("<｜") && text.ends_with("｜>"))
}

pub(super) fn sentencepiece_kinds(tokens: &[String], kinds: &mut [i32], unknown: Option<&str>) {
    for (token, kind) in tokens.iter().zip(kinds) {
        let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
        if unknown.is_some_and(|u| u == token) {
            *kind = UNKNOWN;
        } else if *kind == NORMAL && hex.is_some_and(|h| h.len() == 2 && u8::from_str_radix(h, 16).is_ok()) {
            *kind = BYTE;
        }
    }
}

pub(super) fn merges(raw: Vec<Merge>) -> Result<Vec<(String, String)>, TokenizerError> {
    let mut seen = HashSet::with_capacity(raw.len());
    let mut out = Vec::with_capacity(raw.len());
    for merge in raw {
        let pair = match merge {
            Merge::Pair(left, right) => (left, right),
            Merge::Text(text) => match text.split_once(' ') {
                Some((left, right)) => (left.to_owned(), right.to_owned()),
                None => return refuse(format!("merge `{text}` is not two tokens")),
            },
        };
        // The first one counts.
        if seen.insert(pair.clone()) {
            out.push(pair);
        }
    }
    Ok(out)
}

/// Ids of special tokens: by text from `tokenizer_config.json`, else by number from `config.json`.
pub(super) fn special(
    tokens: &[String],
    own: &ConfigJson,
    config: &Json,
) -> Result<Vec<(&'static str, u32)>, TokenizerError> {
    let roles = [
        (BOS, "bos_token_id", &own.bos_token),
        ("tokenizer.ggml.eos_token_id", "eos_token_id", &own.eos_token),
        ("tokenizer.ggml.unknown_token_id", "unk_token_id", &own.unk_token),
        ("tokenizer.ggml.padding_token_id", "pad_token_id", &own.pad_token),
    ];
    let mut out = Vec::new();
    for (key, number, token) in roles {
        // A text, or an object with the text in `content`.
        let text = token.as_ref().and_then(|t| t.as_str().or_else(|| t.get("content")?.as_str()));
        let id = match text {
            Some(text) => match tokens.iter().position(|t| t == text) {
                Some(id) => Some(id as u64),
                None => return refuse(format!("`{text}`, the token of {number}, is not in the vocabulary")),
            },
            // Several end tokens: the first one is the document's.
            None => config.get(number).and_then(|v| v.as_u64().or_else(|| v.get(0)?.as_u64())),
        };
        match id.map(|id| u32::try_from(id).ok().filter(|id| (*id as usize) < tokens.len())) {
            Some(Some(id)) => out.push((key, id)),
            Some(None) => return refuse(format!("{number} is beyond the {} tokens", tokens.len())),
            None => {}
        }
    }
    Ok(out)
}

/// Whether the template of a single text begins with a special token.
pub(super) fn starts_with_token(post: Option<&Json>) -> bool {
    let Some(post) = post else { return false };
    match post.get("type").and_then(Json::as_str) {
        Some("Sequence") => {
            let parts = post.get("processors").and_then(Json::as_array);
            parts.is_some_and(|p| {
                p.iter().any(|p| p.get("type").is_some_and(|t| t != "Sequence") && starts_with_token(Some(p)))
            })
        }
        Some("TemplateProcessing") => {
            post.get("single").and_then(|s| s.get(0)).is_some_and(|first| first.get("SpecialToken").is_some())
        }
        _ => false,
    }
}

/// A text, or a list of named ones, of which `default` counts.
pub(super) fn template(json: Option<&Json>) -> Option<String> {
    let json = json?;
    let text = json.as_str().or_else(|| {
        let named = json.as_array()?.iter().find(|t| t.get("name").is_some_and(|n| n == "default"))?;
        named.get("template")?.as_str()
    })?;
    Some(text.to_owned())
}
