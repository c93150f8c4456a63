//! The rows of a pass: the beginning that all its texts have in common once, then what is each text's own.

use super::{Sample, attention::Span, loss::Prediction};

/// What stands in which row.
pub(super) struct Layout {
    pub spans: Vec<Span>,
    pub tokens: Vec<u32>,
    /// Position of each row in its text.
    pub positions: Vec<usize>,
    /// What the loss counts; nothing with weight 0.
    pub predictions: Vec<Prediction>,
}

impl Layout {
    pub fn new(samples: &[&Sample]) -> Self {
        let shared = shared(samples);
        let mut layout = Self { spans: Vec::new(), tokens: Vec::new(), positions: Vec::new(), predictions: Vec::new() };
        if let Some(first) = samples.first().filter(|_| shared > 0) {
            layout.push(0, first, 0..shared);
        }
        for sample in samples {
            let before = layout.tokens.len() - shared; // row of a token of the text: its position and this
            layout.push(shared, sample, shared..sample.tokens.len());
            let answer = sample.answer_from..sample.tokens.len();
            layout.predictions.extend(
                answer.enumerate().filter(|(n, _)| sample.weight(*n) > 0.0).map(|(n, i)| Prediction {
                    row: before + i - 1,
                    token: sample.tokens[i],
                    weight: sample.weight(n),
                }),
            );
        }
        layout
    }

    fn push(&mut self, shared: usize, sample: &Sample, part: std::ops::Range<usize>) {
        let row = self.tokens.len();
        self.spans.push(Span { shared, own: row..row + part.len() });
        self.tokens.extend_from_slice(&sample.tokens[part.clone()]);
        self.positions.extend(part);
    }
}

/// Rows that these samples take in one pass.
pub(super) fn rows(samples: &[&Sample]) -> usize {
    let shared = shared(samples);
    shared + samples.iter().map(|s| s.tokens.len() - shared).sum::<usize>()
}

/// Tokens with which all samples begin; the row that predicts a text's first answer token stays its own.
fn shared(samples: &[&Sample]) -> usize {
    let [first, others @ ..] = samples else { return 0 };
    if others.is_empty() {
        return 0;
    }
    let most = samples.iter().map(|s| s.answer_from - 1).min().unwrap_or(0);
    let common = |s: &&Sample| first.tokens.iter().zip(&s.tokens).take_while(|(a, b)| a == b).count();
    others.iter().map(common).min().unwrap_or(0).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(tokens: &[u32], answer_from: usize) -> Sample {
        Sample::new(tokens.to_vec(), answer_from)
    }

    #[test]
    fn the_common_beginning_is_laid_out_once() {
        let (a, b) = (sample(&[7, 8, 9, 1, 2], 4), sample(&[7, 8, 9, 3], 3));
        let l = Layout::new(&[&a, &b]);
        // at most 2 rows are shared: row 2 of `b` predicts its first answer token
        assert_eq!(l.tokens, [7, 8, 9, 1, 2, 9, 3]);
        assert_eq!(l.positions, [0, 1, 2, 3, 4, 2, 3]);
        let spans: Vec<_> = l.spans.iter().map(|s| (s.shared, s.own.clone())).collect();
        assert_eq!(spans, [(0, 0..2), (2, 2..5), (2, 5..7)]);
        let predictions: Vec<_> = l.predictions.iter().map(|p| (p.row, p.token)).collect();
        assert_eq!(predictions, [(3, 2), (5, 3)]);
        assert_eq!(rows(&[&a, &b]), 7);
    }

    #[test]
    fn one_text_and_texts_without_a_common_beginning_share_nothing() {
        let (a, b) = (sample(&[7, 8, 9], 1), sample(&[7, 8, 9], 2));
        assert_eq!((rows(&[&a]), rows(&[&a, &b]), rows(&[])), (3, 6, 0));
        assert_eq!(Layout::new(&[&a, &b]).spans.len(), 2);
    }
}
