//! Pages of prompts that were seen before.
//!
//! A page is found by the tokens in it and by the page before it, so its keys and values are those that would be
//! computed again: reuse does not change a result. Tokens are compared, not hashes of them.

use super::kv::{PAGE, Page};
use std::collections::HashMap;
use std::sync::Arc;

/// Number of a page; 0 is the beginning of all texts.
type PageId = u64;
/// The page before and the tokens of this one.
type Key = (PageId, Box<[u32]>);

#[derive(Debug)]
struct Entry {
    id: PageId,
    page: Arc<Page>,
    /// When it was used last, and how far from the beginning it is.
    used: (u64, usize),
}

/// Full pages of one model's sequences, the least recently used ones leave first.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    /// Most pages kept.
    capacity: usize,
    entries: HashMap<Key, Entry>,
    clock: u64,
    next: PageId,
}

impl PrefixCache {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// The pages that are known for the beginning of `tokens`.
    pub fn find(&mut self, tokens: &[u32]) -> Vec<Arc<Page>> {
        self.clock += 1;
        let (mut before, mut pages) = (0, Vec::new());
        for (depth, part) in tokens.chunks_exact(PAGE).enumerate() {
            let key: Key = (before, part.into());
            let Some(entry) = self.entries.get_mut(&key) else { break };
            entry.used = (self.clock, depth);
            before = entry.id;
            pages.push(entry.page.clone());
        }
        pages
    }

    /// Keeps the full pages of a sequence of `tokens`.
    pub fn insert(&mut self, tokens: &[u32], pages: &[Arc<Page>]) {
        if self.capacity == 0 {
            return;
        }
        self.clock += 1;
        let mut before = 0;
        for (depth, (part, page)) in tokens.chunks_exact(PAGE).zip(pages).take(self.capacity).enumerate() {
            let next = &mut self.next;
            let entry = self.entries.entry((before, part.into())).or_insert_with(|| {
                *next += 1;
                Entry { id: *next, page: page.clone(), used: (0, 0) }
            });
            entry.used = (self.clock, depth);
            before = entry.id;
        }
        while self.entries.len() > self.capacity {
            // Of pages used together the last one leaves first: nobody can reach it without the ones before.
            let oldest = self.entries.iter().min_by_key(|(_, e)| (e.used.0, std::cmp::Reverse(e.used.1)));
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&key);
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arch;
    use super::super::kv::{KvType, PageLayout, Sequence};
    use super::super::tests::tiny;
    use super::*;

    #[test]
    fn pages_are_found_by_all_tokens_before_them_and_leave_in_order() {
        let layout = PageLayout::new(tiny(Arch::Llama).config(), KvType::Q8_0);
        let sequence = |n: usize| {
            let mut s = Sequence::new(layout);
            s.extend(n);
            s
        };
        let text = |first: u32, n: u32| -> Vec<u32> { (0..n).map(|i| if i == 0 { first } else { i % 7 }).collect() };
        let mut cache = PrefixCache::new(3);
        let (a, b) = (text(1, 200), text(2, 130));
        let pages = sequence(200);
        cache.insert(&a, pages.full_pages());
        assert_eq!((pages.full_pages().len(), cache.len()), (3, 3));
        let found = cache.find(&a);
        assert!(found.len() == 3 && found.iter().zip(pages.full_pages()).all(|(x, y)| Arc::ptr_eq(x, y)));
        assert_eq!(cache.find(&a[..130]).len(), 2);
        assert_eq!(cache.find(&a[1..]).len(), 0);
        // The second page of `b` has the tokens of that of `a`, but not the same beginning.
        assert_eq!(b[64..128], a[64..128]);
        assert_eq!(cache.find(&b).len(), 0);
        cache.insert(&b, sequence(130).full_pages());
        assert_eq!(cache.len(), 3);
        assert_eq!((cache.find(&a).len(), cache.find(&b).len()), (1, 2));
    }
}
