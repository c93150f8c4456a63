//! `tokenizer.json` and its companions in a safetensors model folder, read into the metadata of a GGUF file: from
//! there on both kinds of model go the same way.
//!
//! Kinds of tokens, end tokens and padding follow what llama.cpp's converter writes. What has no GGUF form (another
//! normaliser, an unknown pre-tokenizer) is refused.

use super::{
    TokenizerError, hf_pre,
    hf_table::{
        Added, BOS, BpeJson, ConfigJson, UNUSED, filler, merges, refuse, sentencepiece_kinds, special,
        starts_with_token, table, template,
    },
};
use crate::gguf::{Array, Value};
use serde::Deserialize;
use serde_json::{Value as Json, value::RawValue};
use std::{collections::HashMap, fs, path::Path};

/// Texts of the files; only the first has to exist.
#[derive(Debug, Clone, Copy, Default)]
pub struct HfFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a str,
    /// `tokenizer_config.json`: special tokens and, mostly, the chat template.
    pub tokenizer_config: Option<&'a str>,
    /// `config.json`: ids of special tokens that the other does not name.
    pub config: Option<&'a str>,
    /// `chat_template.jinja`.
    pub chat_template: Option<&'a str>,
}

/// A tokenizer of a safetensors model.
#[derive(Debug, Clone)]
pub struct HfTokenizer {
    /// `gpt2` or `llama`, as GGUF calls them.
    model: &'static str,
    pre: &'static str,
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<(String, String)>,
    add_space_prefix: bool,
    add_bos: bool,
    /// GGUF key and id.
    special: Vec<(&'static str, u32)>,
    chat_template: Option<String>,
}

#[derive(Deserialize)]
struct TokenizerJson<'a> {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Json>,
    pre_tokenizer: Option<Json>,
    post_processor: Option<Json>,
    #[serde(borrow)]
    model: &'a RawValue,
}
#[derive(Deserialize)]
struct ModelType {
    r#type: Option<String>,
}

fn read<'a, T: Deserialize<'a>>(json: &'a str, what: &str) -> Result<T, TokenizerError> {
    serde_json::from_str(json).map_err(|e| TokenizerError::vocabulary(format!("{what}: {e}")))
}

/// The vocabulary and merges, if that is what the model is made of.
fn bpe(model: &RawValue) -> Result<BpeJson, TokenizerError> {
    let kind = read::<ModelType>(model.get(), "model")?.r#type.unwrap_or_else(|| "BPE".to_owned());
    if kind != "BPE" {
        return Err(TokenizerError::UnknownModel { name: kind });
    }
    let model: BpeJson = read(model.get(), "model")?;
    let affix = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    if affix.into_iter().flatten().any(|a| !a.is_empty()) {
        return refuse("BPE with prefixes or suffixes of word parts has no GGUF form");
    }
    Ok(model)
}

impl HfTokenizer {
    /// Reads the files of a model folder.
    ///
    /// # Errors
    /// [`TokenizerError::File`] for missing or broken files and tokenizers that have no GGUF form.
    pub fn open(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let fail = |path: &Path, what: String| TokenizerError::File { path: path.to_owned(), what };
        let companion = |name: &str| -> Result<Option<String>, TokenizerError> {
            let path = folder.join(name);
            match fs::read_to_string(&path) {
                Ok(text) => Ok(Some(text)),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(fail(&path, e.to_string())),
            }
        };
        let tokenizer = fs::read_to_string(&path).map_err(|e| fail(&path, e.to_string()))?;
        let (own, config) = (companion("tokenizer_config.json")?, companion("config.json")?);
        let template = companion("chat_template.jinja")?;
        Self::parse(HfFiles {
            tokenizer: &tokenizer,
            tokenizer_config: own.as_deref(),
            config: config.as_deref(),
            chat_template: template.as_deref(),
        })
        .map_err(|e| fail(&path, e.to_string()))
    }

    /// The same for texts in memory.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] and [`TokenizerError::UnknownModel`].
    pub fn parse(files: HfFiles<'_>) -> Result<Self, TokenizerError> {
        let json: TokenizerJson<'_> = read(files.tokenizer, "not a tokenizer")?;
        let model = bpe(json.model)?;
        let config: ConfigJson =
            files.tokenizer_config.map(|text| read(text, "tokenizer_config.json")).transpose()?.unwrap_or_default();
        let ids: Json = files.config.map(|text| read(text, "config.json")).transpose()?.unwrap_or_default();
        let (tokens, mut kinds) = table(&model, &json.added_tokens)?;
        let spm = hf_pre::sentencepiece(json.normalizer.as_ref(), json.pre_tokenizer.as_ref());
        let (name, pre, add_space_prefix) = match spm {
            Some(prefix) if model.byte_fallback => {
                sentencepiece_kinds(&tokens, &mut kinds, model.unk_token.as_deref());
                ("llama", "default", prefix)
            }
            _ => {
                let reasoning = tokens.iter().any(|t| t == "<｜begin▁of▁sentence｜>");
                let (normalizer, pre) = (json.normalizer.as_ref(), json.pre_tokenizer.as_ref());
                ("gpt2", hf_pre::byte_level(normalizer, pre, model.ignore_merges, reasoning)?, false)
            }
        };
        let special = special(&tokens, &config, &ids)?;
        let bos_in_template = starts_with_token(json.post_processor.as_ref());
        Ok(Self {
            model: name,
            pre,
            add_space_prefix,
            merges: merges(model.merges)?,
            add_bos: config.add_bos_token.unwrap_or(bos_in_template) && special.iter().any(|(k, _)| *k == BOS),
            chat_template: files.chat_template.map(str::to_owned).or_else(|| template(config.chat_template.as_ref())),
            special,
            tokens,
            kinds,
        })
    }

    /// Number of ids, holes in the numbering included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// `tokenizer.*` of a GGUF file whose embedding has `rows` rows; rows without a token get an unused one.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] if there are more tokens than rows, or merges that GGUF cannot hold.
    pub fn metadata(&self, rows: usize) -> Result<Vec<(String, Value)>, TokenizerError> {
        if rows < self.tokens.len() {
            return refuse(format!("{} tokens, but the embedding has only {rows} rows", self.tokens.len()));
        }
        let (mut tokens, mut kinds) = (self.tokens.clone(), self.kinds.clone());
        tokens.extend((tokens.len()..rows).map(filler));
        kinds.resize(rows, UNUSED);
        let mut out: Vec<(&str, Value)> =
            vec![("tokenizer.ggml.model", self.model.into()), ("tokenizer.ggml.pre", self.pre.into())];
        let last = if self.model == "llama" {
            ("tokenizer.ggml.scores", Array::F32(self.scores(rows)))
        } else {
            ("tokenizer.ggml.merges", Array::String(self.merge_texts()?))
        };
        out.push(("tokenizer.ggml.tokens", Value::Array(Array::String(tokens))));
        out.push(("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))));
        out.push((last.0, Value::Array(last.1)));
        out.extend(self.special.iter().map(|(key, id)| (*key, Value::U32(*id))));
        out.push(("tokenizer.ggml.add_bos_token", self.add_bos.into()));
        if self.model == "llama" {
            out.push(("tokenizer.ggml.add_space_prefix", self.add_space_prefix.into()));
        }
        if let Some(template) = &self.chat_template {
            out.push(("tokenizer.chat_template", template.as_str().into()));
        }
        Ok(out.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
    }

    fn merge_texts(&self) -> Result<Vec<String>, TokenizerError> {
        self.merges
            .iter()
            .map(|(left, right)| match left.contains(' ') || right.contains(' ') {
                true => refuse(format!("merge `{left}` + `{right}` holds a space, which GGUF cannot say")),
                false => Ok(format!("{left} {right}")),
            })
            .collect()
    }

    /// SentencePiece joins the pair whose join has the best score; the rank of the first merge that gives a token
    /// puts the joins into the same order.
    fn scores(&self, rows: usize) -> Vec<f32> {
        let mut ranks: HashMap<String, usize> = HashMap::with_capacity(self.merges.len());
        for (rank, (left, right)) in self.merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        // f32 counts to 2^24 exactly; tokens that nothing joins to come last.
        let score = |token: &String| -(ranks.get(token).copied().unwrap_or(self.merges.len()) as f32);
        let mut out: Vec<f32> = self.tokens.iter().map(score).collect();
        out.resize(rows, -(self.merges.len() as f32));
        out
    }
}
