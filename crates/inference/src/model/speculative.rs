//! Speculative decoding: a small draft model proposes tokens, the target model checks several of them in one pass.
//!
//! A proposed token `x`, drawn from the draft's distribution `q`, is kept with probability `min(1, p(x) / q(x))`, where
//! `p` is the target's; the first one that is not kept is replaced by a draw from `max(0, p - q)`, normalised. So every
//! token has exactly the target's distribution (Leviathan, Kalman and Matias 2023, arXiv 2211.17192), whatever the draft
//! says. Both distributions are those after the sampling steps. Without randomness the text is that of plain decoding.

use super::{
    Decoder, GenerateOptions, Generated, ModelError, Sampling, Stop, forward::Step, kv::Sequence, sample::draw,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Prompt tokens processed in one pass.
const PREFILL_TOKENS: usize = 512;

/// How well the draft model guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Speculation {
    /// Tokens that the draft model proposed.
    pub drafted: usize,
    /// Those of them that were kept.
    pub accepted: usize,
    /// Passes of the target model after the prompt.
    pub passes: usize,
}

impl Speculation {
    /// Share of the proposed tokens that were kept.
    #[must_use]
    pub fn acceptance(&self) -> f64 {
        self.accepted as f64 / self.drafted.max(1) as f64
    }
}

/// Tokens and their probabilities.
type Distribution = Vec<(u32, f32)>;

/// One of the two models at work on a text.
struct Runner<'a> {
    decoder: &'a Decoder,
    cache: Sequence,
}

impl<'a> Runner<'a> {
    fn new(decoder: &'a Decoder, options: &GenerateOptions) -> Self {
        Self { decoder, cache: decoder.new_sequence_of(options.cache) }
    }

    /// Processes what is new of `text` and returns the distributions of the token after each of its last `wanted`
    /// tokens.
    fn run(&mut self, text: &[u32], wanted: usize, sampling: &Sampling) -> Result<Vec<Distribution>, ModelError> {
        let config = self.decoder.config();
        let mut rows: Vec<f32> = Vec::new();
        for piece in text[self.cache.len()..].chunks(PREFILL_TOKENS) {
            rows.extend(self.decoder.advance(&mut [Step { cache: &mut self.cache, tokens: piece }]));
        }
        let rows = &rows[rows.len() - wanted * config.width..];
        let mut logits = self.decoder.logits_of(rows, wanted)?;
        let first = text.len() - wanted + 1;
        let rows = logits.chunks_exact_mut(config.vocab).enumerate();
        Ok(rows.map(|(i, row)| sampling.distribution(row, &text[..first + i])).collect())
    }
}

impl Decoder {
    /// Continues one prompt with the help of `draft`, which proposes `ahead` tokens at a time. The distribution of the
    /// text is that of [`Decoder::generate_batch`]; without randomness the text is the same.
    ///
    /// # Errors
    /// As [`Decoder::generate_batch`], and [`ModelError::Input`] for a draft model with another vocabulary, or `ahead`
    /// of 0.
    pub fn generate_speculative(
        &self,
        draft: &Self,
        prompt: &[u32],
        ahead: usize,
        options: &GenerateOptions,
    ) -> Result<(Generated, Speculation), ModelError> {
        options.sampling.check()?;
        self.check_tokens(prompt, "the prompt")?;
        let (ours, theirs) = (self.config(), draft.config());
        if ours.vocab != theirs.vocab {
            let what = format!("a draft model of {} tokens for a vocabulary of {}", theirs.vocab, ours.vocab);
            return Err(ModelError::input(what));
        }
        if ahead == 0 || options.max_new_tokens == 0 {
            return Err(ModelError::input("ahead and max_new_tokens must be at least 1"));
        }
        let context = ours.context.min(theirs.context);
        let mut work = Work {
            target: Runner::new(self, options),
            draft: Runner::new(draft, options),
            sampling: options.sampling,
            rng: ChaCha8Rng::seed_from_u64(options.sampling.seed),
            text: prompt.to_vec(),
            done: Speculation::default(),
        };
        loop {
            let new = work.text.len() - prompt.len();
            // A pass brings one token more than are proposed.
            let most = (options.max_new_tokens - new - 1).min(context.saturating_sub(work.text.len() + 1));
            let from = work.text.len();
            work.pass(ahead.min(most))?;
            let found = work.text[from..].iter().position(|t| options.stop_ids.contains(t));
            let (end, stop) = match found {
                Some(at) => (from + at, Stop::Token(work.text[from + at])),
                // As in plain decoding the last token of a full context is one that nothing can follow.
                None if work.text.len() - prompt.len() >= options.max_new_tokens || work.text.len() > ours.context => {
                    (work.text.len(), Stop::Length)
                }
                None => continue,
            };
            let tokens = work.text[prompt.len()..end].to_vec();
            return Ok((Generated { tokens, stop }, work.done));
        }
    }
}

struct Work<'a> {
    target: Runner<'a>,
    draft: Runner<'a>,
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// Prompt and what was generated; the last token is in no cache yet.
    text: Vec<u32>,
    done: Speculation,
}

impl Work<'_> {
    /// Appends at least one token to the text, at most `ahead + 1`.
    fn pass(&mut self, ahead: usize) -> Result<(), ModelError> {
        let known = self.text.len();
        let mut proposed = self.text.clone();
        let mut guesses = Vec::with_capacity(ahead);
        for _ in 0..ahead {
            let q = self.draft.run(&proposed, 1, &self.sampling)?.remove(0);
            proposed.push(draw(&q, &mut self.rng));
            guesses.push(q);
        }
        let wanted = self.target.run(&proposed, ahead + 1, &self.sampling)?;
        self.done.passes += 1;
        self.done.drafted += ahead;
        for (i, p) in wanted.iter().enumerate() {
            let Some(q) = guesses.get(i) else {
                self.text.push(draw(p, &mut self.rng));
                break;
            };
            let token = proposed[known + i];
            if self.keep(p, q, token) {
                self.text.push(token);
                self.done.accepted += 1;
            } else {
                self.text.push(draw(&residual(p, q), &mut self.rng));
                break;
            }
        }
        self.target.cache.truncate(self.text.len() - 1);
        self.draft.cache.truncate(self.text.len() - 1);
        Ok(())
    }

    fn keep(&mut self, p: &Distribution, q: &Distribution, token: u32) -> bool {
        let (p, q) = (probability(p, token), probability(q, token));
        // `q` is not 0: the token was drawn from it. Without randomness both are 0 or 1.
        p >= q || self.rng.random::<f32>() * q < p
    }
}

fn probability(of: &Distribution, token: u32) -> f32 {
    of.iter().find(|(t, _)| *t == token).map_or(0.0, |(_, p)| *p)
}

/// `max(0, p - q)`, normalised.
fn residual(p: &Distribution, q: &Distribution) -> Distribution {
    let q: std::collections::HashMap<u32, f32> = q.iter().copied().collect();
    let mut left: Distribution = p.iter().map(|(t, v)| (*t, (v - q.get(t).copied().unwrap_or(0.0)).max(0.0))).collect();
    let total: f32 = left.iter().map(|(_, v)| v).sum();
    if total > 0.0 {
        left.iter_mut().for_each(|(_, v)| *v /= total);
        left
    } else {
        // Equal up to rounding: then nothing is ever rejected but by rounding.
        p.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{some_tokens, tiny, tiny_file_with};
    use super::super::{Arch, Decoder};
    use super::*;

    /// A model that is near another: its embedding is a little different.
    fn near(arch: Arch, by: f32) -> Decoder {
        let file = tiny_file_with(arch, |_, t| {
            t[0].2.iter_mut().enumerate().for_each(|(i, w)| *w += by * ((i * 37 % 19) as f32 / 9.0 - 1.0));
        });
        Decoder::load(&file).unwrap()
    }

    #[test]
    fn without_randomness_the_text_is_that_of_plain_decoding() {
        let target = tiny(Arch::Llama);
        for (draft, least) in [(target.clone(), 1.0), (near(Arch::Llama, 0.1), 0.0), (tiny(Arch::Qwen3), 0.0)] {
            for ahead in [1, 3, 7] {
                for (n, new, stop_ids) in [(40, 30, vec![]), (5, 30, vec![7, 9]), (240, 40, vec![]), (70, 1, vec![])] {
                    let options = GenerateOptions { max_new_tokens: new, stop_ids, ..GenerateOptions::default() };
                    let prompt = some_tokens(n, 3);
                    let want = target.generate_batch(std::slice::from_ref(&prompt), &options).unwrap().remove(0);
                    let (got, done) = target.generate_speculative(&draft, &prompt, ahead, &options).unwrap();
                    assert_eq!(got, want, "{n} {ahead}");
                    assert!(done.acceptance() >= least || done.drafted == 0, "{done:?}");
                }
            }
        }
    }

    /// First two tokens after a prompt, many times, against the target's own probabilities: chi-squared.
    #[test]
    fn with_randomness_tokens_have_the_targets_distribution() {
        let (target, draft) = (tiny(Arch::Llama), near(Arch::Llama, 0.3));
        let sampling = Sampling { temperature: 1.3, top_k: 6, ..Sampling::GREEDY };
        let prompt = some_tokens(20, 8);
        let options = |seed| GenerateOptions {
            max_new_tokens: 2,
            sampling: Sampling { seed, ..sampling },
            ..GenerateOptions::default()
        };
        let mut counts = std::collections::BTreeMap::<Vec<u32>, f64>::new();
        let (runs, mut rejected) = (6000u64, 0);
        for seed in 0..runs {
            let (text, done) = target.generate_speculative(&draft, &prompt, 1, &options(seed)).unwrap();
            *counts.entry(text.tokens).or_default() += 1.0;
            rejected += done.drafted - done.accepted;
        }
        assert!(rejected as u64 > runs / 20, "the draft is wrong often enough to matter: {rejected}");
        let mut runner = Runner::new(&target, &options(0));
        let first = runner.run(&prompt, 1, &sampling).unwrap().remove(0);
        let (mut chi2, mut cells, mut expected) = (0.0, 0, 0.0);
        for (a, pa) in first {
            let mut text = prompt.clone();
            text.push(a);
            runner.cache.truncate(prompt.len());
            for (b, pb) in runner.run(&text, 1, &sampling).unwrap().remove(0) {
                let want = f64::from(pa) * f64::from(pb) * runs as f64;
                let got = counts.remove(&vec![a, b]).unwrap_or(0.0);
                expected += want;
                if want >= 5.0 {
                    chi2 += (got - want).powi(2) / want;
                    cells += 1;
                }
            }
        }
        assert!(counts.is_empty(), "tokens that the target would never choose: {counts:?}");
        assert!((expected - runs as f64).abs() < 1.0 && cells > 15);
        // Mean n - 1, standard deviation sqrt(2 (n - 1)): four of them is one in 10,000, and seeds are fixed.
        let free = f64::from(cells - 1);
        assert!(chi2 < free + 4.0 * (2.0 * free).sqrt(), "chi-squared {chi2} of {cells} cells");
    }

    #[test]
    fn a_residual_is_what_the_draft_leaves() {
        let left = residual(&vec![(1, 0.5), (2, 0.3), (3, 0.2)], &vec![(2, 0.6), (1, 0.2), (9, 0.2)]);
        assert_eq!(left.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [1, 2, 3]);
        assert!((left[0].1 - 0.6).abs() < 1e-6 && left[1].1 == 0.0 && (left[2].1 - 0.4).abs() < 1e-6);
    }

    #[test]
    fn senseless_input_is_refused() {
        let target = tiny(Arch::Llama);
        let small = tiny_file_with(Arch::Llama, |_, t| {
            (t[0].1[1], t[0].2) = (49, t[0].2[..49 * 24].to_vec());
        });
        let small = Decoder::load(&small).unwrap();
        let options = GenerateOptions::default();
        let refused = target.generate_speculative(&small, &[1, 2], 3, &options).unwrap_err().to_string();
        assert!(refused.contains("49") && refused.contains("50"), "{refused}");
        assert!(target.generate_speculative(&target, &[1, 2], 0, &options).is_err());
    }
}
