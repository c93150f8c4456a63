//! Masks for personal data in free text, applied before anything is stored: e-mail addresses, telephone numbers,
//! payment cards (Luhn), US social security numbers and Chinese resident ids (ISO 7064 MOD 11-2). Numbers that only
//! look long (serial numbers, order numbers) stay, because answers about them are what the fleet is judged by.

use regex::{Captures, Regex};
use std::borrow::Cow;
use std::sync::OnceLock;

struct Patterns {
    email: Regex,
    digits: Regex,
    phone: Regex,
}

fn patterns() -> Option<&'static Patterns> {
    static P: OnceLock<Option<Patterns>> = OnceLock::new();
    P.get_or_init(|| {
        Some(Patterns {
            email: Regex::new(r"(?i)[a-z0-9._%+\-]{1,64}@[a-z0-9\-]{1,63}(?:\.[a-z0-9\-]{1,63})*\.[a-z]{2,24}").ok()?,
            // Runs of digits with single spaces or hyphens inside: cards, ids.
            digits: Regex::new(r"[0-9](?:[ \-]?[0-9]){8,22}[Xx]?").ok()?,
            // +CC…, (ddd) ddd-dddd, ddd-ddd-dddd.
            phone: Regex::new(
                r"\+[0-9](?:[ \-.()]{0,2}[0-9]){7,14}|\([0-9]{3}\)[ ]?[0-9]{3}[\-. ][0-9]{4}|\b[0-9]{3}[\-.][0-9]{3}[\-.][0-9]{4}\b",
            )
            .ok()?,
        })
    })
    .as_ref()
}

/// Which kinds of personal data are replaced. All, unless an operator says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Masks {
    pub email: bool,
    pub phone: bool,
    /// Social security and resident numbers.
    pub id: bool,
    /// Payment cards.
    pub card: bool,
}

impl Default for Masks {
    fn default() -> Self {
        Self { email: true, phone: true, id: true, card: true }
    }
}

impl Masks {
    /// `text` with personal data replaced by `[email]`, `[phone]`, `[card]` or `[id]`; not copied when there is none.
    #[must_use]
    pub fn apply<'a>(&self, text: Cow<'a, str>) -> Cow<'a, str> {
        let number = long_number(&text);
        let has_at = self.email && text.contains('@');
        if !number && !has_at {
            return text;
        }
        let Some(p) = patterns() else {
            return Cow::Borrowed("[withheld]");
        };
        let mut out = text;
        if has_at {
            out = replace(out, &p.email, |_| Some("[email]"));
        }
        if number && self.phone {
            out = replace(out, &p.phone, |_| Some("[phone]"));
        }
        if number {
            out = replace(out, &p.digits, |c| self.number(&c[0]));
        }
        out
    }

    /// What a run of digits is replaced by, if it is personal.
    fn number(&self, run: &str) -> Option<&'static str> {
        let (word, wanted) = match number_kind(run)? {
            Number::Card => ("[card]", self.card),
            Number::Id => ("[id]", self.id),
            Number::Phone => ("[phone]", self.phone),
        };
        wanted.then_some(word)
    }
}

/// Whether eight digits stand together, with up to two separators between them: the least that any pattern of numbers
/// needs. Most texts have none, and the patterns are not tried on them.
fn long_number(text: &str) -> bool {
    let (mut digits, mut gap) = (0, 0);
    for b in text.bytes() {
        if b.is_ascii_digit() {
            digits += 1;
            gap = 0;
            if digits == 8 {
                return true;
            }
        } else if digits > 0 && gap < 2 && matches!(b, b' ' | b'-' | b'.' | b'(' | b')') {
            gap += 1;
        } else {
            digits = 0;
        }
    }
    false
}

fn replace<'a>(text: Cow<'a, str>, re: &Regex, with: impl Fn(&Captures<'_>) -> Option<&'static str>) -> Cow<'a, str> {
    let new = re.replace_all(&text, |c: &Captures<'_>| match with(c) {
        Some(word) => word.to_owned(),
        None => c[0].to_owned(),
    });
    match new {
        Cow::Borrowed(_) => text,
        Cow::Owned(s) => Cow::Owned(s),
    }
}

/// A kind of personal number.
enum Number {
    Card,
    Id,
    Phone,
}

/// What a run of digits is, if it is personal.
fn number_kind(run: &str) -> Option<Number> {
    let compact: Vec<u8> = run.bytes().filter(|b| b.is_ascii_digit() || b.eq_ignore_ascii_case(&b'x')).collect();
    let all_digits = compact.iter().all(u8::is_ascii_digit);
    if compact.len() == 18 && resident_id(&compact) {
        return Some(Number::Id);
    }
    if all_digits && (13..=19).contains(&compact.len()) && luhn(&compact) {
        return Some(Number::Card);
    }
    if compact.len() == 9 && run.len() == 11 && run.as_bytes()[3] == b'-' && run.as_bytes()[6] == b'-' {
        return Some(Number::Id);
    }
    if all_digits && compact.len() == 11 && compact[0] == b'1' && (b'3'..=b'9').contains(&compact[1]) {
        return Some(Number::Phone);
    }
    None
}

/// Luhn check of ISO/IEC 7812-1.
fn luhn(digits: &[u8]) -> bool {
    let sum: u32 = digits
        .iter()
        .rev()
        .enumerate()
        .map(|(i, d)| {
            let v = u32::from(d - b'0') * if i % 2 == 1 { 2 } else { 1 };
            if v > 9 { v - 9 } else { v }
        })
        .sum();
    sum.is_multiple_of(10)
}

/// GB 11643-1999: 17 digits and an ISO 7064 MOD 11-2 check character.
fn resident_id(id: &[u8]) -> bool {
    const WEIGHTS: [u32; 17] = [7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2];
    if !id[..17].iter().all(u8::is_ascii_digit) {
        return false;
    }
    let sum: u32 = id.iter().zip(WEIGHTS).map(|(d, w)| u32::from(d - b'0') * w).sum();
    b"10X98765432"[(sum % 11) as usize] == id[17].to_ascii_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(text: &str) -> Cow<'_, str> {
        Masks::default().apply(text.into())
    }

    #[test]
    fn an_operator_can_keep_a_kind() {
        let masks = Masks { phone: false, ..Masks::default() };
        let text = "call +49 170 1234567 or ann@example.org, 4111 1111 1111 1111, 13812345678";
        assert_eq!(masks.apply(text.into()), "call +49 170 1234567 or [email], [card], 13812345678");
    }

    #[test]
    fn personal_data_is_masked() {
        for (text, want) in [
            ("write to Ann.Lee+x@mail.example.co.uk now", "write to [email] now"),
            ("call +49 170 1234567 today", "call [phone] today"),
            ("call (415) 555-2671", "call [phone]"),
            ("tel 415-555-2671.", "tel [phone]."),
            ("手机13812345678。", "手机[phone]。"),
            ("card 4111 1111 1111 1111 ok", "card [card] ok"),
            ("ssn 078-05-1120", "ssn [id]"),
            ("身份证11010519491231002X", "身份证[id]"),
        ] {
            assert_eq!(mask(text), want);
        }
    }

    #[test]
    fn plain_numbers_stay() {
        for text in [
            "serial 4021987655 weighs 12.5 kg",
            "order 4111111111111112",
            "at 2026-03-01 10:00:05, version 5.2.0",
            "id 110105194912310021",
            "a@b and 12 @ 3",
            "range 100-200, 300-400, 500-600",
        ] {
            assert_eq!(mask(text), text);
        }
    }

    #[test]
    fn luhn_reference_values() {
        assert!(luhn(b"79927398713"));
        assert!(!luhn(b"79927398710"));
    }
}
