//! Texts from the command line: plain UTF-8, or JSON lines of conversations.

use crate::models::refused;
use crate::models::texts::{pieces, read_conversations, spread};
use anyhow::{Context, Result, bail};
use flywheel_inference::gguf::Gguf;
use flywheel_inference::tokenizer::{ChatTemplate, Tokenizer};
use std::fs;
use std::path::{Path, PathBuf};

/// Which texts.
#[derive(Debug, clap::Args)]
pub struct TextArgs {
    /// Texts: plain UTF-8, or `.jsonl` with a conversation a line (`{"messages": [{"role", "content"}, …]}`).
    #[arg(long = "text", value_name = "FILE", num_args = 1..)]
    pub files: Vec<PathBuf>,
    /// Use about so many tokens, spread over the whole text.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
}

/// Texts as tokens.
pub struct Texts {
    /// Each stands for itself.
    pub texts: Vec<Vec<u32>>,
    /// Names of the files.
    pub names: Vec<String>,
}

impl Texts {
    pub fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }
    /// One after the other, as [`flywheel_inference::eval::perplexity`] wants them.
    pub fn joined(self) -> Vec<u32> {
        self.texts.concat()
    }
}

impl TextArgs {
    /// Reads the texts for the model in `gguf` in pieces of `len` tokens; conversations stay whole.
    pub fn read(&self, gguf: &Gguf, len: usize) -> Result<Texts> {
        let tokenizer = Tokenizer::from_gguf(gguf).map_err(refused)?;
        let (mut texts, mut names) = (Vec::new(), Vec::new());
        for file in &self.files {
            texts.extend(read(file, gguf, &tokenizer, len)?);
            names.push(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        if let Some(most) = self.max_tokens {
            texts = spread(texts, most);
        }
        if texts.iter().all(Vec::is_empty) {
            bail!("the texts hold no tokens");
        }
        Ok(Texts { texts, names })
    }
}

fn read(file: &Path, gguf: &Gguf, tokenizer: &Tokenizer, len: usize) -> Result<Vec<Vec<u32>>> {
    let shown = || format!("{}", file.display());
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    if file.extension().is_none_or(|e| e != "jsonl") {
        return Ok(pieces(tokenizer, &tokenizer.encode(&text, false), len));
    }
    let template = ChatTemplate::from_gguf(gguf).map_err(refused).with_context(shown)?;
    let conversations = read_conversations(&text).with_context(shown)?;
    conversations.iter().map(|c| Ok(c.sample(tokenizer, &template).with_context(shown)?.tokens)).collect()
}
