//! A base model's predictions in a file, so that many models can be measured against a base that runs once.
//!
//! Form: a line of JSON ([`RecordHead`]), then for every scored position the negative log-likelihood of the token that
//! follows (f32, exact), the largest logit (f32), its token (u32) and the logits as u16 steps of 1/2048 below the largest,
//! 32 at most. A logit is off by at most 1/4096, which makes a divergence of less than 1e-6; the perplexity is exact.
//! (Coarser steps over the range of each row make 1 % of perplexity with large vocabularies:
//! <https://github.com/ikawrakow/ik_llama.cpp/pull/325>.) Little endian.

use super::Engine;
use super::divergence::{Watch, rows_of, scored, windows};
use crate::files;
use crate::gguf::GgufError;
use crate::linalg::log_sum_exp;
use crate::model::{ModelError, argmax};
use flywheel_types::Digest;
use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use std::{fs::File, path::Path};

const FORMAT: &str = "flywheel-base-predictions-v1";
const STEPS_PER_LOGIT: f32 = 2048.0;
/// Bytes of a row before its logits.
const ROW_HEAD: usize = 12;
/// Longest first line.
const MAX_HEAD: usize = 4096;

/// What a record is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordHead {
    pub format: String,
    pub vocab: usize,
    pub window: usize,
    pub windows: usize,
    /// Of the token ids in their order, so that other texts, and the same windows in another order, are refused.
    pub tokens_sha256: Digest,
    /// Of the base's tensors.
    pub base_digest: String,
}

/// Predictions at one position.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct BaseRow {
    pub logits: Vec<f32>,
    /// Of the token that follows, nats.
    pub nll: f64,
    pub top: usize,
}

pub(super) fn base_row(logits: &[f32], target: usize) -> BaseRow {
    let nll = f64::from(log_sum_exp(logits)) - f64::from(logits[target]);
    BaseRow { logits: logits.to_vec(), nll, top: argmax(logits) }
}

/// An opened record.
#[derive(Debug)]
pub struct RecordedBase {
    head: RecordHead,
    map: Mmap,
    rows_start: usize,
}

/// Runs `base` over `tokens` in windows of `window` and keeps its predictions in `path`. The file appears when complete.
///
/// # Errors
/// As [`super::perplexity`], and [`ModelError::Gguf`] with what the operating system said.
pub fn record_base(
    base: &dyn Engine,
    tokens: &[u32],
    window: usize,
    path: &Path,
    watch: &mut Watch<'_>,
) -> Result<(), ModelError> {
    let windows = windows(tokens, window)?;
    let head = RecordHead {
        format: FORMAT.into(),
        vocab: base.vocab(),
        window,
        windows: windows.len(),
        tokens_sha256: digest(tokens, window),
        base_digest: base.base_digest().to_owned(),
    };
    let io = |e: std::io::Error| ModelError::Gguf(GgufError::io(path, e));
    let mut line = serde_json::to_vec(&head).map_err(|e| ModelError::input(e.to_string()))?;
    line.push(b'\n');
    files::replace(path, &io, |out| {
        out.write_all(&line).map_err(io)?;
        for (i, text) in windows.enumerate() {
            rows_of(base, text)?.iter().try_for_each(|row| out.write_all(&encoded(row))).map_err(io)?;
            if watch(i + 1, head.windows).is_break() {
                return Err(ModelError::Cancelled);
            }
        }
        Ok(())
    })
}

/// Of the tokens that whole windows use.
fn digest(tokens: &[u32], window: usize) -> Digest {
    let used = tokens.len() / window * window;
    let bytes: Vec<u8> = tokens[..used].iter().flat_map(|t| t.to_le_bytes()).collect();
    Digest::of(&bytes)
}

fn encoded(row: &BaseRow) -> Vec<u8> {
    let top = row.logits[row.top];
    let mut out = Vec::with_capacity(ROW_HEAD + 2 * row.logits.len());
    out.extend((row.nll as f32).to_le_bytes());
    out.extend(top.to_le_bytes());
    out.extend((row.top as u32).to_le_bytes());
    // A float above the range becomes the largest u16.
    out.extend(row.logits.iter().flat_map(|l| (((top - l) * STEPS_PER_LOGIT).round() as u16).to_le_bytes()));
    out
}

fn decoded(bytes: &[u8]) -> Option<BaseRow> {
    let (head, codes) = bytes.split_at_checked(ROW_HEAD)?;
    let word = |i: usize| head.get(i..i + 4).and_then(|b| b.try_into().ok());
    let (nll, most) = (f32::from_le_bytes(word(0)?), f32::from_le_bytes(word(4)?));
    let top = u32::from_le_bytes(word(8)?) as usize;
    let logits: Vec<f32> =
        codes.as_chunks::<2>().0.iter().map(|c| most - f32::from(u16::from_le_bytes(*c)) / STEPS_PER_LOGIT).collect();
    (nll.is_finite() && most.is_finite() && top < logits.len()).then_some(BaseRow { logits, nll: f64::from(nll), top })
}

impl RecordedBase {
    /// Opens a file of [`record_base`]. It must not be changed while the value lives.
    ///
    /// # Errors
    /// [`ModelError::Input`] for a file that is none or not whole, [`ModelError::Gguf`] with what the operating system said.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |e| ModelError::Gguf(GgufError::io(path, e));
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only; the documented contract is that nobody writes into the file. All positions are
        // checked against the mapped length before use.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let refuse = |what: &str| ModelError::input(format!("{}: {what}", path.display()));
        let line = map.iter().take(MAX_HEAD).position(|b| *b == b'\n').ok_or_else(|| refuse("no base predictions"))?;
        let head: RecordHead =
            serde_json::from_slice(&map[..line]).map_err(|e| refuse(&format!("no base predictions: {e}")))?;
        if head.format != FORMAT || head.window < 4 {
            return Err(refuse(&format!("format `{}`, windows of {}", head.format, head.window)));
        }
        let this = Self { head, map, rows_start: line + 1 };
        let rows = this.head.windows.checked_mul(scored(this.head.window).len());
        let whole = rows.and_then(|n| n.checked_mul(this.row_bytes()?)).and_then(|n| n.checked_add(line + 1));
        if whole != Some(this.map.len()) {
            return Err(refuse("the file is not as long as its first line says; record the base again"));
        }
        Ok(this)
    }

    #[must_use]
    pub fn head(&self) -> &RecordHead {
        &self.head
    }

    fn row_bytes(&self) -> Option<usize> {
        self.head.vocab.checked_mul(2)?.checked_add(ROW_HEAD)
    }

    /// The vocabulary, if the record is about these windows of these tokens in this order.
    pub(super) fn check(&self, tokens: &[u32], window: usize) -> Result<usize, ModelError> {
        if self.head.window != window {
            let what = format!("the base was recorded in windows of {}, not {window}", self.head.window);
            return Err(ModelError::input(what));
        }
        if self.head.tokens_sha256 != digest(tokens, window) {
            let what = "the base was recorded on other tokens, or on the same in another order; record it again";
            return Err(ModelError::input(what));
        }
        Ok(self.head.vocab)
    }

    /// Predictions in window `i`.
    pub(super) fn window(&self, i: usize) -> Result<Vec<BaseRow>, ModelError> {
        let (per, bytes) = (scored(self.head.window).len(), self.row_bytes().unwrap_or(usize::MAX));
        let at = self.rows_start.saturating_add(i.saturating_mul(per).saturating_mul(bytes));
        let all = at.checked_add(per.saturating_mul(bytes)).and_then(|end| self.map.get(at..end)).unwrap_or_default();
        let rows: Option<Vec<BaseRow>> = all.chunks_exact(bytes).map(decoded).collect();
        rows.ok_or_else(|| {
            ModelError::input(format!("recorded predictions of window {i} are damaged; record them again"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::noise;

    #[test]
    fn a_large_vocabulary_keeps_its_perplexity() {
        let vocab = 151_936;
        let (mut exact, mut kept, mut kld) = (0.0, 0.0, 0.0);
        for position in 0..8u64 {
            // logits of a trained model: most far below a few
            let logits: Vec<f32> = noise(vocab, position, 1.0).iter().map(|v| 12.0 * v * v * v).collect();
            let target = 997 * position as usize;
            let row = base_row(&logits, target);
            let back = decoded(&encoded(&row)).unwrap();
            assert!((back.top, (back.nll - row.nll).abs() < 1e-6) == (row.top, true));
            let sum = f64::from(log_sum_exp(&back.logits));
            exact += row.nll / 8.0;
            kept += (sum - f64::from(back.logits[target])) / 8.0;
            let base_sum = f64::from(log_sum_exp(&logits));
            kld += logits.iter().zip(&back.logits).fold(0.0, |k, (a, b)| {
                let log = f64::from(*a) - base_sum;
                k + log.exp() * (log - (f64::from(*b) - sum))
            });
        }
        // even without the exact likelihood the perplexity is right to 0.01 %
        assert!((kept.exp() / exact.exp() - 1.0).abs() < 1e-4, "{kept} {exact}");
        assert!(kld / 8.0 < 1e-6, "{kld}");
    }
}
