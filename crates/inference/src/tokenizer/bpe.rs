//! Byte-level byte-pair encoding.

use super::{TokenizerError, pretokenize::PreTokenizer, vocab::Vocab};
use hashbrown::HashMap;
use std::{cmp::Reverse, collections::BinaryHeap};

/// Stands for a byte that the vocabulary has no token for; such bytes are left out, as stock does.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Bpe {
    pre: PreTokenizer,
    /// Pair of ids to (rank, id of the merged token).
    merges: HashMap<(u32, u32), (u32, u32)>,
    byte_ids: Box<[u32; 256]>,
    /// Words that are tokens as a whole; only filled where the pre-tokenizer asks for it.
    whole: HashMap<Vec<u8>, u32>,
    byte_of: HashMap<char, u8>,
}

/// The printable stand-in of each byte (GPT-2): printable Latin-1 stands for itself, the rest for U+0100 onwards.
pub(super) fn byte_chars() -> [char; 256] {
    let mut out = ['\0'; 256];
    let mut next = 0x100u32;
    for (b, c) in out.iter_mut().enumerate() {
        let b = b as u8;
        let printable = matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        *c = if printable {
            char::from(b)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or('\0')
        };
    }
    out
}

impl Bpe {
    pub fn new(vocab: &Vocab, pre: &str, merges: &[String]) -> Result<Self, TokenizerError> {
        let pre = PreTokenizer::new(pre)?;
        let chars = byte_chars();
        let byte_of: HashMap<char, u8> = chars.iter().enumerate().map(|(b, &c)| (c, b as u8)).collect();
        let mut byte_ids = Box::new([NONE; 256]);
        for (id, c) in byte_ids.iter_mut().zip(chars) {
            *id = vocab.id(c.encode_utf8(&mut [0; 4])).unwrap_or(NONE);
        }
        let mut table = HashMap::with_capacity(merges.len());
        let mut both = String::new();
        for (rank, merge) in merges.iter().enumerate() {
            let entry = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').and_then(|(at, _)| {
                let (left, right) = (&merge[..at], &merge[at + 1..]);
                both.clear();
                both.extend([left, right]);
                Some((vocab.id(left)?, vocab.id(right)?, vocab.id(&both)?))
            });
            let Some((left, right, merged)) = entry else {
                let what = format!("merge {rank} `{merge}` names something that is not a token");
                return Err(TokenizerError::vocabulary(what));
            };
            table.entry((left, right)).or_insert((rank as u32, merged));
        }
        let mut this = Self { pre, merges: table, byte_ids, whole: HashMap::new(), byte_of };
        if this.pre.whole_words {
            let ids = 0..vocab.len() as u32;
            this.whole = ids.map(|id| (this.bytes(vocab.text(id)), id)).collect();
        }
        Ok(this)
    }

    /// Bytes that a token's text stands for. Characters outside the table stand for themselves.
    pub fn bytes(&self, text: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len());
        for c in text.chars() {
            match self.byte_of.get(&c) {
                Some(&b) => out.push(b),
                None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        out
    }

    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        for word in self.pre.split(text) {
            if let Some(&id) = self.whole.get(word.as_bytes()) {
                out.push(id);
            } else {
                self.merge_word(word.as_bytes(), out);
            }
        }
    }

    /// Merges the pair of lowest rank, leftmost first, until none is left.
    fn merge_word(&self, word: &[u8], out: &mut Vec<u32>) {
        let mut ids: Vec<u32> = word.iter().map(|&b| self.byte_ids[usize::from(b)]).collect();
        let n = ids.len();
        // A doubly linked list over positions; a merged symbol lives at its left position.
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        let mut heap = BinaryHeap::new();
        let candidate = |ids: &[u32], left: usize, right: usize| {
            let pair = (ids[left], ids[right]);
            self.merges.get(&pair).map(|&(rank, _)| Reverse((rank, left, right, pair)))
        };
        heap.extend((1..n).filter_map(|right| candidate(&ids, right - 1, right)));
        while let Some(Reverse((_, left, right, pair))) = heap.pop() {
            // Stale if either side has been merged since.
            if ids[left] != pair.0 || ids[right] != pair.1 || next[left] != right {
                continue;
            }
            let Some(&(_, merged)) = self.merges.get(&pair) else { continue };
            ids[left] = merged;
            ids[right] = NONE;
            next[left] = next[right];
            if next[left] < n {
                previous[next[left]] = left;
                heap.extend(candidate(&ids, left, next[left]));
            }
            if previous[left] < n {
                heap.extend(candidate(&ids, previous[left], left));
            }
        }
        let mut at = 0;
        while at < n {
            if ids[at] != NONE {
                out.push(ids[at]);
            }
            at = next[at];
        }
    }
}
