//! Which combination of attributes (bundle × device class × locale × template …) holds the excess of failures.
//!
//! For a slice with `k` failures where `e` were expected, and a total excess `X = Σ k − Σ e`, precision is
//! `(k − e)/k`, coverage `(k − e)/X`, and their F1 is `2 (k − e)/(k + X)`. Exact over all combinations of up to
//! three attributes.

use crate::hash::{IdMap, mix};
use flywheel_types::rows::{InteractionRows, Names};
use serde::{Deserialize, Serialize};

/// Attributes a slice may combine, at most.
pub const MAX_ATTRIBUTES: usize = 3;
/// Weight of the overall rate in the expectation of a rare combination, in rows.
const PRIOR_ROWS: f64 = 20.0;

/// Counts of one full combination of attribute values. `values[i]` is the value of attribute `i`.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceCell {
    pub values: Vec<u32>,
    pub rows: f64,
    pub failures: f64,
    /// Failures expected from history or from a baseline without these attributes.
    pub expected: f64,
}

/// One ranked slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SliceScore {
    /// (attribute index, value), ascending by attribute.
    pub conditions: Vec<(u32, u32)>,
    pub rows: f64,
    pub failures: f64,
    pub expected: f64,
    /// Excess-F1, at most 1.
    pub score: f64,
    /// Share of the total excess.
    pub coverage: f64,
}

/// Failures to expect in `rows` rows given history, shrunk to the overall rate `overall`.
#[must_use]
pub fn expected_from_history(rows: f64, past_rows: f64, past_failures: f64, overall: f64) -> f64 {
    rows * (past_failures + PRIOR_ROWS * overall) / (past_rows + PRIOR_ROWS)
}

/// The `top` best slices, best first; empty when there is no excess. Ties go to fewer attributes, then to smaller
/// ids. Cells may have any number of attributes, the same for all.
#[must_use]
pub fn rank(cells: &[SliceCell], top: usize) -> Vec<SliceScore> {
    let excess: f64 = cells.iter().map(|c| c.failures - c.expected).sum();
    let attributes = cells.iter().map(|c| c.values.len()).min().unwrap_or(0);
    if excess <= 0.0 || attributes == 0 {
        return Vec::new();
    }
    let mut best: Vec<SliceScore> = Vec::new();
    for mask in 1u32..1 << attributes.min(16) {
        if mask.count_ones() as usize <= MAX_ATTRIBUTES {
            let chosen: Vec<usize> = (0..attributes).filter(|a| mask & (1 << a) != 0).collect();
            cuboid(cells, &chosen, excess, &mut best);
        }
    }
    best.sort_by(|a, b| {
        b.score
            .total_cmp(&a.score)
            .then(a.conditions.len().cmp(&b.conditions.len()))
            .then(a.conditions.cmp(&b.conditions))
    });
    best.truncate(top);
    best
}

fn cuboid(cells: &[SliceCell], chosen: &[usize], excess: f64, out: &mut Vec<SliceScore>) {
    let mut groups: IdMap<u64, Vec<SliceScore>> = IdMap::default();
    for c in cells {
        let key = chosen.iter().fold(0, |h, a| mix(h ^ u64::from(c.values[*a])));
        let same = |s: &SliceScore| s.conditions.iter().all(|(a, v)| c.values[*a as usize] == *v);
        let group = groups.entry(key).or_default();
        let at = match group.iter().position(same) {
            Some(at) => at,
            None => {
                let conditions = chosen.iter().map(|a| (*a as u32, c.values[*a])).collect();
                group.push(SliceScore {
                    conditions,
                    rows: 0.0,
                    failures: 0.0,
                    expected: 0.0,
                    score: 0.0,
                    coverage: 0.0,
                });
                group.len() - 1
            }
        };
        let s = &mut group[at];
        s.rows += c.rows;
        s.failures += c.failures;
        s.expected += c.expected;
    }
    for mut s in groups.into_values().flatten() {
        s.score = 2.0 * (s.failures - s.expected) / (s.failures + excess);
        s.coverage = (s.failures - s.expected) / excess;
        if s.score > 0.0 {
            out.push(s);
        }
    }
}

/// Attribute order of [`rank_interactions`].
pub const INTERACTION_ATTRIBUTES: [&str; 4] = ["bundle", "device_class", "locale", "template"];

/// Ranks slices of `now` against the history `before` (both with the ids of `names`); attributes in the order of
/// [`INTERACTION_ATTRIBUTES`]. `only_chunk` restricts both to rows that show this chunk: the scope of a finding.
#[must_use]
pub fn rank_interactions(
    names: &Names,
    before: &InteractionRows,
    now: &InteractionRows,
    only_chunk: Option<&str>,
    top: usize,
) -> Vec<SliceScore> {
    let chunk = only_chunk.map(|c| names.chunk.get(c).unwrap_or(u32::MAX));
    let tally = |rows: &InteractionRows| {
        let mut map: std::collections::BTreeMap<[u32; 4], (f64, f64)> = std::collections::BTreeMap::new();
        for i in 0..rows.len() {
            if chunk.is_some_and(|c| !rows.chunks(i).any(|(x, hidden)| x == c && !hidden)) {
                continue;
            }
            let key = [rows.bundle[i], rows.device_class[i], rows.locale[i], rows.template[i]];
            let e = map.entry(key).or_default();
            e.0 += 1.0;
            e.1 += f64::from(rows.rejected[i]);
        }
        map
    };
    let (past, present) = (tally(before), tally(now));
    let (rows, failures) = past.values().fold((0.0, 0.0), |s, v| (s.0 + v.0, s.1 + v.1));
    if rows == 0.0 {
        return Vec::new(); // without history nothing can be called an excess
    }
    let cells: Vec<SliceCell> = present
        .into_iter()
        .map(|(key, (n, k))| {
            let (pn, pk) = past.get(&key).copied().unwrap_or_default();
            let expected = expected_from_history(n, pn, pk, failures / rows);
            SliceCell { values: key.to_vec(), rows: n, failures: k, expected }
        })
        .collect();
    rank(&cells, top)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(values: [u32; 3], failures: f64, expected: f64) -> SliceCell {
        SliceCell { values: values.to_vec(), rows: 100.0, failures, expected }
    }

    #[test]
    fn the_guilty_pair_of_attributes_wins_over_its_parts() {
        let mut cells = Vec::new();
        for b in 0..3 {
            for d in 0..3 {
                for l in 0..3 {
                    let bad = b == 1 && d == 2;
                    cells.push(cell([b, d, l], if bad { 60.0 } else { 10.0 }, 10.0));
                }
            }
        }
        let top = rank(&cells, 3);
        assert_eq!(top[0].conditions, vec![(0, 1), (1, 2)]);
        // k = 180, e = 30, X = 150: 2 · 150 / 330
        assert!((top[0].score - 300.0 / 330.0).abs() < 1e-12);
        assert!((top[0].coverage - 1.0).abs() < 1e-12);
    }

    #[test]
    fn no_excess_gives_no_slice() {
        assert!(rank(&[cell([0, 0, 0], 5.0, 6.0)], 3).is_empty());
        assert!(rank(&[], 3).is_empty());
    }
}
