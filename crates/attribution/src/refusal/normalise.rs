//! Text as the rules see it: NFKC, straight quotes, no invisible characters, no `<think>` span, no code, no quoted
//! spans, no Markdown marks, lower case, single spaces. Quoting a refusal is not refusing, and code that prints
//! "You cannot debug me!" is an answer.

use regex::Regex;
use std::sync::LazyLock;
use unicode_normalization::UnicodeNormalization;

/// Longest answer looked at, characters; the rules read its beginning and its end only.
const MAX_CHARS: usize = 20_000;

fn literal(pattern: &str) -> Regex {
    #[expect(clippy::expect_used, reason = "the pattern is a literal of this file, compiled in a unit test")]
    Regex::new(pattern).expect("literal pattern")
}

static THINK: LazyLock<Regex> = LazyLock::new(|| literal(r"(?is)<think>.*?(</think>|$)"));
static CODE: LazyLock<Regex> = LazyLock::new(|| literal(r"(?s)```.*?(```|$)|`[^`\n]*`"));
static QUOTED: LazyLock<Regex> = LazyLock::new(|| {
    literal("\"[^\"\\n]{0,400}\"|\u{300c}[^\u{300d}]{0,400}\u{300d}|\u{300e}[^\u{300f}]{0,400}\u{300f}")
});
static QUOTED_LINE: LazyLock<Regex> = LazyLock::new(|| literal(r"(?m)^\s*>.*$"));

/// Characters that show nothing: zero width, soft hyphen, direction marks, variation selectors, byte-order mark.
fn invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2064}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}')
}

fn straight(c: char) -> char {
    match c {
        '\u{2018}' | '\u{2019}' | '\u{201b}' | '\u{2032}' | '\u{00b4}' => '\'',
        '\u{201c}' | '\u{201d}' | '\u{201f}' | '\u{2033}' => '"',
        c => c,
    }
}

/// NFKC, straight quotes, nothing invisible; case and white space kept. Also used where corrections are compared.
#[must_use]
pub fn normalise_characters(text: &str) -> String {
    text.chars().take(MAX_CHARS).filter(|c| !invisible(*c)).nfkc().filter(|c| !invisible(*c)).map(straight).collect()
}

/// The full normalisation of an answer.
pub(super) fn answer(text: &str) -> String {
    let t = normalise_characters(text);
    let t = THINK.replace_all(&t, " ");
    let t = CODE.replace_all(&t, " ");
    let t = QUOTED_LINE.replace_all(&t, " ");
    let t = QUOTED.replace_all(&t, " \"\" ");
    let mut out = String::with_capacity(t.len());
    for c in t.chars().flat_map(char::to_lowercase) {
        let c = if "*_#>~|".contains(c) || c.is_whitespace() { ' ' } else { c };
        if c != ' ' || !(out.is_empty() || out.ends_with(' ')) {
            out.push(c);
        }
    }
    out.truncate(out.trim_end().len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traps_disappear_and_words_stay() {
        assert_eq!(answer("**I\u{2019}m\u{200b} sorry**"), "i'm sorry");
        assert_eq!(answer("\u{ff29} cannot"), "i cannot");
        assert_eq!(answer("<think>I cannot</think>Yes"), "yes");
        assert_eq!(answer("Use `I cannot help` as text"), "use as text");
        assert_eq!(answer("It said \u{201c}I cannot help\u{201d}."), "it said \"\" .");
        assert_eq!(answer(""), "");
    }
}
