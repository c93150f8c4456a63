//! Topics from co-retrieval: which chunks tend to be retrieved together. A community stands in for the unseen
//! "this topic is hard" effect. Label propagation with a modularity penalty (Barber & Clark 2009, LPAm), because
//! plain propagation lets one label flood a small, densely linked index. Deterministic: nodes in id order, ties
//! to the smaller label.

use super::patterns::PatternTable;
use crate::hash::IdMap;

/// A row whose chunks belong to no usable community.
pub(crate) const NO_COMMUNITY: u32 = 0;

/// Pairs of chunks (a < b) with the number of rows in which both were shown, and rows per chunk.
pub(crate) struct CoRetrieval {
    pub rows: Vec<u64>,
    pub pairs: Vec<((u32, u32), u64)>,
}

/// Counts pairs over the table.
pub(crate) fn co_retrieval(table: &PatternTable, chunks: usize) -> CoRetrieval {
    let mut rows = vec![0u64; chunks];
    let mut map: IdMap<u64, u64> = IdMap::default();
    for p in table.iter() {
        let n = u64::from(p.n);
        for (i, &a) in p.chunks.iter().enumerate() {
            rows[a as usize] += n;
            for &b in &p.chunks[i + 1..] {
                let (lo, hi) = if a < b { (a, b) } else { (b, a) };
                *map.entry(u64::from(lo) << 32 | u64::from(hi)).or_default() += n;
            }
        }
    }
    let mut pairs: Vec<_> = map.into_iter().map(|(k, n)| (((k >> 32) as u32, (k & 0xffff_ffff) as u32), n)).collect();
    pairs.sort_unstable();
    CoRetrieval { rows, pairs }
}

/// Label of every chunk, 1-based and dense; [`NO_COMMUNITY`] for chunks in groups of fewer than `min_size`.
/// Edge weight `n_ab / sqrt(n_a n_b)`, kept when `n_ab >= 3` and weight > 0.1.
pub(crate) fn communities(co: &CoRetrieval, rounds: usize, min_size: usize) -> (Vec<u32>, u32) {
    let m = co.rows.len();
    let mut adjacent: Vec<Vec<(u32, f64)>> = vec![Vec::new(); m];
    let mut strength = vec![0.0; m];
    let mut total = 0.0;
    for &((a, b), n) in &co.pairs {
        let w = n as f64 / (co.rows[a as usize] as f64 * co.rows[b as usize] as f64).sqrt();
        if n >= 3 && w > 0.1 {
            adjacent[a as usize].push((b, w));
            adjacent[b as usize].push((a, w));
            strength[a as usize] += w;
            strength[b as usize] += w;
            total += w;
        }
    }
    let mut label: Vec<u32> = (0..m as u32).collect();
    propagate(&adjacent, &strength, total, rounds, &mut label);
    dense_labels(&label, &co.rows, min_size)
}

fn propagate(adjacent: &[Vec<(u32, f64)>], strength: &[f64], total: f64, rounds: usize, label: &mut [u32]) {
    let mut mass = strength.to_vec();
    let mut gain: Vec<(u32, f64)> = Vec::new();
    for _ in 0..rounds {
        let mut moved = false;
        for v in 0..label.len() {
            if adjacent[v].is_empty() {
                continue;
            }
            gain.clear();
            gain.push((label[v], 0.0));
            for &(u, w) in &adjacent[v] {
                let l = label[u as usize];
                match gain.iter_mut().find(|g| g.0 == l) {
                    Some(g) => g.1 += w,
                    None => gain.push((l, w)),
                }
            }
            let own = label[v];
            mass[own as usize] -= strength[v];
            let mut best = (own, f64::NEG_INFINITY);
            for &(l, w) in &gain {
                let score = w - strength[v] * mass[l as usize] / (2.0 * total);
                if score > best.1 + 1e-12 || ((score - best.1).abs() <= 1e-12 && l < best.0) {
                    best = (l, score);
                }
            }
            mass[best.0 as usize] += strength[v];
            moved |= best.0 != own;
            label[v] = best.0;
        }
        if !moved {
            break;
        }
    }
}

fn dense_labels(label: &[u32], rows: &[u64], min_size: usize) -> (Vec<u32>, u32) {
    let mut size = vec![0usize; label.len()];
    for (v, &l) in label.iter().enumerate() {
        if rows[v] > 0 {
            size[l as usize] += 1;
        }
    }
    let mut dense = vec![NO_COMMUNITY; label.len()];
    let mut next = 0;
    let out = label
        .iter()
        .map(|&l| {
            if size[l as usize] < min_size {
                return NO_COMMUNITY;
            }
            if dense[l as usize] == NO_COMMUNITY {
                next += 1;
                dense[l as usize] = next;
            }
            dense[l as usize]
        })
        .collect();
    (out, next)
}

/// Majority label of a row's chunks; ties go to the better rank.
pub(crate) fn row_community(labels: &[u32], chunks: &[u32]) -> u32 {
    let of = |c: u32| labels.get(c as usize).copied().unwrap_or(NO_COMMUNITY);
    let mut best = (NO_COMMUNITY, 0usize);
    for &c in chunks {
        let l = of(c);
        if l == NO_COMMUNITY {
            continue;
        }
        let votes = chunks.iter().filter(|&&d| of(d) == l).count();
        if votes > best.1 {
            best = (l, votes);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::super::patterns::Cell;
    use super::*;

    fn cell() -> Cell {
        Cell { epoch: 0, template: 0, bundle: 0, device_class: 0, locale: 0, bucket: 0 }
    }

    #[test]
    fn two_topics_with_a_bridge_stay_two_communities() {
        let mut t = PatternTable::default();
        for _ in 0..20 {
            t.add(cell(), &[0, 1, 2], 1, 0, 1000);
            t.add(cell(), &[1, 2, 3], 1, 0, 1000);
            t.add(cell(), &[4, 5, 6], 1, 0, 1000);
            t.add(cell(), &[5, 6, 7], 1, 0, 1000);
        }
        for _ in 0..6 {
            t.add(cell(), &[3, 4, 8], 1, 0, 1000);
        }
        let (l, n) = communities(&co_retrieval(&t, 10), 12, 3);
        assert_eq!(n, 2, "{l:?}");
        assert_eq!(l[0], l[3]);
        assert_eq!(l[4], l[7]);
        assert_ne!(l[0], l[4]);
        assert_eq!(l[9], NO_COMMUNITY, "a chunk never retrieved has no topic");
        assert_eq!(row_community(&l, &[4, 0, 1]), l[0]);
        assert_eq!(row_community(&l, &[4, 0]), l[4], "ties go to the better rank");
    }
}
