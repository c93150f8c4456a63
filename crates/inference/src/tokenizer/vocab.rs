//! The token table: texts, kinds, special ids, and the search for special tokens in text.

use super::{Fragment, TokenizerError};
use crate::gguf::Metadata;
use hashbrown::{DefaultHashBuilder, HashTable, hash_table::Entry};
use std::{borrow::Cow, hash::BuildHasher};

/// What a token is (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Ids with a role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    /// End of a turn, if it differs in role from `eos`.
    pub eot: Option<u32>,
    pub pad: Option<u32>,
    pub unknown: Option<u32>,
    /// Whether a sequence starts with `bos`.
    pub add_bos: bool,
    /// Every id at which generation stops, ascending.
    pub ends: Vec<u32>,
}

/// Texts of tokens that end a turn or a document in the supported model families.
const END_TEXTS: [&str; 7] =
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"];
const TURN_TEXTS: [&str; 3] = ["<|eot_id|>", "<|im_end|>", "<|end|>"];

#[derive(Debug)]
pub(super) struct Vocab {
    tokens: Vec<String>,
    kinds: Vec<Kind>,
    /// Ids by the texts in `tokens`: vocabularies have 100,000 texts and more, which need not be there twice.
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Tokens that are matched in text, longest first.
    matched: Vec<u32>,
    pub special: SpecialIds,
}

impl Vocab {
    pub fn from_metadata(gguf: &Metadata) -> Result<Self, TokenizerError> {
        let tokens = gguf.required::<&[String]>("tokenizer.ggml.tokens")?.to_vec();
        let kinds = match gguf.optional::<&[i32]>("tokenizer.ggml.token_type")? {
            Some(raw) => raw.iter().map(|&k| kind(k)).collect::<Result<_, _>>()?,
            None => vec![Kind::Normal; tokens.len()],
        };
        let mut vocab = Self::new(tokens, kinds)?;
        let id = |key: &str| gguf.optional::<u32>(&format!("tokenizer.ggml.{key}"));
        vocab.special = SpecialIds {
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            eot: id("eot_token_id")?,
            pad: id("padding_token_id")?,
            unknown: id("unknown_token_id")?,
            add_bos: match gguf.optional("tokenizer.ggml.add_bos_token")? {
                Some(add) => add,
                // Stock's defaults: SentencePiece and Llama 3 start with bos.
                None => {
                    gguf.str("tokenizer.ggml.model")? == "llama"
                        || gguf.optional::<&str>("tokenizer.ggml.pre")? == Some("llama-bpe")
                }
            },
            ends: Vec::new(),
        };
        vocab.finish_special()?;
        Ok(vocab)
    }

    pub fn new(tokens: Vec<String>, kinds: Vec<Kind>) -> Result<Self, TokenizerError> {
        if kinds.len() != tokens.len() {
            let what = format!("{} tokens but {} token types", tokens.len(), kinds.len());
            return Err(TokenizerError::vocabulary(what));
        }
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            return Err(TokenizerError::vocabulary(format!("{} tokens", tokens.len())));
        }
        let hasher = DefaultHashBuilder::default();
        let mut ids = HashTable::with_capacity(tokens.len());
        let hash = |id: &u32| hasher.hash_one(tokens[*id as usize].as_str());
        for (id, token) in (0u32..).zip(&tokens) {
            match ids.entry(hash(&id), |other| tokens[*other as usize] == *token, hash) {
                Entry::Vacant(free) => drop(free.insert(id)),
                Entry::Occupied(first) => {
                    let what = format!("token `{token}` is there twice, as {} and {id}", first.get());
                    return Err(TokenizerError::vocabulary(what));
                }
            }
        }
        let mut matched: Vec<u32> = (0..tokens.len() as u32)
            .filter(|&id| matches!(kinds[id as usize], Kind::Control | Kind::UserDefined | Kind::Unknown))
            .filter(|&id| !tokens[id as usize].is_empty())
            .collect();
        matched.sort_by_key(|&id| (std::cmp::Reverse(tokens[id as usize].len()), id));
        Ok(Self { tokens, kinds, ids, hasher, matched, special: SpecialIds::default() })
    }

    fn finish_special(&mut self) -> Result<(), TokenizerError> {
        let s = &self.special;
        let named = [("bos", s.bos), ("eos", s.eos), ("eot", s.eot), ("pad", s.pad), ("unknown", s.unknown)];
        for (role, id) in named {
            if let Some(id) = id.filter(|&id| id as usize >= self.tokens.len()) {
                let what = format!("the {role} token id {id} is beyond the {} tokens", self.tokens.len());
                return Err(TokenizerError::vocabulary(what));
            }
        }
        let eot = s.eot.or_else(|| TURN_TEXTS.iter().find_map(|t| self.id(t)));
        let mut ends: Vec<u32> = END_TEXTS.iter().filter_map(|t| self.id(t)).chain(s.eos).chain(eot).collect();
        ends.sort_unstable();
        ends.dedup();
        self.special.eot = eot;
        self.special.ends = ends;
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }
    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(text), |id| self.tokens[*id as usize] == text).copied()
    }
    /// Text of a token; empty beyond the vocabulary.
    pub fn text(&self, id: u32) -> &str {
        self.tokens.get(id as usize).map_or("", String::as_str)
    }
    pub fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// Splits out special tokens: longest token first over the whole text, then the next one over what is left
    /// (the order of stock, which matters when one token's text contains another's). User-defined tokens are
    /// matched always, control tokens only with `parse_special`.
    pub fn split_special<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Fragment<'a>> {
        let mut out = if text.is_empty() { Vec::new() } else { vec![Fragment::Text(Cow::Borrowed(text))] };
        for &id in &self.matched {
            if !parse_special && self.kinds[id as usize] != Kind::UserDefined {
                continue;
            }
            let token = self.text(id);
            if !text.contains(token) {
                continue;
            }
            out = out.into_iter().flat_map(|f| split_one(f, token, id)).collect();
        }
        out
    }
}

fn split_one<'a>(fragment: Fragment<'a>, token: &str, id: u32) -> Vec<Fragment<'a>> {
    let Fragment::Text(Cow::Borrowed(text)) = fragment else { return vec![fragment] };
    let mut out = Vec::new();
    for (i, part) in text.split(token).enumerate() {
        if i > 0 {
            out.push(Fragment::Token(id));
        }
        if !part.is_empty() {
            out.push(Fragment::Text(Cow::Borrowed(part)));
        }
    }
    out
}

fn kind(raw: i32) -> Result<Kind, TokenizerError> {
    Ok(match raw {
        1 => Kind::Normal,
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        5 => Kind::Unused,
        6 => Kind::Byte,
        other => return Err(TokenizerError::vocabulary(format!("token type {other} is not known"))),
    })
}
