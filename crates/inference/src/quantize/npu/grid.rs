//! Asymmetric integers with power-of-two scales: `w ≈ 2⁻ⁿ · (q - z)`, so that a multiplier is a shift.

/// Allowed exponents `n`.
pub const EXPONENTS: std::ops::RangeInclusive<u8> = 3..=8;
/// Allowed zero points `z`.
pub const ZERO_POINTS: std::ops::RangeInclusive<i8> = -7..=7;

/// Scale and zero point of a group of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    pub exponent: u8,
    pub zero_point: i8,
}

impl Group {
    /// `2⁻ⁿ`, exact in half precision.
    #[must_use]
    pub fn scale(self) -> f32 {
        1.0 / f32::from(1u16 << self.exponent)
    }
    /// The nearest integer of `bits` bits, and whether the value was beyond the range.
    #[must_use]
    pub fn level(self, w: f32, bits: u32) -> (i8, bool) {
        let (low, high) = range(bits);
        let exact = (w / self.scale()).round_ties_even() + f32::from(self.zero_point);
        (exact.clamp(low, high) as i8, exact < low || exact > high)
    }
    /// The value that a level stands for.
    #[must_use]
    pub fn value(self, level: i8) -> f32 {
        self.scale() * f32::from(i16::from(level) - i16::from(self.zero_point))
    }

    /// The exponent and zero point with the least squared error, weighted by `importance`; of equals the finer scale and
    /// the zero point nearest to 0.
    #[must_use]
    pub fn fit(weights: &[f32], importance: Option<&[f32]>, bits: u32) -> Self {
        let mut best = (f32::INFINITY, Self { exponent: *EXPONENTS.end(), zero_point: 0 });
        for exponent in EXPONENTS.rev() {
            for step in 0..15i8 {
                let zero_point = if step % 2 == 1 { step / 2 + 1 } else { -(step / 2) };
                let group = Self { exponent, zero_point };
                let error = group.error(weights, importance, bits);
                if error < best.0 {
                    best = (error, group);
                }
            }
        }
        best.1
    }

    fn error(self, weights: &[f32], importance: Option<&[f32]>, bits: u32) -> f32 {
        let (low, high) = range(bits);
        let (low, high) = (low - f32::from(self.zero_point), high - f32::from(self.zero_point));
        let (scale, inverse) = (self.scale(), f32::from(1u16 << self.exponent));
        let one = |w: f32| {
            let e = w - scale * (w * inverse).round_ties_even().clamp(low, high);
            e * e
        };
        match importance {
            Some(importance) => weights.iter().zip(importance).map(|(w, i)| i * one(*w)).sum(),
            None => weights.iter().map(|w| one(*w)).sum(),
        }
    }
}

/// Least and largest level.
fn range(bits: u32) -> (f32, f32) {
    let half = (1i32 << (bits - 1)) as f32;
    (-half, half - 1.0)
}

/// Packs levels of `bits` bits (two's complement) one after the other, least significant bit first; whole bytes.
pub(super) fn pack(levels: &[i8], bits: u32, out: &mut Vec<u8>) {
    let (mut held, mut filled) = (0u32, 0);
    for level in levels {
        held |= (u32::from(level.cast_unsigned()) & ((1 << bits) - 1)) << filled;
        filled += bits;
        while filled >= 8 {
            out.push(held as u8);
            held >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        out.push(held as u8);
    }
}

/// The opposite of [`pack`], for one row.
pub(super) fn unpack(bytes: &[u8], bits: u32, out: &mut [i8]) {
    for (i, level) in out.iter_mut().enumerate() {
        let at = i * bits as usize;
        let pair = u32::from(bytes[at / 8]) | u32::from(bytes.get(at / 8 + 1).copied().unwrap_or(0)) << 8;
        let raw = (pair >> (at % 8)) << (32 - bits);
        *level = (raw.cast_signed() >> (32 - bits)) as i8;
    }
}

/// Bytes of a packed row.
pub(super) fn row_bytes(columns: usize, bits: u32) -> usize {
    (columns * bits as usize).div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_by_hand() {
        let g = Group { exponent: 4, zero_point: 3 };
        assert_eq!((g.scale(), g.value(5)), (0.0625, 0.125));
        assert_eq!(g.level(0.13, 4), (5, false));
        assert_eq!(g.level(1.0, 4), (7, true), "16 + 3 is beyond 7");
        // all positive weights want a zero point below: -8 - z = 0 at z = -8 is not allowed, -7 is
        let up: Vec<f32> = (0..16).map(|i| i as f32 / 256.0).collect();
        assert_eq!(Group::fit(&up, None, 4), Group { exponent: 8, zero_point: -7 });
        assert_eq!(Group::fit(&[0.0; 8], None, 6), Group { exponent: 8, zero_point: 0 });
        assert_eq!(Group::fit(&[15.0], None, 8).exponent, 3);
    }

    proptest! {
        #[test]
        fn packing_round_trips(levels in prop::collection::vec(any::<i8>(), 1..50), bits in prop::sample::select(vec![4u32, 6, 8])) {
            let shift = 8 - bits;
            let levels: Vec<i8> = levels.iter().map(|l| l >> shift).collect();
            let mut bytes = vec![];
            pack(&levels, bits, &mut bytes);
            prop_assert_eq!(bytes.len(), row_bytes(levels.len(), bits));
            let mut back = vec![0; levels.len()];
            unpack(&bytes, bits, &mut back);
            prop_assert_eq!(back, levels);
        }

        #[test]
        fn no_other_allowed_group_is_better(weights in prop::collection::vec(-1.5f32..1.5, 1..40), bits in prop::sample::select(vec![4u32, 6, 8])) {
            let error = |g: Group| -> f32 { weights.iter().map(|w| (w - g.value(g.level(*w, bits).0)).powi(2)).sum() };
            let best = error(Group::fit(&weights, None, bits));
            for exponent in EXPONENTS {
                for zero_point in ZERO_POINTS {
                    let other = error(Group { exponent, zero_point });
                    prop_assert!(best <= other * 1.0001 + 1e-9);
                }
            }
        }
    }
}
