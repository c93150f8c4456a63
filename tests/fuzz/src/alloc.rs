//! An allocator that refuses absurd requests: a decoder that believes a length field before it has the bytes dies here
//! with "memory allocation of N bytes failed" instead of passing because the pages were never touched.

use std::alloc::{GlobalAlloc, Layout, System};

/// Largest single request, bytes. Inputs have at most 64 KiB, so even a thousandfold growth stays below.
pub const LARGEST: usize = 128 << 20;

struct Capped;

// SAFETY: every request goes to the system allocator or answers null, which the contract allows.
unsafe impl GlobalAlloc for Capped {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if new_size > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is ours.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is ours.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Capped = Capped;
