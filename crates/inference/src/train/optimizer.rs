//! AdamW (arXiv 1711.05101).

use super::TrainConfig;
use rayon::prelude::*;
use std::ops::Range;

/// Values that one thread works on at a time.
const CHUNK: usize = 1 << 14;

/// Length of a vector. The parts that are summed do not depend on the number of threads, so neither does the result.
pub(super) fn norm(values: &[f32]) -> f32 {
    let square = |part: &[f32]| part.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>();
    let parts: Vec<f64> = values.par_chunks(CHUNK).map(square).collect();
    parts.iter().sum::<f64>().sqrt() as f32
}

/// Running means of the gradient and of its square.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Adam {
    pub mean: Vec<f32>,
    pub square: Vec<f32>,
}

impl Adam {
    pub fn new(len: usize) -> Self {
        Self { mean: vec![0.0; len], square: vec![0.0; len] }
    }

    /// `step` counts from 1; weight decay applies to the `decayed` ranges.
    pub fn update(
        &mut self,
        c: &TrainConfig,
        rate: f32,
        step: usize,
        decayed: &[Range<usize>],
        grads: &[f32],
        values: &mut [f32],
    ) {
        let t = i32::try_from(step).unwrap_or(i32::MAX);
        let unbias1 = 1.0 - f64::from(c.beta1).powi(t);
        let unbias2 = 1.0 - f64::from(c.beta2).powi(t);
        let step_size = (f64::from(rate) / unbias1) as f32;
        let root = (1.0 / unbias2.sqrt()) as f32;
        for range in decayed.iter().filter(|_| c.weight_decay > 0.0) {
            values[range.clone()].iter_mut().for_each(|v| *v -= rate * c.weight_decay * *v);
        }
        let moments = self.mean.par_chunks_mut(CHUNK).zip(self.square.par_chunks_mut(CHUNK));
        values.par_chunks_mut(CHUNK).zip(grads.par_chunks(CHUNK)).zip(moments).for_each(
            |((values, grads), (mean, square))| {
                for ((value, g), (mean, square)) in values.iter_mut().zip(grads).zip(mean.iter_mut().zip(square)) {
                    *mean = c.beta1 * *mean + (1.0 - c.beta1) * g;
                    *square = c.beta2 * *square + (1.0 - c.beta2) * g * g;
                    *value -= step_size * *mean / (square.sqrt() * root + c.epsilon);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values worked out by hand from the paper's formulas.
    #[test]
    fn two_steps_follow_the_paper() {
        let c = TrainConfig { weight_decay: 0.1, epsilon: 1e-8, ..TrainConfig::default() };
        let one = 0..1;
        let (mut adam, all) = (Adam::new(1), std::slice::from_ref(&one));
        let mut v = [1.0f32];
        adam.update(&c, 0.01, 1, all, &[0.5], &mut v);
        // mean/unbias = 0.5, sqrt(square/unbias) = 0.5: 1 - 0.001 - 0.01
        assert!((v[0] - 0.989).abs() < 1e-6, "{}", v[0]);
        adam.update(&c, 0.01, 2, all, &[-1.0], &mut v);
        let mean = (0.9 * 0.05 - 0.1) / (1.0 - 0.81f64);
        let square = (0.999 * 0.001 * 0.25 + 0.001) / (1.0 - 0.998_001f64);
        let want = 0.989 * 0.999 - 0.01 * mean / square.sqrt();
        assert!((f64::from(v[0]) - want).abs() < 1e-6, "{} {want}", v[0]);
        let (mut adam, mut plain) = (Adam::new(1), [1.0f32]);
        adam.update(&c, 0.01, 1, &[], &[0.5], &mut plain);
        assert!((plain[0] - 0.99).abs() < 1e-6, "without decay: {}", plain[0]);
        assert!((norm(&[3.0, -4.0]) - 5.0).abs() < 1e-6);
    }
}
