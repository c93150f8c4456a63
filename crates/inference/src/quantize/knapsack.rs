//! Choice of one type for each tensor under a limit of bytes (multiple-choice knapsack).

/// One way to store a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Item {
    pub bytes: u64,
    /// Expected harm; lower is better.
    pub loss: f64,
}

/// The index of the chosen item in each list, the sum of bytes at most `limit`.
///
/// Starts with the smallest items and takes the steps of each list's lower convex hull in order of gain per byte, which
/// is the Lagrangian solution; then fills what is left with the step of the largest gain that fits. Never worse than
/// the best choice by more than the gain of one step.
///
/// # Errors
/// The smallest possible sum of bytes if that is above `limit`.
pub(super) fn choose(lists: &[Vec<Item>], limit: u64) -> Result<Vec<usize>, u64> {
    let hulls: Vec<Vec<usize>> = lists.iter().map(|l| hull(l)).collect();
    let mut chosen: Vec<usize> = hulls.iter().map(|h| h.first().copied().unwrap_or(0)).collect();
    let bytes_of =
        |chosen: &[usize]| -> u64 { lists.iter().zip(chosen).filter_map(|(l, i)| l.get(*i)).map(|i| i.bytes).sum() };
    let mut used = bytes_of(&chosen);
    if used > limit {
        return Err(used);
    }
    let mut steps: Vec<(f64, usize, usize, usize)> = Vec::new();
    for (list, h) in hulls.iter().enumerate() {
        steps.extend(h.windows(2).map(|w| (slope(&lists[list], w[0], w[1]), list, w[0], w[1])));
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    for (_, list, from, to) in steps {
        let more = lists[list][to].bytes - lists[list][from].bytes;
        if chosen[list] == from && used + more <= limit {
            chosen[list] = to;
            used += more;
        }
    }
    while let Some((list, to)) = best_step(lists, &chosen, limit - used) {
        used += lists[list][to].bytes - lists[list][chosen[list]].bytes;
        chosen[list] = to;
    }
    Ok(chosen)
}

fn slope(list: &[Item], from: usize, to: usize) -> f64 {
    (list[from].loss - list[to].loss) / (list[to].bytes - list[from].bytes) as f64
}

/// Indices of the lower convex hull, bytes rising and loss falling.
fn hull(list: &[Item]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..list.len()).collect();
    order.sort_by(|a, b| (list[*a].bytes.cmp(&list[*b].bytes)).then(list[*a].loss.total_cmp(&list[*b].loss)));
    let mut out: Vec<usize> = Vec::new();
    for i in order {
        if out.last().is_some_and(|last| list[*last].loss <= list[i].loss) {
            continue; // not smaller and not better
        }
        while let [.., a, b] = out[..] {
            if slope(list, a, b) > slope(list, b, i) {
                break;
            }
            out.pop();
        }
        out.push(i);
    }
    out
}

/// The larger item with the largest gain that fits into `left` more bytes.
fn best_step(lists: &[Vec<Item>], chosen: &[usize], left: u64) -> Option<(usize, usize)> {
    let mut best: Option<(f64, usize, usize)> = None;
    for (list, &now) in chosen.iter().enumerate() {
        let Some(from) = lists[list].get(now) else { continue };
        for (to, item) in lists[list].iter().enumerate() {
            let gain = from.loss - item.loss;
            let fits = item.bytes >= from.bytes && item.bytes - from.bytes <= left;
            if fits && gain > 0.0 && best.is_none_or(|(g, ..)| gain > g) {
                best = Some((gain, list, to));
            }
        }
    }
    best.map(|(_, list, to)| (list, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item(bytes: u64, loss: f64) -> Item {
        Item { bytes, loss }
    }
    fn sums(lists: &[Vec<Item>], chosen: &[usize]) -> (u64, f64) {
        lists.iter().zip(chosen).fold((0, 0.0), |(b, l), (list, i)| (b + list[*i].bytes, l + list[*i].loss))
    }

    #[test]
    fn a_limit_that_cannot_be_met_says_what_can() {
        let lists = [vec![item(5, 1.0), item(3, 2.0)], vec![item(4, 1.0)]];
        assert_eq!(choose(&lists, 6), Err(7));
        assert_eq!(choose(&lists, 7), Ok(vec![1, 0]));
        assert_eq!(choose(&lists, 9), Ok(vec![0, 0]));
        assert_eq!(choose(&[], 0), Ok(vec![]));
    }

    #[test]
    fn what_is_left_is_filled_with_items_off_the_hull() {
        // The hull of the first list has no 2-byte item, but only that one fits.
        let lists = [vec![item(1, 10.0), item(2, 9.9), item(9, 0.0)]];
        assert_eq!(choose(&lists, 5), Ok(vec![1]));
    }

    proptest! {
        /// Against all combinations: within one step of the best, and never worse than a uniform choice that fits.
        #[test]
        fn close_to_the_best(raw in prop::collection::vec(prop::collection::vec((1u64..40, 0f64..50.0), 1..4), 1..6), limit in 5u64..150) {
            let lists: Vec<Vec<Item>> = raw.iter().map(|l| l.iter().map(|(b, l)| item(*b, *l)).collect()).collect();
            let mut all = vec![vec![]];
            for list in &lists {
                all = all.into_iter().flat_map(|c: Vec<usize>| (0..list.len()).map(move |i| [c.clone(), vec![i]].concat())).collect();
            }
            let best = all.iter().map(|c| sums(&lists, c)).filter(|(b, _)| *b <= limit).map(|(_, l)| l).fold(f64::INFINITY, f64::min);
            match choose(&lists, limit) {
                Ok(chosen) => {
                    let (bytes, loss) = sums(&lists, &chosen);
                    prop_assert!(bytes <= limit);
                    let step = lists.iter().flat_map(|l| l.iter().map(|i| l.iter().map(|k| k.loss).fold(0.0, f64::max) - i.loss)).fold(0.0, f64::max);
                    prop_assert!(loss <= best + step + 1e-9, "{} {} {}", loss, best, step);
                }
                Err(least) => {
                    prop_assert!(least > limit && best.is_infinite());
                    prop_assert_eq!(least, lists.iter().map(|l| l.iter().map(|i| i.bytes).min().unwrap()).sum::<u64>());
                }
            }
        }
    }
}
