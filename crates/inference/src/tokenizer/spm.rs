//! SentencePiece tokenisation as Llama models use it: neighbours whose join is a token merge, best score first.

use super::{Kind, TokenizerError, vocab::Vocab};
use std::{cmp::Ordering, collections::BinaryHeap};

/// Stands for a space in token texts (U+2581).
const SPACE: &str = "▁";

#[derive(Debug)]
pub(super) struct Spm {
    scores: Vec<f32>,
    byte_ids: Vec<Option<u32>>,
    unknown: Option<u32>,
    pub add_space_prefix: bool,
}

/// A pair that could merge: higher score first, then further left.
#[derive(Debug, PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of the join, to notice that a side has changed.
    len: usize,
}

impl Eq for Pair {}
impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

/// A piece of the text: bytes `start..start + len`, linked to its neighbours; `len` 0 once merged away.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    previous: usize,
    next: usize,
}

const END: usize = usize::MAX;

impl Spm {
    pub fn new(vocab: &Vocab, scores: &[f32], add_space_prefix: bool) -> Result<Self, TokenizerError> {
        if scores.len() != vocab.len() || scores.iter().any(|s| s.is_nan()) {
            let what = format!("{} tokens but {} usable scores", vocab.len(), scores.len());
            return Err(TokenizerError::vocabulary(what));
        }
        let byte_ids = (0..256).map(|b| vocab.id(&format!("<0x{b:02X}>"))).collect();
        Ok(Self { scores: scores.to_vec(), byte_ids, unknown: vocab.special.unknown, add_space_prefix })
    }

    pub fn encode(&self, vocab: &Vocab, text: &str, after_special: bool, out: &mut Vec<u32>) {
        let prefix = if self.add_space_prefix && after_special { SPACE } else { "" };
        let text = format!("{prefix}{}", text.replace(' ', SPACE));
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                previous: i.checked_sub(1).unwrap_or(END),
                next: i + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = END;
        }
        self.merge(vocab, &text, &mut symbols);
        let mut at = if symbols.is_empty() { END } else { 0 };
        while at != END {
            let s = symbols[at];
            self.emit(vocab, &text[s.start..s.start + s.len], out);
            at = s.next;
        }
    }

    fn merge(&self, vocab: &Vocab, text: &str, symbols: &mut [Symbol]) {
        let pair = |symbols: &[Symbol], left: usize, right: usize| {
            let (start, len) = (symbols[left].start, symbols[left].len + symbols[right].len);
            let id = vocab.id(&text[start..start + len])?;
            Some(Pair { score: self.scores[id as usize], left, right, len })
        };
        let mut heap: BinaryHeap<Pair> =
            (1..symbols.len()).filter_map(|right| pair(symbols, right - 1, right)).collect();
        while let Some(Pair { left, right, len, .. }) = heap.pop() {
            let (l, r) = (symbols[left], symbols[right]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            symbols[left] = Symbol { len, next: r.next, ..l };
            symbols[right].len = 0;
            if r.next != END {
                symbols[r.next].previous = left;
                heap.extend(pair(symbols, left, r.next));
            }
            if l.previous != END {
                heap.extend(pair(symbols, l.previous, left));
            }
        }
    }

    /// The token of a piece, or its bytes one by one.
    fn emit(&self, vocab: &Vocab, piece: &str, out: &mut Vec<u32>) {
        if let Some(id) = vocab.id(piece) {
            out.push(id);
            return;
        }
        out.extend(piece.bytes().filter_map(|b| self.byte_ids[usize::from(b)].or(self.unknown)));
    }
}

/// Bytes that a token stands for.
pub(super) fn bytes(text: &str, kind: Option<Kind>) -> Vec<u8> {
    if kind == Some(Kind::Byte) {
        let hex = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
        if let Some(b) = hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            return vec![b];
        }
    }
    text.replace(SPACE, " ").into_bytes()
}
