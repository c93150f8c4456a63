//! Texts to calibrate on and others to score on.

use crate::Result;
use flywheel_inference::tokenizer::Tokenizer;
use std::{fs, path::Path, path::PathBuf};

/// Windows of calibration, and tokens of each.
const WINDOWS: usize = 16;
const WINDOW: usize = 256;

/// Calibration texts by name: of the last, half the windows are from either of the others.
pub const CALIBRATION: [&str; 3] = ["wiki", "plays", "both"];

/// What is scored: the last twentieth of the first calibration text's source, and of another domain. `cargo xtask model tiny`
/// trains on neither, and the settings of the quantiser were chosen on the twentieth before it.
pub const SCORED: [&str; 2] = ["wiki", "math"];

pub struct Texts {
    wiki: String,
    plays: String,
    folder: PathBuf,
}

impl Texts {
    /// Reads the texts and writes those to score into `folder`.
    pub fn write(folder: &Path) -> Result<Self> {
        let data = std::env::var_os("FLYWHEEL_DATA").ok_or("FLYWHEEL_DATA names no folder with texts")?;
        let read = |name: &str| {
            let path = Path::new(&data).join("text").join(name);
            fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
        };
        let wiki = read("wiki.dev.raw")?;
        let (first, _) = cut(&wiki, wiki.len() / 2);
        fs::write(folder.join("wiki.txt"), cut(&wiki, wiki.len() - wiki.len() / 20).1)?;
        let math = questions(&read("gsm8k_test.jsonl")?)?;
        fs::write(folder.join("math.txt"), cut(&math, math.len() - math.len() / 20).1)?;
        Ok(Self { wiki: first.to_owned(), plays: read("tinyshakespeare.txt")?, folder: folder.to_owned() })
    }

    /// A file to score on.
    pub fn scored(&self, name: &str) -> PathBuf {
        self.folder.join(name).with_extension("txt")
    }

    /// Windows of a calibration text.
    pub fn calibration(&self, name: &str, tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
        let parts: &[&str] = match name {
            "wiki" => &[&self.wiki],
            "plays" => &[&self.plays],
            _ => &[&self.wiki, &self.plays],
        };
        let windows = |text: &&str| -> Vec<Vec<u32>> {
            let tokens = tokenizer.encode(text, false);
            tokens.chunks_exact(WINDOW).take(WINDOWS / parts.len()).map(<[u32]>::to_vec).collect()
        };
        parts.iter().flat_map(windows).collect()
    }

    pub fn described(&self) -> String {
        format!(
            "{WINDOWS} windows of {WINDOW} tokens of wiki.dev.raw (first half), of tinyshakespeare, or half of each"
        )
    }
}

/// In two after the first line end from byte `at` on.
fn cut(text: &str, at: usize) -> (&str, &str) {
    let end = text.bytes().skip(at).position(|b| b == b'\n').map_or(text.len(), |found| at + found + 1);
    text.split_at(end)
}

/// Question and answer of each line.
fn questions(lines: &str) -> Result<String> {
    let mut out = String::new();
    for line in lines.lines() {
        let item: serde_json::Value = serde_json::from_str(line)?;
        let part = |name: &str| item[name].as_str().ok_or_else(|| format!("a line without {name}"));
        out += &format!("Question: {}\nAnswer: {}\n\n", part("question")?, part("answer")?);
    }
    Ok(out)
}
