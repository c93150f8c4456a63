//! The loops around the inner one: which rows meet which panels when, so that what is needed again is still near.

use super::aligned::Aligned;
use super::kernel::{LANES, Panel, SharedMut, Target, tiles};
use super::rows::{Rows, tile_rows};
use super::team::parallel;
use std::cell::RefCell;
use std::ops::Range;

/// Steps of the inner sum done at a time: a tile's rows and half a panel stay in the first-level cache.
const K_BLOCK: usize = 768;
/// Values of rows that meet a group of panels before the next rows come: half of a second-level cache.
const NEAR: usize = 1 << 17;
/// Most panels of a group, where there are more rows than that.
const GROUP: usize = 8;
/// Fewer multiply-adds than this are not worth waking another thread.
const PARALLEL_FROM: usize = 1 << 16;
/// Shares of a product for each thread: evens out what the threads have to do.
const SHARES: usize = 8;

thread_local! {
    static WIDE: RefCell<Aligned<f32>> = RefCell::default();
    static ROWS: RefCell<Aligned<f32>> = RefCell::default();
}

/// The right-hand side of a product, in panels of 32 columns.
pub(super) trait Panels: Sync {
    /// Steps `from..from + k` (`from` a multiple of 32) of panel `p`, as stored or decoded into `wide`, which has room for `k`
    /// steps rounded up to a multiple of 32.
    fn panel<'a>(&'a self, p: usize, from: usize, k: usize, wide: &'a mut [f32]) -> Panel<'a>;
}

/// `c[m, at..at + n] (+)= x[m, k] · panels`, with `stride` values from row to row of `c`.
pub(super) fn product(
    x: &Rows<'_>,
    n: usize,
    panels: &impl Panels,
    (c, at, stride): (SharedMut, usize, usize),
    add: bool,
) {
    let count = n.div_ceil(LANES);
    let k = k_blocks(x.k).next().map_or(1, |(_, k)| k);
    let step = tile_rows(x.m);
    let rows = (NEAR / k / step).max(1) * step;
    let group = if rows < x.m { GROUP } else { 1 };
    share(count, group, x.m * x.k * LANES, |all| {
        for first in all.clone().step_by(group) {
            let some = first..all.end.min(first + group);
            let target = |p: usize| Target { c, at: at + p * LANES, stride, cols: LANES.min(n - p * LANES), add };
            // SAFETY: each panel is in one share only, and alone writes its columns.
            unsafe { few(x, rows, some, panels, target) }
        }
    });
}

/// All rows, `rows` at a time, times some panels.
///
/// # Safety
/// No other thread may touch these panels' columns of the target meanwhile.
unsafe fn few(x: &Rows<'_>, rows: usize, some: Range<usize>, from: &impl Panels, target: impl Fn(usize) -> Target) {
    for (first, k) in k_blocks(x.k) {
        let room = k.next_multiple_of(LANES) * LANES;
        with_wide(some.len() * room, |wide| {
            let mut ready = [Panel::F32(&[]); GROUP];
            for ((p, ready), wide) in some.clone().zip(&mut ready).zip(wide.chunks_exact_mut(room)) {
                *ready = from.panel(p, first, k, wide);
            }
            for row in (0..x.len()).step_by(rows) {
                for (p, panel) in some.clone().zip(ready) {
                    let out = target(p);
                    let out = Target { add: out.add || first > 0, ..out };
                    // SAFETY: the caller's promise.
                    unsafe { tiles(x, row..x.len().min(row + rows), first, k, panel, out) }
                }
            }
        });
    }
}

/// Calls `f` for near-equal runs of the panels, in parallel when it is worth it.
fn share(count: usize, group: usize, work_per_panel: usize, f: impl Fn(Range<usize>) + Sync + Send) {
    let threads = rayon::current_num_threads();
    if count < 2 || count * work_per_panel < PARALLEL_FROM || threads < 2 {
        return f(0..count);
    }
    let shares = if group == 1 { threads * SHARES } else { threads * count.div_ceil(threads * group) }.min(count);
    parallel(shares, |i| f(i * count / shares..(i + 1) * count / shares));
}

/// Near-equal blocks of the inner dimension, each a multiple of 32 long except the last: `(from, len)`.
fn k_blocks(k: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = k.div_ceil(k.div_ceil(K_BLOCK).max(1)).next_multiple_of(LANES).max(LANES);
    (0..k).step_by(step).map(move |from| (from, step.min(k - from)))
}

/// Lends this thread's scratch buffer.
fn with_wide<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = WIDE.take();
    buffer.reserve(len);
    let result = f(&mut buffer[..len]);
    WIDE.set(buffer);
    result
}

/// Packs rows into this thread's buffer and lends them.
pub(super) fn with_rows<R>(x: &[f32], stride: usize, m: usize, k: usize, f: impl FnOnce(&Rows<'_>) -> R) -> R {
    let mut buffer = ROWS.take();
    let result = f(&Rows::pack(x, stride, m, k, &mut buffer));
    ROWS.set(buffer);
    result
}

/// The same with the columns of `x`, which is stored `k × m`.
pub(super) fn with_columns<R>(x: &[f32], stride: usize, m: usize, k: usize, f: impl FnOnce(&Rows<'_>) -> R) -> R {
    let mut buffer = ROWS.take();
    let result = f(&Rows::pack_columns(x, stride, m, k, &mut buffer));
    ROWS.set(buffer);
    result
}
