//! Distillation (arXiv 1503.02531): the loss compares with what a teacher predicts, not only with the text.

use crate::linalg::{exp_in_place, log_sum_exp};
use crate::model::{Decoder, ModelError};
use serde::{Deserialize, Serialize};

/// How much a teacher's predictions count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Distillation {
    /// Both distributions are softened by this before they are compared; 1 compares them as they are.
    pub temperature: f32,
    /// Share of `temperature² · KL(teacher ‖ student)` in the loss; the rest is the log-likelihood of the text. With a share
    /// of 1 and temperature 1 the loss is the KL divergence, nats a token.
    pub share: f32,
}

/// A decoder to learn from, with the same vocabulary.
#[derive(Debug)]
pub(super) struct Teacher {
    pub decoder: Decoder,
    pub how: Distillation,
}

impl Teacher {
    pub fn new(student: &Decoder, teacher: &Decoder, how: Distillation) -> Result<Self, ModelError> {
        let (own, other) = (student.config().vocab, teacher.config().vocab);
        if own != other {
            return Err(ModelError::input(format!("the teacher has {other} tokens, the student {own}")));
        }
        let usable = how.temperature.is_finite() && how.temperature > 0.0 && (0.0..=1.0).contains(&how.share);
        if !usable {
            return Err(ModelError::input("a distillation needs a temperature above 0 and a share in 0..=1"));
        }
        Ok(Self { decoder: teacher.clone(), how })
    }
}

impl Distillation {
    /// Turns one row of the student's logits into the gradient of the loss for `token` and returns that loss; the
    /// teacher's row is overwritten.
    pub(super) fn errors(self, student: &mut [f32], teacher: &mut [f32], token: usize) -> f64 {
        let Self { temperature: t, share } = self;
        let log_sum = log_sum_exp(student);
        let hard = f64::from(log_sum - student[token]);
        let soften = |row: &mut [f32]| {
            row.iter_mut().for_each(|v| *v /= t);
            log_sum_exp(row)
        };
        let mut soft = student.to_vec();
        let (own_sum, other_sum) = (soften(&mut soft[..]), soften(&mut *teacher));
        // KL = Σ q (ln q - ln p); far below the largest logit both q and its product vanish
        let terms = soft.iter().zip(teacher.iter());
        let kl: f64 = terms
            .map(|(s, l)| {
                let (log_q, log_p) = (l - other_sum, s - own_sum);
                f64::from(log_q).exp() * f64::from(log_q - log_p)
            })
            .sum();
        exp_in_place(&mut soft, own_sum);
        exp_in_place(teacher, other_sum);
        exp_in_place(student, log_sum);
        student[token] -= 1.0;
        for ((d, p), q) in student.iter_mut().zip(&soft).zip(teacher.iter()) {
            *d = (1.0 - share) * *d + share * t * (p - q);
        }
        f64::from(1.0 - share) * hard + f64::from(share * t * t) * kl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let (student, teacher) = ([0.3f32, -1.2, 2.0, 0.1], [1.0f32, 0.2, -0.5, 0.4]);
        for how in [(1.0, 1.0), (2.0, 1.0), (3.0, 0.4), (1.0, 0.0)] {
            let how = Distillation { temperature: how.0, share: how.1 };
            let loss = |s: [f32; 4]| how.errors(&mut s.clone(), &mut teacher.clone(), 2);
            let mut grad = student;
            how.errors(&mut grad, &mut teacher.clone(), 2);
            for (i, got) in grad.iter().enumerate() {
                let at = |h: f32| loss(std::array::from_fn(|j| student[j] + if i == j { h } else { 0.0 }));
                let slope = (at(1e-2) - at(-1e-2)) / 2e-2;
                assert!((f64::from(*got) - slope).abs() < 2e-4, "{how:?} {i}: {got} {slope}");
            }
        }
    }

    #[test]
    fn a_student_that_is_the_teacher_has_no_divergence() {
        let row = [0.3f32, -1.2, 2.0, 0.1];
        let how = Distillation { temperature: 2.0, share: 1.0 };
        let mut grad = row;
        let loss = how.errors(&mut grad, &mut row.clone(), 0);
        assert!(loss.abs() < 1e-9 && grad.iter().all(|g| g.abs() < 1e-7), "{loss} {grad:?}");
        // two outcomes of 1/2 and 1/2 against 3/4 and 1/4: ½ ln(2/3) + ½ ln 2
        let loss = how.errors(&mut [3f32.ln() * 2.0, 0.0], &mut [0.0, 0.0], 0);
        let want = 4.0 * 0.5 * ((2.0f64 / 3.0).ln() + 2f64.ln());
        assert!((loss - want).abs() < 1e-6, "{loss} {want}");
    }
}
