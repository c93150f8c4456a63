//! Training texts: which of their tokens the loss counts, and how much.

use crate::model::ModelError;
use crate::tokenizer::{ChatTemplate, Message, Tokenizer};

/// Where a reasoning model's answer stops thinking.
const END_OF_THINKING: &str = "</think>";
const THINKING: &str = "<think>";

/// One training text: the loss counts only `tokens[answer_from..]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub tokens: Vec<u32>,
    /// Index of the first token of the answer, at least 1.
    pub answer_from: usize,
    /// How much each of `tokens[answer_from..]` counts, not below 0; empty: all the same.
    pub weights: Vec<f32>,
}

impl Sample {
    /// A text whose answer's tokens all count the same.
    #[must_use]
    pub fn new(tokens: Vec<u32>, answer_from: usize) -> Self {
        Self { tokens, answer_from, weights: Vec::new() }
    }

    /// A conversation and its answer as the model reads and writes them; the loss counts the answer and its end mark.
    ///
    /// # Errors
    /// [`ModelError::Input`] for a conversation that the template refuses or a vocabulary without its end mark.
    pub fn chat(
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
        asked: &[Message<'_>],
        answer: &str,
    ) -> Result<Self, ModelError> {
        let mut tokens = tokenizer.encode_chat(template, asked, true).map_err(|e| ModelError::input(e.to_string()))?;
        let answer_from = tokens.len();
        tokens.extend(tokenizer.encode(answer, false));
        let end = template.end_of_answer();
        let no_end = || ModelError::input(format!("the vocabulary has no `{end}`, which ends an answer"));
        tokens.push(tokenizer.id_of(end).ok_or_else(no_end)?);
        Ok(Self::new(tokens, answer_from))
    }

    /// The same sample with tokens of thinking counted `weight` times: 0 trains on the answer alone, 1 on thinking and answer
    /// alike. Thinking is what stands before and in `</think>` and the white space behind it, whether `<think>` is part
    /// of the answer or of the prompt; without that mark, everything from `<think>` on. A token across the border is
    /// thinking.
    ///
    /// # Errors
    /// [`ModelError::Input`] for a negative weight or one that is not finite.
    pub fn weigh_thinking(mut self, tokenizer: &Tokenizer, weight: f32) -> Result<Self, ModelError> {
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(ModelError::input(format!("the weight of thinking is {weight}, must be 0 or more")));
        }
        let pieces: Vec<_> = self.tokens[self.answer_from..].iter().map(|t| tokenizer.piece(*t, true)).collect();
        let thinking = thinking_bytes(&pieces.concat());
        if self.weights.is_empty() {
            self.weights = vec![1.0; pieces.len()];
        }
        let mut at = 0;
        for (piece, w) in pieces.iter().zip(&mut self.weights) {
            if thinking.contains(&at) {
                *w *= weight;
            }
            at += piece.len();
        }
        Ok(self)
    }

    /// How much token `i` of the answer counts.
    pub(super) fn weight(&self, i: usize) -> f32 {
        self.weights.get(i).copied().unwrap_or(1.0)
    }
    /// Sum of the weights.
    pub(super) fn total_weight(&self) -> f64 {
        let answer = self.tokens.len() - self.answer_from;
        if self.weights.is_empty() { answer as f64 } else { self.weights.iter().map(|w| f64::from(*w)).sum() }
    }
    /// Tokens that count.
    pub(super) fn counted(&self) -> usize {
        (0..self.tokens.len() - self.answer_from).filter(|i| self.weight(*i) > 0.0).count()
    }

    /// Refuses what no loss can be taken of.
    pub(super) fn check(&self, name: &str) -> Result<(), ModelError> {
        let (from, len) = (self.answer_from, self.tokens.len());
        if from == 0 || from >= len {
            return Err(ModelError::input(format!("{name}: the answer starts at token {from} of {len}")));
        }
        if !self.weights.is_empty() && self.weights.len() != len - from {
            let what = format!("{name}: {} weights for an answer of {} tokens", self.weights.len(), len - from);
            return Err(ModelError::input(what));
        }
        if let Some(w) = self.weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(ModelError::input(format!("{name}: a token has weight {w}, must be 0 or more")));
        }
        if self.counted() == 0 {
            return Err(ModelError::input(format!("{name}: no token of the answer counts")));
        }
        Ok(())
    }
}

/// Which bytes of an answer are thinking.
fn thinking_bytes(answer: &[u8]) -> std::ops::Range<usize> {
    let find = |mark: &str| answer.windows(mark.len()).position(|w| w == mark.as_bytes());
    match find(END_OF_THINKING) {
        Some(at) => {
            let end = at + END_OF_THINKING.len();
            let space = answer[end..].iter().take_while(|b| b.is_ascii_whitespace()).count();
            0..end + space
        }
        None => find(THINKING).map_or(0..0, |at| at..answer.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::byte_tokenizer;
    use super::*;

    #[test]
    fn a_chat_sample_is_the_prompt_the_answer_and_its_end() {
        let (template, asked) = (ChatTemplate::chat_ml(), [Message::user("How many?")]);
        let t = byte_tokenizer(&["<|im_start|>", "<|im_end|>"]);
        let sample = Sample::chat(&t, &template, &asked, "14<|im_end|>").unwrap();
        let prompt = t.encode_chat(&template, &asked, true).unwrap();
        assert_eq!((&sample.tokens[..sample.answer_from], sample.answer_from), (prompt.as_slice(), prompt.len()));
        let (end, answer) = sample.tokens[sample.answer_from..].split_last().unwrap();
        assert_eq!((*end, t.decode(answer).as_str()), (2, "14<|im_end|>"));
        assert!(!answer.contains(&2), "an answer cannot write its own end mark");
        let none = Sample::chat(&byte_tokenizer(&["<|im_start|>"]), &template, &asked, "14").unwrap_err().to_string();
        assert!(none.contains("<|im_end|>"), "{none}");
        assert!(Sample::chat(&t, &template, &[], "14").is_err());
    }

    #[test]
    fn thinking_is_weighed_and_the_answer_is_not() {
        let t = byte_tokenizer(&["<|im_start|>", "<|im_end|>"]);
        let template = ChatTemplate::chat_ml();
        let sample = |answer: &str| Sample::chat(&t, &template, &[Message::user("?")], answer).unwrap();
        let counted = |answer: &str, weight: f32| {
            let s = sample(answer).weigh_thinking(&t, weight).unwrap();
            let text: Vec<u32> = s.tokens[s.answer_from..].to_vec();
            let kept: Vec<u32> = text.iter().zip(&s.weights).filter(|(_, w)| **w == 1.0).map(|(t, _)| *t).collect();
            (t.decode(&kept), s.weights.iter().sum::<f32>())
        };
        assert_eq!(counted("<think>2+2</think>\n\n4", 0.0), ("4".to_owned(), 2.0), "4 and the end mark");
        // 20 bytes of thinking
        assert_eq!(counted("<think>2+2</think>\n\n4", 0.5), ("4".to_owned(), 2.0 + 10.0));
        assert_eq!(counted("2+2</think>4", 0.0).0, "4", "the mark that opens may be in the prompt");
        assert_eq!(counted("plain", 0.0), ("plain".to_owned(), 6.0));
        assert_eq!(counted("so<think>2+", 0.0).0, "so", "thinking that was cut off");
        assert_eq!(counted("<think>2+2</think>4", 1.0).0, "<think>2+2</think>4");
        assert!(sample("4").weigh_thinking(&t, -1.0).unwrap_err().to_string().contains("-1"));
    }

    #[test]
    fn samples_without_a_loss_are_refused() {
        let refuse = |weights: Vec<f32>| {
            Sample { tokens: vec![1, 2, 3], answer_from: 1, weights }.check("sample 3").unwrap_err().to_string()
        };
        assert!(refuse(vec![1.0]).contains("sample 3: 1 weights for an answer of 2"));
        assert!(refuse(vec![0.0, 0.0]).contains("no token"));
        assert!(refuse(vec![1.0, f32::NAN]).contains("NaN"));
        assert!(Sample::new(vec![1, 2], 2).check("s").unwrap_err().to_string().contains("token 2 of 2"));
    }
}
