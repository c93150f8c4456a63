//! Dense f32 linear algebra of the decoder and the trainer: matrix products over packed weights, and the few
//! row operations around them.
//!
//! One rule shapes this module: **an output element is one sum, added up in one fixed order**, whatever the
//! number of rows, the number of threads or the vector width. So a sequence gives the same bits alone and in
//! a batch, in prefill and in step-by-step decoding, and two runs can be compared by digest. General GEMM
//! libraries choose their blocking from the shape and lose exactly this (docs/adr/004).
//!
//! Quantised weights are multiplied either exactly (decoded panel by panel) or by activations in 8 bits
//! ([`blocks`]); the rule holds for both.
//!
//! Bits are equal on every x86-64 with FMA (AVX2 or AVX-512) and on aarch64; CPUs without fused
//! multiply-add give the same values only up to rounding.

mod aligned;
pub(crate) mod blocks;
mod cholesky;
mod dense;
mod kernel;
mod ops;
mod packed;
mod product;
mod rows;
mod team;

pub(crate) use aligned::Aligned;
pub(crate) use cholesky::{cholesky, invert_lower};
pub(crate) use dense::{Diagonal, Operand, gemm, gemm_columns};
pub(crate) use kernel::{LANES, Panel, SharedMut, Target, tiles};
pub(crate) use ops::{
    add, dot, exp_in_place, log_sum_exp, rms_norm, rms_norm_backward, rms_norm_weight_backward, softmax_prefix, swiglu,
    swiglu_backward,
};
pub use packed::{Packed, Storage};
pub(crate) use rows::Rows;
pub(crate) use team::parallel;
