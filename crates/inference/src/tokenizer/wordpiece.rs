//! WordPiece tokenisation of BERT-style encoders, from `tokenizer.json` or `vocab.txt`.

use super::TokenizerError;
use regex::Regex;
use serde::Deserialize;
use std::{
    borrow::Cow,
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};
use unicode_normalization::UnicodeNormalization;

/// Greedy longest-match tokenizer over lower-cased (if the model is uncased) words.
#[derive(Debug)]
pub struct WordPiece {
    vocab: HashMap<String, u32>,
    lowercase: bool,
    cls: u32,
    sep: u32,
    unknown: u32,
    /// Characters that are dropped before anything else.
    control: Regex,
    accents: Regex,
    /// One punctuation character, one ideograph, or a run of anything else that is not white space.
    words: Regex,
}

/// Words longer than this many characters are unknown as a whole.
const MAX_WORD_CHARS: usize = 100;
/// The ideograph blocks that BERT splits into single characters.
const IDEOGRAPHS: &str = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}";

#[derive(Deserialize)]
struct TokenizerJson {
    normalizer: Option<NormalizerJson>,
    model: ModelJson,
}
#[derive(Deserialize)]
struct NormalizerJson {
    r#type: String,
    #[serde(default)]
    lowercase: bool,
}
#[derive(Deserialize)]
struct ModelJson {
    r#type: Option<String>,
    vocab: HashMap<String, u32>,
    continuing_subword_prefix: Option<String>,
}
#[derive(Deserialize)]
struct TokenizerConfigJson {
    do_lower_case: Option<bool>,
}

impl WordPiece {
    /// Reads `tokenizer.json` of a model folder, or `vocab.txt` (and `tokenizer_config.json`) if there is none.
    ///
    /// # Errors
    /// [`TokenizerError::File`] for missing or broken files and for tokenizers that are not BERT's WordPiece.
    pub fn open(folder: &Path) -> Result<Self, TokenizerError> {
        let json = folder.join("tokenizer.json");
        if json.exists() { Self::from_tokenizer_json(&json) } else { Self::from_vocab_txt(folder) }
    }

    fn from_tokenizer_json(path: &Path) -> Result<Self, TokenizerError> {
        let refuse = |what: String| TokenizerError::File { path: path.to_owned(), what };
        let parsed: TokenizerJson =
            serde_json::from_str(&read(path)?).map_err(|e| refuse(format!("not a tokenizer: {e}")))?;
        let model = parsed.model;
        let prefix = model.continuing_subword_prefix.as_deref().unwrap_or("##");
        if model.r#type.as_deref().unwrap_or("WordPiece") != "WordPiece" || prefix != "##" {
            return Err(refuse("the model is not WordPiece with `##`".into()));
        }
        let normalizer = parsed.normalizer.ok_or_else(|| refuse("there is no normalizer".into()))?;
        if normalizer.r#type != "BertNormalizer" {
            return Err(refuse(format!("normalizer {} is not BertNormalizer", normalizer.r#type)));
        }
        Self::new(model.vocab, normalizer.lowercase).map_err(|what| refuse(what.to_string()))
    }

    fn from_vocab_txt(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("vocab.txt");
        let config = folder.join("tokenizer_config.json");
        let lowercase = if config.exists() {
            let parsed: TokenizerConfigJson = serde_json::from_str(&read(&config)?)
                .map_err(|e| TokenizerError::File { path: config, what: e.to_string() })?;
            parsed.do_lower_case.unwrap_or(true)
        } else {
            true
        };
        let text = read(&path)?;
        let vocab = text.lines().enumerate().map(|(id, t)| (t.to_owned(), id as u32)).collect();
        Self::new(vocab, lowercase).map_err(|e| TokenizerError::File { path, what: e.to_string() })
    }

    /// From a table of tokens; `lowercase` also strips accents, as BERT's uncased models do.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] if `[CLS]`, `[SEP]` or `[UNK]` is missing.
    pub fn new(vocab: HashMap<String, u32>, lowercase: bool) -> Result<Self, TokenizerError> {
        let id = |name: &str| {
            vocab.get(name).copied().ok_or_else(|| TokenizerError::vocabulary(format!("there is no {name}")))
        };
        let regex =
            |pattern: &str| Regex::new(pattern).map_err(|e| TokenizerError::vocabulary(format!("word splitter: {e}")));
        let (cls, sep, unknown) = (id("[CLS]")?, id("[SEP]")?, id("[UNK]")?);
        Ok(Self {
            cls,
            sep,
            unknown,
            control: regex(r"[\p{C}&&[^\t\n\r]]|\x{FFFD}")?,
            accents: regex(r"\p{Mn}")?,
            words: regex(&format!(r"[\p{{P}}[:punct:]{IDEOGRAPHS}]|[^\s\p{{P}}[:punct:]{IDEOGRAPHS}]+"))?,
            vocab,
            lowercase,
        })
    }

    /// Highest id plus one.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab.values().max().map_or(0, |&m| m as usize + 1)
    }

    /// `[CLS] … [SEP]`, cut to at most `max_len` tokens (at least 2). Text is never parsed for special tokens.
    #[must_use]
    pub fn encode(&self, text: &str, max_len: usize) -> Vec<u32> {
        let room = max_len.max(2) - 1;
        let mut out = vec![self.cls];
        let text = self.normalised(text);
        for word in self.words.find_iter(&text) {
            if out.len() >= room {
                break;
            }
            self.pieces(word.as_str(), &mut out);
        }
        out.truncate(room);
        out.push(self.sep);
        out
    }

    fn normalised<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let clean = self.control.replace_all(text, "");
        if !self.lowercase {
            return clean;
        }
        let decomposed: String = clean.nfd().collect();
        Cow::Owned(self.accents.replace_all(&decomposed, "").chars().flat_map(char::to_lowercase).collect())
    }

    /// Longest prefix that is a token, then the longest `##` token of the rest; one unmatched piece makes the
    /// whole word unknown.
    fn pieces(&self, word: &str, out: &mut Vec<u32>) {
        let start = out.len();
        let mut from = 0;
        let mut key = String::new();
        if word.chars().count() > MAX_WORD_CHARS {
            out.push(self.unknown);
            return;
        }
        while from < word.len() {
            let ends = word[from..].char_indices().map(|(at, c)| from + at + c.len_utf8());
            let found = ends.rev().find_map(|to| {
                key.clear();
                key.push_str(if from > 0 { "##" } else { "" });
                key.push_str(&word[from..to]);
                self.vocab.get(&key).map(|&id| (id, to))
            });
            let Some((id, to)) = found else {
                out.truncate(start);
                out.push(self.unknown);
                return;
            };
            out.push(id);
            from = to;
        }
    }
}

fn read(path: &Path) -> Result<String, TokenizerError> {
    fs::read_to_string(path).map_err(|e| TokenizerError::File { path: PathBuf::from(path), what: e.to_string() })
}
