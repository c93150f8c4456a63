//! Buffers that start on a cache line: a 64-byte load that straddles two lines costs twice.

use half::f16;

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

/// Memory that the system hands out zeroed, so that the threads that fill it are the first to touch it.
fn zeroed_lines(n: usize) -> Vec<Line> {
    let Ok(layout) = std::alloc::Layout::array::<Line>(n) else { return vec![Line([0; LINE]); n] };
    if layout.size() == 0 {
        return Vec::new();
    }
    // SAFETY: the layout is not empty and is the one that a vector of `n` lines has; zeroed bytes are lines.
    unsafe {
        let start = std::alloc::alloc_zeroed(layout);
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Vec::from_raw_parts(start.cast(), n, n)
    }
}

/// A zero-initialised vector of `T` at a 64-byte boundary.
#[derive(Clone, Default)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

impl<T> std::fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Aligned({} values)", self.len)
    }
}

impl<T: Plain> Aligned<T> {
    pub fn zeroed(len: usize) -> Self {
        Self { lines: zeroed_lines((len * size_of::<T>()).div_ceil(LINE)), len, kind: std::marker::PhantomData }
    }
    /// Makes room for at least `len` values; old values stay.
    pub fn reserve(&mut self, len: usize) {
        if self.len < len {
            self.lines.resize((len * size_of::<T>()).div_ceil(LINE), Line([0; LINE]));
            self.len = len;
        }
    }
}

impl<T: Plain> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `lines` holds at least `len` initialised values of a plain type, more strictly aligned.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}
impl<T: Plain> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
