//! Eight numbers that go through a search side by side: eight candidates each, so that no sum runs across lanes and every
//! candidate's is added up in the same order, with or without vector instructions.

/// Eight `f32` in a register, or in an array.
pub(super) trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    fn load(x: [f32; 8]) -> Self;
    fn values(self) -> [f32; 8];
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;

    /// The nearest whole number in `lo..=hi` (small integers), ties to even.
    #[inline(always)]
    fn level(self, lo: Self, hi: Self) -> Self {
        let magic = Self::splat(12_582_912.0); // 1.5 * 2^23: adding it pushes the fraction out of the mantissa
        self.add(magic).sub(magic).max(lo).min(hi)
    }
}

/// `Σ term` over `$i < $n`, by eight partial sums, for each of `$k` terms. A macro, since a closure would not be compiled
/// for the vector instructions of the function around it.
macro_rules! sums {
    ($lanes:ty, $k:literal, $n:expr, $i:ident => $terms:expr) => {{
        let zero = <$lanes>::splat(0.0);
        let mut sums = [zero; $k];
        for first in 0..8 {
            let mut part = [zero; $k];
            for j in 0..$n / 8 {
                let $i = 8 * j + first;
                let terms = $terms;
                for k in 0..$k {
                    part[k] = part[k].add(terms[k]);
                }
            }
            for k in 0..$k {
                sums[k] = sums[k].add(part[k]);
            }
        }
        sums
    }};
}
pub(super) use sums;

impl Lanes for [f32; 8] {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        [x; 8]
    }
    #[inline(always)]
    fn load(x: [f32; 8]) -> Self {
        x
    }
    #[inline(always)]
    fn values(self) -> [f32; 8] {
        self
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] + other[i])
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] - other[i])
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] * other[i])
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i].min(other[i]))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i].max(other[i]))
    }
}

/// For functions that are compiled for AVX2 and only called where it was detected.
#[cfg(target_arch = "x86_64")]
impl Lanes for std::arch::x86_64::__m256 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: only used inside `wide!` functions, after detection (and so below).
        unsafe { std::arch::x86_64::_mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(x: [f32; 8]) -> Self {
        // SAFETY: as above; eight values are one register.
        unsafe { std::arch::x86_64::_mm256_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn values(self) -> [f32; 8] {
        let mut out = [0.0; 8];
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_storeu_ps(out.as_mut_ptr(), self) }
        out
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_add_ps(self, other) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_sub_ps(self, other) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_mul_ps(self, other) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_min_ps(self, other) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { std::arch::x86_64::_mm256_max_ps(self, other) }
    }
}
