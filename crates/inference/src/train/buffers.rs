//! Memory of passes, used again by the next one: a pass of a small model fills a gigabyte, and pages that the system
//! hands out anew each time cost a tenth of the run.

use crate::linalg::Aligned;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers that nobody uses at the moment. All of them together, lent or not, are never more than were lent at once.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    free: Vec<Aligned<f32>>,
    /// Values that are lent, and the most there ever were.
    lent: usize,
    most: usize,
}

impl Buffers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `len` values, whatever they are.
    pub fn any(&self, len: usize) -> Lent<'_> {
        let mut state = self.state();
        let fits = |b: &Aligned<f32>| b.len() >= len && b.len() / 2 <= len;
        let best = (0..state.free.len()).filter(|i| fits(&state.free[*i])).min_by_key(|i| state.free[*i].len());
        let data = best.map(|i| state.free.swap_remove(i));
        state.lent += data.as_ref().map_or(len, |d| d.len());
        state.most = state.most.max(state.lent);
        state.trim();
        drop(state);
        Lent { of: self, data: data.unwrap_or_else(|| Aligned::zeroed(len)), len }
    }

    /// `len` zeros.
    pub fn zeros(&self, len: usize) -> Lent<'_> {
        let mut lent = self.any(len);
        lent.fill(0.0);
        lent
    }

    /// A copy.
    pub fn copy(&self, of: &[f32]) -> Lent<'_> {
        let mut lent = self.any(of.len());
        lent.copy_from_slice(of);
        lent
    }
}

impl State {
    /// Frees the buffers that are too much, the largest ones first.
    fn trim(&mut self) {
        self.free.sort_by_key(|b| b.len());
        let mut free: usize = self.free.iter().map(|b| b.len()).sum();
        while free + self.lent > self.most {
            free -= self.free.pop().map_or(free, |b| b.len());
        }
    }
}

/// A buffer that goes back where it came from.
#[derive(Debug)]
pub(super) struct Lent<'a> {
    of: &'a Buffers,
    data: Aligned<f32>,
    len: usize,
}

impl Deref for Lent<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.data[..self.len]
    }
}
impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}
impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state();
        let data = std::mem::take(&mut self.data);
        state.lent -= data.len();
        state.free.push(data);
        state.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_never_outgrow_what_was_lent_at_once() {
        let buffers = Buffers::default();
        let held = |b: &Buffers| {
            let state = b.state();
            state.free.iter().map(|b| b.len()).sum::<usize>() + state.lent
        };
        let (a, b) = (buffers.copy(&[7.0; 100]), buffers.any(50));
        assert_eq!((a[99], b.len(), held(&buffers)), (7.0, 50, 150));
        drop((a, b));
        assert_eq!(held(&buffers), 150);
        let again = buffers.any(90); // the one of 100
        assert_eq!((again[0], again.len(), held(&buffers)), (7.0, 90, 150));
        assert!(buffers.zeros(40).iter().all(|v| *v == 0.0));
        let other = buffers.any(60); // no room beside the one of 50
        assert_eq!((other.len(), held(&buffers)), (60, 160));
        drop((again, other));
        let large = buffers.any(1000);
        assert_eq!(held(&buffers), 1000);
        drop(large);
        assert_eq!(held(&buffers), 1000);
    }
}
