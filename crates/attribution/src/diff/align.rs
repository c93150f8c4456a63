//! Levenshtein alignment with the tie-break that reproduces public error annotation: trace back from the end,
//! prefer the diagonal, then a deletion, then an insertion. LCS diffs place insertions elsewhere and miss gap tags.

/// One step of an alignment; indices point into the two sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Keep {
        a: usize,
        b: usize,
    },
    Substitute {
        a: usize,
        b: usize,
    },
    /// `a` is redundant.
    Delete {
        a: usize,
    },
    /// `b` is missing before `a`.
    Insert {
        before_a: usize,
        b: usize,
    },
}

/// Above this length only a band around the diagonal is filled.
const FULL_LIMIT: usize = 4_000;
const BAND: usize = 512;
/// Nothing longer is aligned.
pub(super) const MAX_TOKENS: usize = 20_000;
const FAR: u16 = u16::MAX / 2;

/// Distances on a band of diagonals; cells outside are far away.
struct Table {
    half: usize,
    width: usize,
    cells: Vec<u16>,
}

impl Table {
    fn at(&self, i: usize, j: usize) -> u16 {
        let k = j + self.half;
        if k < i || k - i >= self.width { FAR } else { self.cells[i * self.width + (k - i)] }
    }
    fn set(&mut self, i: usize, j: usize, v: u16) {
        let k = j + self.half - i;
        self.cells[i * self.width + k] = v;
    }
}

/// Aligns two sequences of comparable tokens with unit costs. Over 4,000 tokens the result is exact as long as
/// the two never drift more than 512 tokens further apart than their lengths differ.
#[must_use]
pub fn align<T: PartialEq>(a: &[T], b: &[T]) -> Vec<Op> {
    // A common prefix and suffix are kept as they are; both are part of an optimal alignment under this tie-break
    // only for the suffix (the trace starts there), so the prefix is left to the table.
    let suffix = a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count();
    let (n, m) = (a.len() - suffix, b.len() - suffix);
    let spread = n.max(m);
    let half = if spread <= FULL_LIMIT { n } else { BAND + n.saturating_sub(m) };
    let ahead = if spread <= FULL_LIMIT { m } else { BAND + m.saturating_sub(n) };
    let mut t = Table { half, width: half + ahead + 1, cells: Vec::new() };
    t.cells = vec![FAR; (n + 1) * t.width];
    for i in 0..=n {
        for j in i.saturating_sub(half)..=m.min(i + ahead) {
            let v = if i == 0 {
                j as u16
            } else if j == 0 {
                i as u16
            } else {
                let diagonal = t.at(i - 1, j - 1) + u16::from(a[i - 1] != b[j - 1]);
                diagonal.min(t.at(i - 1, j) + 1).min(t.at(i, j - 1) + 1)
            };
            t.set(i, j, v.min(FAR));
        }
    }
    let mut ops = Vec::with_capacity(a.len().max(b.len()));
    ops.extend((0..suffix).map(|k| Op::Keep { a: a.len() - 1 - k, b: b.len() - 1 - k }));
    let (mut i, mut j) = (n, m);
    while i > 0 || j > 0 {
        let here = t.at(i, j);
        if i > 0 && j > 0 {
            let same = a[i - 1] == b[j - 1];
            if here == t.at(i - 1, j - 1) + u16::from(!same) {
                (i, j) = (i - 1, j - 1);
                ops.push(if same { Op::Keep { a: i, b: j } } else { Op::Substitute { a: i, b: j } });
                continue;
            }
        }
        if i > 0 && (j == 0 || here == t.at(i - 1, j) + 1) {
            i -= 1;
            ops.push(Op::Delete { a: i });
        } else {
            j -= 1;
            ops.push(Op::Insert { before_a: i, b: j });
        }
    }
    ops.reverse();
    ops
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(ops: &[Op]) -> usize {
        ops.iter().filter(|o| !matches!(o, Op::Keep { .. })).count()
    }

    #[test]
    fn textbook_distances() {
        let d = |a: &str, b: &str| cost(&align(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>()));
        assert_eq!((d("kitten", "sitting"), d("saturday", "sunday"), d("", "abc"), d("abc", "")), (3, 3, 3, 3));
    }

    #[test]
    fn the_tie_break_is_diagonal_then_deletion_then_insertion() {
        let ops = align(&['a', 'b'], &['b', 'c']);
        assert_eq!(ops, vec![Op::Substitute { a: 0, b: 0 }, Op::Substitute { a: 1, b: 1 }]);
        // One of two equal tokens is redundant: seen from the end the first one is.
        assert_eq!(align(&['x', 'x'], &['x']), vec![Op::Delete { a: 0 }, Op::Keep { a: 1, b: 0 }]);
    }

    #[test]
    fn the_band_agrees_with_the_full_table_on_a_long_text() {
        let a: Vec<u32> = (0..4_500).collect();
        let mut b = a.clone();
        b.remove(4_000);
        b.insert(10, 9_999_999);
        b[2_000] = 7;
        assert_eq!(cost(&align(&a, &b)), 3);
    }

    proptest! {
        #[test]
        fn applying_the_operations_gives_the_correction(a in prop::collection::vec(0u8..4, 0..20), b in prop::collection::vec(0u8..4, 0..20)) {
            let mut out = Vec::new();
            let mut used = 0;
            for op in align(&a, &b) {
                match op {
                    Op::Keep { a: i, b: j } => { prop_assert_eq!(i, used); prop_assert_eq!(a[i], b[j]); used += 1; out.push(a[i]); }
                    Op::Substitute { a: i, b: j } => { prop_assert_eq!(i, used); used += 1; out.push(b[j]); }
                    Op::Delete { a: i } => { prop_assert_eq!(i, used); used += 1; }
                    Op::Insert { before_a, b: j } => { prop_assert_eq!(before_a, used); out.push(b[j]); }
                }
            }
            prop_assert_eq!(used, a.len());
            prop_assert_eq!(out, b);
        }
    }
}
