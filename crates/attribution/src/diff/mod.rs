//! What a correction changed: from (output, correction) to typed spans. Types as in ERRANT / ChERRANT: missing,
//! redundant, substitute, word order.

mod align;
mod tokens;

pub use align::{Op, align};
pub use tokens::{Position, Token, tokenize};

use serde::{Deserialize, Serialize};

/// Longest stretch of kept tokens a moved word may jump over.
const ORDER_REACH: usize = 6;

/// Type of an edit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EditKind {
    /// Something had to be added.
    #[serde(rename = "M")]
    Missing,
    /// Something had to go.
    #[serde(rename = "R")]
    Redundant,
    /// Something had to be replaced.
    #[serde(rename = "S")]
    Substitute,
    /// The same tokens in another order.
    #[serde(rename = "W")]
    WordOrder,
}

/// Part of one of the two texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub start: Position,
    pub end: Position,
    /// Token indices, half open.
    pub first_token: u32,
    pub end_token: u32,
    pub text: String,
}

/// One edit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    pub kind: EditKind,
    pub original: Span,
    pub corrected: Span,
}

/// All edits between two texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Diff {
    pub edits: Vec<Edit>,
    pub original_tokens: u32,
    pub corrected_tokens: u32,
    /// Levenshtein distance in tokens.
    pub distance: u32,
    /// `distance / max(tokens)`; 0 for two empty texts.
    pub ratio: f64,
}

/// Why two texts were not compared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiffError {
    #[error("a text of {tokens} tokens is longer than the limit of {limit}; split it")]
    TooLong { tokens: usize, limit: usize },
}

/// Compares an output with its correction.
///
/// # Errors
/// [`DiffError::TooLong`] over 20,000 tokens.
pub fn diff(original: &str, corrected: &str) -> Result<Diff, DiffError> {
    let (a, b) = (tokenize(original), tokenize(corrected));
    let tokens = a.len().max(b.len());
    if tokens > align::MAX_TOKENS {
        return Err(DiffError::TooLong { tokens, limit: align::MAX_TOKENS });
    }
    let words = |t: &[Token]| t.iter().map(|t| t.text.clone()).collect::<Vec<_>>();
    let (wa, wb) = (words(&a), words(&b));
    let ops = align(&wa, &wb);
    let distance = ops.iter().filter(|o| !matches!(o, Op::Keep { .. })).count() as u32;
    let ranges = word_order(merge(&ops), &wa, &wb);
    let edits = ranges
        .into_iter()
        .map(|r| Edit {
            kind: kind(&r, &wa, &wb),
            original: span(original, &a, r.a),
            corrected: span(corrected, &b, r.b),
        })
        .collect();
    let ratio = if tokens == 0 { 0.0 } else { f64::from(distance) / tokens as f64 };
    Ok(Diff { edits, original_tokens: a.len() as u32, corrected_tokens: b.len() as u32, distance, ratio })
}

/// Token ranges of one edit, half open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ranges {
    a: (usize, usize),
    b: (usize, usize),
}

/// Joins neighbouring operations that change something.
fn merge(ops: &[Op]) -> Vec<Ranges> {
    let mut out: Vec<Ranges> = Vec::new();
    let (mut i, mut j, mut open) = (0, 0, false);
    for op in ops {
        let (da, db, change) = match op {
            Op::Keep { .. } => (1, 1, false),
            Op::Substitute { .. } => (1, 1, true),
            Op::Delete { .. } => (1, 0, true),
            Op::Insert { .. } => (0, 1, true),
        };
        if change {
            match out.last_mut().filter(|_| open) {
                Some(last) => (last.a.1, last.b.1) = (i + da, j + db),
                None => out.push(Ranges { a: (i, i + da), b: (j, j + db) }),
            }
        }
        (i, j, open) = (i + da, j + db, change);
    }
    out
}

fn sorted(words: &[String]) -> Vec<&String> {
    let mut v: Vec<&String> = words.iter().collect();
    v.sort();
    v
}

/// Joins "removed here, added there" of the same tokens into one edit of word order.
fn word_order(ranges: Vec<Ranges>, a: &[String], b: &[String]) -> Vec<Ranges> {
    let mut out: Vec<Ranges> = Vec::new();
    for r in ranges {
        if let Some(last) = out.last_mut() {
            let joined = Ranges { a: (last.a.0, r.a.1), b: (last.b.0, r.b.1) };
            let one_sided = |x: &Ranges| x.a.0 == x.a.1 || x.b.0 == x.b.1;
            if r.a.0 - last.a.1 <= ORDER_REACH
                && one_sided(last)
                && one_sided(&r)
                && sorted(&a[joined.a.0..joined.a.1]) == sorted(&b[joined.b.0..joined.b.1])
            {
                *last = joined;
                continue;
            }
        }
        out.push(r);
    }
    out
}

fn kind(r: &Ranges, a: &[String], b: &[String]) -> EditKind {
    if r.a.0 == r.a.1 {
        EditKind::Missing
    } else if r.b.0 == r.b.1 {
        EditKind::Redundant
    } else if r.a.1 - r.a.0 > 1 && sorted(&a[r.a.0..r.a.1]) == sorted(&b[r.b.0..r.b.1]) {
        EditKind::WordOrder
    } else {
        EditKind::Substitute
    }
}

fn span(text: &str, tokens: &[Token], (first, end): (usize, usize)) -> Span {
    let (start, stop) = if first < end {
        (tokens[first].start, tokens[end - 1].end)
    } else {
        // An empty span sits at the end of the token before it.
        let at = if first > 0 { tokens[first - 1].end } else { Position::default() };
        (at, at)
    };
    let text = text.get(start.utf8 as usize..stop.utf8 as usize).unwrap_or_default().to_owned();
    Span { start, end: stop, first_token: first as u32, end_token: end as u32, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(original: &str, corrected: &str) -> Vec<(EditKind, String, String)> {
        let d = diff(original, corrected).unwrap();
        d.edits.into_iter().map(|e| (e.kind, e.original.text, e.corrected.text)).collect()
    }

    #[test]
    fn the_four_types_in_two_languages() {
        use EditKind::{Missing, Redundant, Substitute, WordOrder};
        let s = |k, a: &str, b: &str| vec![(k, a.to_owned(), b.to_owned())];
        assert_eq!(short("The battery lasts 18 hours.", "The battery lasts 24 hours."), s(Substitute, "18", "24"));
        assert_eq!(short("It charges in hour.", "It charges in one hour."), s(Missing, "", "one"));
        assert_eq!(short("the the price", "the price"), s(Redundant, "the", ""));
        assert_eq!(short("保修期为两年。", "保修期为三年。"), s(Substitute, "两", "三"));
        assert_eq!(short("冰箱里没什么东西也做饭", "冰箱里没什么东西也能做饭"), s(Missing, "", "能"));
        assert_eq!(short("它虽然不贵", "虽然它不贵"), s(WordOrder, "它虽然", "虽然它"));
    }

    #[test]
    fn equal_texts_and_white_space_changes_give_no_edit() {
        assert!(diff("a  b\n", "a b").unwrap().edits.is_empty());
        assert_eq!(diff("", "").unwrap().ratio, 0.0);
        let d = diff("", "new").unwrap();
        assert_eq!((d.edits.len(), d.ratio), (1, 1.0));
        assert_eq!(d.edits[0].original.start, Position::default());
    }

    #[test]
    fn too_long_is_an_error_with_the_limit() {
        let text = "x ".repeat(20_001);
        assert_eq!(diff(&text, "x"), Err(DiffError::TooLong { tokens: 20_001, limit: 20_000 }));
    }
}
