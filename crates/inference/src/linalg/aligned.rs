//! Buffers that start on a cache line: a 64-byte load that straddles two lines costs twice.

use half::f16;
use memmap2::MmapMut;

const LINE: usize = 64;

/// Element types for which all bit patterns are values.
pub(crate) trait Plain: Copy + Default + Send + Sync {}
impl Plain for f32 {}
impl Plain for f16 {}
impl Plain for u8 {}
impl Plain for i8 {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// From this size on, memory comes from the system: zeroed, and touched first by the threads that fill it.
const PAGES: usize = 1 << 18;

enum Memory {
    Lines(Vec<Line>),
    Pages(MmapMut),
}

impl Memory {
    fn zeroed(bytes: usize) -> Self {
        let pages = (bytes >= PAGES).then(|| MmapMut::map_anon(bytes).ok()).flatten();
        pages.map_or_else(|| Self::Lines(vec![Line([0; LINE]); bytes.div_ceil(LINE)]), Self::Pages)
    }
    fn start(&self) -> *const u8 {
        match self {
            Self::Lines(lines) => lines.as_ptr().cast(),
            Self::Pages(pages) => pages.as_ptr(),
        }
    }
    fn start_mut(&mut self) -> *mut u8 {
        match self {
            Self::Lines(lines) => lines.as_mut_ptr().cast(),
            Self::Pages(pages) => pages.as_mut_ptr(),
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::Lines(Vec::new())
    }
}

/// A zero-initialised vector of `T` at a 64-byte boundary.
#[derive(Default)]
pub(crate) struct Aligned<T> {
    memory: Memory,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

impl<T: Plain> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T> std::fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Aligned({} values)", self.len)
    }
}

impl<T: Plain> Aligned<T> {
    pub fn zeroed(len: usize) -> Self {
        Self { memory: Memory::zeroed(len * size_of::<T>()), len, kind: std::marker::PhantomData }
    }
    /// Makes room for at least `len` values; old values stay.
    pub fn reserve(&mut self, len: usize) {
        if self.len < len {
            let mut more = Self::zeroed(len);
            more[..self.len].copy_from_slice(self);
            *self = more;
        }
    }
}

impl<T: Plain> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the memory holds at least `len` initialised values of a plain type, more strictly aligned.
        unsafe { std::slice::from_raw_parts(self.memory.start().cast(), self.len) }
    }
}
impl<T: Plain> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start_mut().cast(), self.len) }
    }
}
