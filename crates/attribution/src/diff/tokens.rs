//! Tokens of a text with offsets in the three units that clients send. CJK by grapheme, everything else by Unicode
//! word; white space is no token. Tokens are compared in NFC, offsets refer to the text as it came.

use serde::{Deserialize, Serialize};
use unicode_normalization::UnicodeNormalization;
use unicode_segmentation::UnicodeSegmentation;

/// One position in a text, in three units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// Unicode scalar values (Python, Rust `chars`).
    pub scalar: u32,
    /// Bytes of UTF-8.
    pub utf8: u32,
    /// UTF-16 code units (JavaScript, Java, Swift's NSString).
    pub utf16: u32,
}

impl Position {
    fn after(mut self, text: &str) -> Self {
        for c in text.chars() {
            self.scalar += 1;
            self.utf8 += c.len_utf8() as u32;
            self.utf16 += c.len_utf16() as u32;
        }
        self
    }
}

/// One token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// NFC form, for comparison.
    pub text: String,
    pub start: Position,
    pub end: Position,
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{2e80}'..='\u{2fdf}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
        | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

/// Splits `text`.
#[must_use]
pub fn tokenize(text: &str) -> Vec<Token> {
    let mut at = Position::default();
    let mut out = Vec::new();
    let mut push = |piece: &str, start: Position| {
        let end = start.after(piece);
        if !piece.trim().is_empty() {
            out.push(Token { text: piece.nfc().collect(), start, end });
        }
        end
    };
    for word in text.split_word_bounds() {
        if word.chars().any(is_cjk) {
            for grapheme in word.graphemes(true) {
                at = push(grapheme, at);
            }
        } else {
            at = push(word, at);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_in_three_units_after_emoji_and_line_breaks() {
        let t = tokenize("ok 👍🏽\r\n价格 x");
        let words: Vec<&str> = t.iter().map(|t| t.text.as_str()).collect();
        assert_eq!(words, ["ok", "👍🏽", "价", "格", "x"]);
        assert_eq!(t[1].start, Position { scalar: 3, utf8: 3, utf16: 3 });
        assert_eq!(t[2].start, Position { scalar: 7, utf8: 13, utf16: 9 });
        assert_eq!(t[4].end, Position { scalar: 11, utf8: 21, utf16: 13 });
    }

    #[test]
    fn composed_and_decomposed_letters_are_the_same_token() {
        assert_eq!(tokenize("cafe\u{301}")[0].text, tokenize("caf\u{e9}")[0].text);
        assert_eq!(tokenize("cafe\u{301}")[0].end.scalar, 5);
    }
}
