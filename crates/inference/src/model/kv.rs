//! Keys and values of past tokens in pages that sequences can share.
//!
//! Stored as f16 (the default of stock llama.cpp), already in the panel layout of the inner loop: for each
//! layer and head the keys as `[position / 32][dim][position % 32]`, the values as `[dim / 32][position][dim % 32]`.

use super::ModelConfig;
use crate::linalg::{Aligned, LANES};
use half::f16;
use std::sync::Arc;

/// Positions of a page.
pub(crate) const PAGE: usize = 64;

/// Where things are inside a page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLayout {
    layers: usize,
    heads: usize,
    head_dim: usize,
}

impl PageLayout {
    pub fn new(config: &ModelConfig) -> Self {
        Self { layers: config.layers, heads: config.kv_heads, head_dim: config.head_dim }
    }
    fn key_len(self) -> usize {
        PAGE * self.head_dim
    }
    fn value_len(self) -> usize {
        PAGE * self.head_dim.next_multiple_of(LANES)
    }
    fn slot(self, layer: usize, head: usize) -> usize {
        (layer * self.heads + head) * (self.key_len() + self.value_len())
    }
    fn page_len(self) -> usize {
        self.layers * self.heads * (self.key_len() + self.value_len())
    }
}

#[derive(Debug, Clone)]
struct Page(Aligned<f16>);

/// The cache of one sequence. Cloning shares the pages; a shared page is copied when it is written to.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    layout: PageLayout,
    pages: Vec<Arc<Page>>,
    len: usize,
}

impl Sequence {
    pub fn new(layout: PageLayout) -> Self {
        Self { layout, pages: Vec::new(), len: 0 }
    }
    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Makes room for `more` tokens and for writing them.
    pub fn extend(&mut self, more: usize) {
        let from = self.len / PAGE;
        self.len += more;
        let fresh = || Arc::new(Page(Aligned::zeroed(self.layout.page_len())));
        self.pages.resize_with(self.len.div_ceil(PAGE), fresh);
        for page in &mut self.pages[from..] {
            Arc::make_mut(page);
        }
    }
    /// Stores the key and value heads of one token (`heads * head_dim` values each).
    pub fn write(&mut self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        let (l, at) = (self.layout, position % PAGE);
        let page = Arc::make_mut(&mut self.pages[position / PAGE]);
        let heads = keys.chunks_exact(l.head_dim).zip(values.chunks_exact(l.head_dim));
        for (head, (key, value)) in heads.enumerate() {
            let slot = &mut page.0[l.slot(layer, head)..][..l.key_len() + l.value_len()];
            let (k, v) = slot.split_at_mut(l.key_len());
            let column = &mut k[at / LANES * LANES * l.head_dim + at % LANES..];
            column.iter_mut().step_by(LANES).zip(key).for_each(|(s, x)| *s = f16::from_f32(*x));
            for (panel, part) in value.chunks(LANES).enumerate() {
                let row = &mut v[(panel * PAGE + at) * LANES..][..part.len()];
                row.iter_mut().zip(part).for_each(|(s, x)| *s = f16::from_f32(*x));
            }
        }
    }
    /// Key panel `panel` (32 positions, counted over all pages) of a head: `[dim][32]`.
    pub fn keys(&self, layer: usize, head: usize, panel: usize) -> &[f16] {
        const PANELS: usize = PAGE / LANES;
        let (l, page) = (self.layout, &self.pages[panel / PANELS]);
        let len = LANES * l.head_dim;
        &page.0[l.slot(layer, head) + panel % PANELS * len..][..len]
    }
    /// Value panel `panel` (32 dimensions) of a head in page `page`: `[position][32]`.
    pub fn values(&self, layer: usize, head: usize, page: usize, panel: usize) -> &[f16] {
        let l = self.layout;
        let len = PAGE * LANES;
        &self.pages[page].0[l.slot(layer, head) + l.key_len() + panel * len..][..len]
    }
    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }
}
