//! Masks and tokens of a prompt: what varies from person to person becomes a placeholder before anything is
//! compared or stored, and Chinese is split into characters, otherwise a sentence would be one token.

use regex::Regex;
use std::borrow::Cow;
use std::sync::LazyLock;

/// The placeholder of whatever varies.
pub(super) const WILD: &str = "<*>";

fn table() -> Vec<(&'static str, &'static str)> {
    vec![
        (r#"(?i)\b(?:https?|ftp)://[^\s<>"']+"#, "<URL>"),
        (r"(?i)\b[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}\b", "<MAIL>"),
        (
            r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b|\d{4}年\d{1,2}月(?:\d{1,2}日)?",
            "<DATE>",
        ),
        (r"\b\d{17}[\dXx]\b", "<ID>"),
        (r"\+\d{1,3}[ -]?\d[\d -]{6,13}\d\b|\b1[3-9]\d{9}\b", "<PHONE>"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<IP>"),
        (r"(?i)\b0x[0-9a-f]+\b|\b[0-9a-f]{16,}\b", "<HEX>"),
        (
            "\"[^\"\\n]{1,200}\"|\u{201c}[^\u{201d}\\n]{1,200}\u{201d}|\u{300c}[^\u{300d}\\n]{1,200}\u{300d}|《[^》\\n]{1,100}》",
            "<QUOTE>",
        ),
        (r"\b\d+(?:[.,:]\d+)*\b", "<NUM>"),
    ]
}

static MASKS: LazyLock<Vec<(Regex, &'static str)>> =
    LazyLock::new(|| table().into_iter().filter_map(|(p, m)| Regex::new(p).ok().map(|r| (r, m))).collect());

/// Replaces URLs, mail addresses, dates, id numbers, telephone numbers, hashes, quoted spans and numbers.
#[must_use]
pub fn mask(prompt: &str) -> String {
    let mut text = Cow::Borrowed(prompt);
    for (r, name) in MASKS.iter() {
        if let Cow::Owned(next) = r.replace_all(&text, *name) {
            text = Cow::Owned(next);
        }
    }
    text.into_owned()
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}')
}

/// Tokens of a masked prompt: white-space separated, CJK characters apart.
pub(super) fn tokens(masked: &str) -> Vec<String> {
    let mut out = Vec::new();
    for word in masked.split_whitespace() {
        let mut rest = String::new();
        for c in word.chars() {
            if is_cjk(c) {
                if !rest.is_empty() {
                    out.push(std::mem::take(&mut rest));
                }
                out.push(c.to_string());
            } else {
                rest.push(c);
            }
        }
        if !rest.is_empty() {
            out.push(rest);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn personal_details_become_placeholders() {
        assert_eq!(MASKS.len(), table().len());
        assert_eq!(
            mask("Mail ann@example.org or call +49 170 1234567 before 2026-11-29, order 4711, see https://a.b/c?d=1"),
            "Mail <MAIL> or call <PHONE> before <DATE>, order <NUM>, see <URL>"
        );
        assert_eq!(mask("请把“你好”翻译成英文，编号13800138000"), "请把<QUOTE>翻译成英文，编号13800138000");
        assert_eq!(mask("电话 13800138000 身份证 11010519491231002X"), "电话 <PHONE> 身份证 <ID>");
    }

    #[test]
    fn mixed_lines_split_into_characters_and_words() {
        assert_eq!(tokens("翻译hello world吗"), ["翻", "译", "hello", "world", "吗"]);
    }
}
