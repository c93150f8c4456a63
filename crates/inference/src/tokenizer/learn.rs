//! Learns a byte-level BPE vocabulary from texts (arXiv 1508.07909), for models trained from nothing.

use super::{TokenizerError, bpe::byte_chars, pretokenize::PreTokenizer};
use crate::gguf::{Array, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Ends a document; token 0 of every learned vocabulary, also in the role of bos.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Kinds in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// Metadata `tokenizer.ggml.*` of a vocabulary of `size` tokens: the end of text, all bytes, then one token per merge of
/// the pair that is most frequent inside the words that pre-tokenizer `pre` makes (of equally frequent pairs, the one with
/// the lowest ids). Fewer tokens come out where no pair occurs twice. The result depends on the arguments only.
///
/// # Errors
/// [`TokenizerError::Vocabulary`] for a size below 257, [`TokenizerError::UnknownPre`].
pub fn learn_bpe(texts: &[&str], size: usize, pre: &str) -> Result<Vec<(String, Value)>, TokenizerError> {
    if size < 257 || u32::try_from(size).is_err() {
        return Err(TokenizerError::vocabulary(format!("{size} tokens cannot hold all 256 bytes and the end of text")));
    }
    let mut learner = Learner::new(texts, &PreTokenizer::new(pre)?);
    let mut merges = Vec::new();
    while learner.tokens.len() < size {
        let Some(pair) = learner.most_frequent() else { break };
        merges.push(format!("{} {}", learner.tokens[pair.0 as usize], learner.tokens[pair.1 as usize]));
        learner.merge(pair);
    }
    let mut kinds = vec![NORMAL; learner.tokens.len()];
    kinds[0] = CONTROL;
    let entries = [
        ("model", Value::from("gpt2")),
        ("pre", pre.into()),
        ("tokens", Value::Array(Array::String(learner.tokens))),
        ("token_type", Value::Array(Array::I32(kinds))),
        ("merges", Value::Array(Array::String(merges))),
        ("bos_token_id", 0u32.into()),
        ("eos_token_id", 0u32.into()),
        ("add_bos_token", false.into()),
    ];
    Ok(entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).into())
}

type Pair = (u32, u32);

struct Learner {
    tokens: Vec<String>,
    /// Ids of each different word, and how often it occurs.
    words: Vec<(Vec<u32>, u64)>,
    counts: BTreeMap<Pair, u64>,
    /// Words that have, or once had, a pair.
    places: HashMap<Pair, BTreeSet<usize>>,
}

impl Learner {
    fn new(texts: &[&str], pre: &PreTokenizer) -> Self {
        let mut occurrences: BTreeMap<&str, u64> = BTreeMap::new();
        for word in texts.iter().flat_map(|text| pre.split(text)) {
            *occurrences.entry(word).or_default() += 1;
        }
        let mut tokens = vec![END_OF_TEXT.to_owned()];
        tokens.extend(byte_chars().map(String::from));
        let ids = |word: &str| word.bytes().map(|b| u32::from(b) + 1).collect();
        let words = occurrences.into_iter().map(|(word, n)| (ids(word), n)).collect();
        let mut this = Self { tokens, words, counts: BTreeMap::new(), places: HashMap::new() };
        (0..this.words.len()).for_each(|word| this.count(word));
        this
    }

    /// Adds the pairs of a word.
    fn count(&mut self, word: usize) {
        let (ids, n) = &self.words[word];
        for pair in ids.windows(2).map(|w| (w[0], w[1])) {
            *self.counts.entry(pair).or_default() += n;
            self.places.entry(pair).or_default().insert(word);
        }
    }

    /// The pair to merge next, unless every pair occurs once only.
    fn most_frequent(&self) -> Option<Pair> {
        let better = |best: Option<(Pair, u64)>, (pair, n): (&Pair, &u64)| match best {
            Some((_, most)) if *n <= most => best,
            _ => Some((*pair, *n)),
        };
        self.counts.iter().fold(None, better).filter(|(_, n)| *n > 1).map(|(pair, _)| pair)
    }

    fn merge(&mut self, pair: Pair) {
        let new = self.tokens.len() as u32;
        let text = format!("{}{}", self.tokens[pair.0 as usize], self.tokens[pair.1 as usize]);
        self.tokens.push(text);
        for word in self.places.remove(&pair).unwrap_or_default() {
            let (ids, n) = &mut self.words[word];
            for old in ids.windows(2).map(|w| (w[0], w[1])) {
                if let Some(count) = self.counts.get_mut(&old) {
                    *count -= *n;
                }
            }
            *ids = merged(ids, pair, new);
            self.count(word);
        }
        self.counts.retain(|_, n| *n > 0);
    }
}

fn merged(ids: &[u32], pair: Pair, new: u32) -> Vec<u32> {
    let mut out = Vec::with_capacity(ids.len());
    let mut at = 0;
    while at < ids.len() {
        let hit = ids.get(at) == Some(&pair.0) && ids.get(at + 1) == Some(&pair.1);
        out.push(if hit { new } else { ids[at] });
        at += if hit { 2 } else { 1 };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gguf::Metadata, tokenizer::Tokenizer};

    #[test]
    fn the_most_frequent_pairs_are_merged_first_and_text_comes_back() {
        // low ×5, lower ×2, newest ×6, widest ×3: the example of the paper, whose first merge is `e s`
        let text = "low low low low low lower lower newest newest newest newest newest newest widest widest widest";
        let metadata = learn_bpe(&[text], 300, "gpt-2").unwrap();
        let get = |key: &str| metadata.iter().find(|(k, _)| k.ends_with(key)).unwrap().1.clone();
        let Value::Array(Array::String(merges)) = get("merges") else { panic!() };
        assert_eq!(&merges[..3], ["e s", "es t", "l o"]);
        let tokenizer = Tokenizer::from_metadata(&Metadata::new(metadata.clone())).unwrap();
        let ids = tokenizer.encode(text, false);
        assert_eq!(tokenizer.decode(&ids), text);
        assert!(ids.len() <= 20, "{ids:?}");
        let other = "a 9\u{1f600}\n";
        assert_eq!(tokenizer.decode(&tokenizer.encode(other, false)), other, "bytes that were in no text");
        assert_eq!(metadata, learn_bpe(&[text], 300, "gpt-2").unwrap());
    }

    #[test]
    fn overlapping_pairs_are_counted_again_after_a_merge() {
        assert_eq!(merged(&[1, 1, 1, 2, 1, 1], (1, 1), 9), [9, 1, 2, 9]);
        let metadata = learn_bpe(&["aaaa aaaa"], 260, "gpt-2").unwrap();
        let Value::Array(Array::String(merges)) = &metadata[4].1 else { panic!() };
        assert_eq!(merges[..2], ["a a", "aa aa"]);
    }

    #[test]
    fn too_small_a_vocabulary_and_unknown_words_are_refused() {
        assert!(learn_bpe(&["a"], 256, "gpt-2").unwrap_err().to_string().contains("256"));
        assert!(learn_bpe(&["a"], 300, "nobody").is_err());
    }
}
