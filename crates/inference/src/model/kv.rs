//! Keys and values of past tokens in pages that sequences can share.
//!
//! They are kept in the panel layouts of the inner loops. As f16 (the default of stock llama.cpp): for each layer and
//! head the keys as `[position / 32][dim][position % 32]`, the values as `[dim / 32][position][dim % 32]`. As Q8_0
//! (blocks of 32 dimensions with one scale, about half the memory): keys as panels of 16 positions of
//! [`crate::linalg::blocks`], values as `[dim / 32][position][dim % 32]` in bytes with a scale for each 32.

use super::ModelConfig;
use crate::linalg::blocks::{BLOCK, Panel, Q8, WIDTH, level_bytes, put_q8, scale_bytes, to_q8};
use crate::linalg::{Aligned, LANES};
use half::f16;
use std::sync::Arc;

/// Positions of a page.
pub(crate) const PAGE: usize = 64;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvType {
    /// 8 bits with a half-precision scale for 32 values: 1.06 bytes a value.
    #[default]
    Q8_0,
    /// Two bytes a value.
    F16,
}

/// Where things are inside a page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLayout {
    layers: usize,
    heads: usize,
    head_dim: usize,
    kv: KvType,
}

impl PageLayout {
    pub fn new(config: &ModelConfig, kv: KvType) -> Self {
        Self { layers: config.layers, heads: config.kv_heads, head_dim: config.head_dim, kv }
    }
    /// Blocks of 32 dimensions of a head, the last one filled up.
    fn blocks(self) -> usize {
        self.head_dim.div_ceil(BLOCK)
    }
    fn slot(self, layer: usize, head: usize) -> usize {
        layer * self.heads + head
    }
    fn slots(self) -> usize {
        self.layers * self.heads
    }
    fn key_len(self) -> usize {
        PAGE * self.head_dim
    }
    fn value_len(self) -> usize {
        PAGE * self.blocks() * LANES
    }
    fn level_len(self) -> usize {
        self.blocks() * level_bytes(Q8)
    }
    fn scale_len(self) -> usize {
        scale_bytes(Q8, self.blocks())
    }
    fn page(self) -> Page {
        let (n, panels) = (self.slots(), PAGE / WIDTH);
        match self.kv {
            KvType::F16 => Page::F16(Aligned::zeroed(n * (self.key_len() + self.value_len()))),
            KvType::Q8_0 => Page::Q8 {
                keys: Aligned::zeroed(n * panels * self.level_len()),
                key_scales: Aligned::zeroed(n * panels * self.scale_len()),
                values: Aligned::zeroed(n * self.value_len()),
                value_scales: Aligned::zeroed(n * self.blocks() * PAGE),
            },
        }
    }
}

/// Keys and values of [`PAGE`] positions, all layers and heads.
#[derive(Debug, Clone)]
pub(crate) enum Page {
    F16(Aligned<f16>),
    Q8 { keys: Aligned<u8>, key_scales: Aligned<u8>, values: Aligned<i8>, value_scales: Aligned<f16> },
}

impl Page {
    fn write(&mut self, l: PageLayout, slot: usize, at: usize, key: &[f32], value: &[f32]) {
        match self {
            Self::F16(all) => {
                let len = l.key_len() + l.value_len();
                let (k, v) = all[slot * len..][..len].split_at_mut(l.key_len());
                let column = &mut k[at / LANES * LANES * l.head_dim + at % LANES..];
                column.iter_mut().step_by(LANES).zip(key).for_each(|(s, x)| *s = f16::from_f32(*x));
                for (panel, part) in value.chunks(LANES).enumerate() {
                    let row = &mut v[(panel * PAGE + at) * LANES..][..part.len()];
                    row.iter_mut().zip(part).for_each(|(s, x)| *s = f16::from_f32(*x));
                }
            }
            Self::Q8 { keys, key_scales, values, value_scales } => {
                let panel = slot * (PAGE / WIDTH) + at / WIDTH;
                let levels = &mut keys[panel * l.level_len()..][..l.level_len()];
                let scales = &mut key_scales[panel * l.scale_len()..][..l.scale_len()];
                for (b, part) in key.chunks(BLOCK).enumerate() {
                    put_q8(levels, scales, b, at % WIDTH, part);
                }
                for (b, part) in value.chunks(BLOCK).enumerate() {
                    let (levels, scale) = to_q8(part);
                    let row = (slot * l.blocks() + b) * PAGE + at;
                    values[row * LANES..][..LANES].copy_from_slice(&levels);
                    value_scales[row] = scale;
                }
            }
        }
    }
}

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
    /// A sequence that begins with full pages of another.
    pub fn of_pages(layout: PageLayout, pages: Vec<Arc<Page>>) -> Self {
        let len = pages.len() * PAGE;
        Self { layout, pages, len }
    }
    /// The pages that are full, from the start.
    pub fn full_pages(&self) -> &[Arc<Page>] {
        &self.pages[..self.len / PAGE]
    }
    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Forgets all tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(PAGE));
    }
    /// Makes room for `more` tokens and for writing them.
    pub fn extend(&mut self, more: usize) {
        let from = self.len / PAGE;
        self.len += more;
        self.pages.resize_with(self.len.div_ceil(PAGE), || Arc::new(self.layout.page()));
        for page in &mut self.pages[from..] {
            Arc::make_mut(page);
        }
    }
    /// Stores the key and value heads of one token (`heads * head_dim` values each).
    pub fn write(&mut self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        let l = self.layout;
        let page = Arc::make_mut(&mut self.pages[position / PAGE]);
        let heads = keys.chunks_exact(l.head_dim).zip(values.chunks_exact(l.head_dim));
        for (head, (key, value)) in heads.enumerate() {
            page.write(l, l.slot(layer, head), position % PAGE, key, value);
        }
    }
    /// What page `page` holds of a head.
    pub fn head(&self, layer: usize, head: usize, page: usize) -> Head<'_> {
        let (l, slot) = (self.layout, self.layout.slot(layer, head));
        match &*self.pages[page] {
            Page::F16(all) => {
                let len = l.key_len() + l.value_len();
                let (keys, values) = all[slot * len..][..len].split_at(l.key_len());
                Head::F16 { keys, values }
            }
            Page::Q8 { keys, key_scales, values, value_scales } => {
                let part = |len: usize| slot * len..(slot + 1) * len;
                Head::Q8(HeadQ8 {
                    blocks: l.blocks(),
                    keys: &keys[part(PAGE / WIDTH * l.level_len())],
                    key_scales: &key_scales[part(PAGE / WIDTH * l.scale_len())],
                    values: &values[part(l.value_len())],
                    value_scales: &value_scales[part(l.blocks() * PAGE)],
                })
            }
        }
    }
    /// How keys and values are kept.
    pub fn kv(&self) -> KvType {
        self.layout.kv
    }
    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }
}

/// Keys and values of one head in one page.
pub(crate) enum Head<'a> {
    /// Key panels of 32 positions, `[dim][position]`; value panels of 32 dimensions, `[position][dim]`.
    F16 {
        keys: &'a [f16],
        values: &'a [f16],
    },
    Q8(HeadQ8<'a>),
}

/// Keys and values of one head in one page, in 8 bits.
pub(crate) struct HeadQ8<'a> {
    blocks: usize,
    keys: &'a [u8],
    key_scales: &'a [u8],
    values: &'a [i8],
    value_scales: &'a [f16],
}

impl HeadQ8<'_> {
    /// Keys of positions `16 panel..` of the page.
    pub fn keys(&self, panel: usize) -> Panel<'_> {
        let (levels, scales) = (self.blocks * level_bytes(Q8), scale_bytes(Q8, self.blocks));
        Panel {
            kind: Q8,
            blocks: self.blocks,
            levels: &self.keys[panel * levels..][..levels],
            scales: &self.key_scales[panel * scales..][..scales],
        }
    }
    /// Dimensions `32 panel..` of all positions, `[position][dim]`, and the scale of each position.
    pub fn values(&self, panel: usize) -> (&[i8], &[f16]) {
        (&self.values[panel * PAGE * LANES..][..PAGE * LANES], &self.value_scales[panel * PAGE..][..PAGE])
    }
}
