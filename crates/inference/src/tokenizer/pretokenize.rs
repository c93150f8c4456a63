//! The table of pre-tokenizers: how text is cut into words before byte-pair merging.
//!
//! The expressions are those the model authors trained with, under the names that GGUF files use. They are run
//! on a linear-time engine; the one look-ahead they contain, `\s+(?!\S)`, is done by hand.

use super::TokenizerError;
use regex::Regex;

/// Where `\s+(?!\S)` stands in an expression that ends in `\s+`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spaces {
    /// Nowhere.
    AsMatched,
    /// A run of white space gives its last character to the word behind it.
    LastToNextWord,
    /// The same, but a run that ends in a line break was matched by an earlier alternative and stays whole.
    LastToNextWordUnlessBreak,
}

#[derive(Debug)]
struct Stage {
    regex: Regex,
    spaces: Spaces,
}

/// A pre-tokenizer: stages applied one after the other to every piece; what a stage does not match stays a piece.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    /// Whether a word that is a token as a whole is taken before any merging.
    pub whole_words: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const CJK: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
/// Cased letters of the scripts that have case, as listed in DeepSeek LLM's tokenizer.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-",
    r"\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-",
    r"\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-",
    r"\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}",
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-",
    r"\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-",
    r"\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}",
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}",
    r"\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-",
    r"\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}",
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-",
    r"\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";

/// Names in the order in which messages list them.
pub(super) const KNOWN: [&str; 7] =
    ["gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "deepseek-llm", "deepseek-coder"];

impl PreTokenizer {
    pub fn new(name: &str) -> Result<Self, TokenizerError> {
        use Spaces::{AsMatched, LastToNextWord, LastToNextWordUnlessBreak};
        let stages: &[(&str, Spaces)] = match name {
            "gpt-2" => &[(GPT2, LastToNextWord)],
            "smollm" => &[(r"\p{N}", AsMatched), (GPT2, LastToNextWord)],
            "qwen2" | "deepseek-r1-qwen" => &[(QWEN2, LastToNextWordUnlessBreak)],
            "llama-bpe" => &[(LLAMA3, LastToNextWordUnlessBreak)],
            "deepseek-llm" => &[
                (r"[\r\n]", AsMatched),
                (DEEPSEEK_LETTERS, AsMatched),
                (DEEPSEEK_PUNCTUATION, AsMatched),
                (r"\s+$", AsMatched),
                (CJK, AsMatched),
                (r"\p{N}+", AsMatched),
            ],
            "deepseek-coder" => &[
                (r"[\r\n]", AsMatched),
                (r"\s?\p{L}+", AsMatched),
                (r"\s?\p{P}+", AsMatched),
                (CJK, AsMatched),
                (r"\p{N}", AsMatched),
            ],
            other => {
                return Err(TokenizerError::UnknownPre { name: other.to_owned(), known: KNOWN.join(", ") });
            }
        };
        let stages = stages
            .iter()
            .map(|&(pattern, spaces)| Ok(Stage { regex: Regex::new(pattern)?, spaces }))
            .collect::<Result<_, regex::Error>>()
            .map_err(|e| TokenizerError::vocabulary(format!("pre-tokenizer `{name}`: {e}")))?;
        Ok(Self { stages, whole_words: name == "llama-bpe" })
    }

    /// The words of `text`; together they are the text.
    pub fn split<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut pieces = vec![text];
        let mut next = Vec::new();
        for stage in &self.stages {
            for piece in pieces.drain(..) {
                stage.split(piece, &mut next);
            }
            std::mem::swap(&mut pieces, &mut next);
        }
        pieces
    }
}

impl Stage {
    fn split<'a>(&self, text: &'a str, out: &mut Vec<&'a str>) {
        let mut at = 0;
        while at < text.len() {
            let Some(m) = self.regex.find_at(text, at) else { break };
            if m.start() > at {
                out.push(&text[at..m.start()]);
            }
            let end = self.end_of(text, m.start(), m.end());
            out.push(&text[m.start()..end]);
            at = end;
        }
        if at < text.len() {
            out.push(&text[at..]);
        }
    }

    /// Where a match ends once the look-ahead is taken into account.
    fn end_of(&self, text: &str, start: usize, end: usize) -> usize {
        let matched = &text[start..end];
        let Some(last) = matched.chars().next_back().filter(|c| c.is_whitespace()) else { return end };
        let stays = match self.spaces {
            Spaces::AsMatched => true,
            Spaces::LastToNextWord => false,
            Spaces::LastToNextWordUnlessBreak => last == '\r' || last == '\n',
        };
        let shorter = end - last.len_utf8();
        if stays || end == text.len() || shorter == start || !matched.chars().all(char::is_whitespace) {
            end
        } else {
            shorter
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(name: &str, text: &str) -> Vec<String> {
        let pre = PreTokenizer::new(name).unwrap();
        let words: Vec<String> = pre.split(text).into_iter().map(str::to_owned).collect();
        assert_eq!(words.concat(), text);
        words
    }

    #[test]
    fn white_space_gives_its_last_character_to_the_next_word() {
        assert_eq!(split("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(split("gpt-2", "a \tb"), ["a", " ", "\t", "b"]);
        assert_eq!(split("gpt-2", "a  "), ["a", "  "]);
        assert_eq!(split("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(split("qwen2", "a\n\nb"), ["a", "\n\n", "b"]);
        assert_eq!(split("qwen2", "a \n  b"), ["a", " \n", " ", " b"]);
        assert_eq!(split("qwen2", "x \u{3000}\u{3000}"), ["x", " \u{3000}\u{3000}"]);
    }

    #[test]
    fn digits_and_contractions() {
        assert_eq!(split("smollm", "in 2024, I've"), ["in", " ", "2", "0", "2", "4", ",", " I", "'ve"]);
        assert_eq!(split("qwen2", "in 2024"), ["in", " ", "2", "0", "2", "4"]);
        assert_eq!(split("llama-bpe", "in 2024!"), ["in", " ", "202", "4", "!"]);
        assert_eq!(split("gpt-2", "in 2024"), ["in", " 2024"]);
        assert_eq!(split("qwen2", "I'VE \"q\""), ["I", "'VE", " \"", "q", "\""]);
        assert_eq!(split("deepseek-coder", "for i2 你好 x+1"), ["for", " i", "2", " ", "你好", " x", "+", "1"]);
        assert_eq!(split("deepseek-llm", "Hi 12你好，ok"), ["Hi", " ", "12", "你好", "，", "ok"]);
    }

    #[test]
    fn unknown_names_are_refused() {
        let e = PreTokenizer::new("default").unwrap_err().to_string();
        assert!(e.contains("`default`") && e.contains("deepseek-r1-qwen"), "{e}");
        assert!(PreTokenizer::new("").is_err());
    }
}
