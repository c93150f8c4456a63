//! The evaluation sets of the story about a collection that trains nothing: every phrasing with the three notes that
//! retrieval finds, and one phrasing with the right note alone.

use super::kb::Fact;
use super::prompt::{NOTES, user_text};
use flywheel_inference::encoder::Encoder;
use serde::Serialize;
use std::collections::BTreeMap;

/// The held-out questions are about this collection.
pub const HELD_OUT: &str = "sound";

/// Ranks facts for a question as phones do.
pub struct Ranker<'a> {
    pub facts: &'a [Fact],
    texts: Vec<Vec<f32>>,
    questions: BTreeMap<&'a str, Vec<f32>>,
}

impl<'a> Ranker<'a> {
    pub fn new(facts: &'a [Fact], encoder: &Encoder) -> Self {
        let texts = encoder.embed(&facts.iter().map(|f| f.text.clone()).collect::<Vec<_>>());
        let asked: Vec<&str> = facts.iter().flat_map(|f| f.questions.iter().map(String::as_str)).collect();
        let vectors = encoder.embed(&asked.iter().map(|q| (*q).to_owned()).collect::<Vec<_>>());
        Self { facts, texts, questions: asked.into_iter().zip(vectors).collect() }
    }

    /// The `k` nearest facts, best first.
    pub fn top(&self, question: &str, k: usize) -> Vec<&'a Fact> {
        let Some(asked) = self.questions.get(question) else { return Vec::new() };
        let dot = |v: &[f32]| v.iter().zip(asked).map(|(a, b)| a * b).sum::<f32>();
        let mut scored: Vec<(f32, usize)> = self.texts.iter().enumerate().map(|(i, v)| (dot(v), i)).collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.iter().take(k).map(|(_, i)| &self.facts[*i]).collect()
    }
}

/// One question, as `PUT /v1/eval-sets/…` takes it.
#[derive(Debug, Clone, Serialize)]
pub struct Item {
    pub id: String,
    pub prompt: String,
    pub expect: String,
    /// The chunk it is about.
    pub cluster: String,
}

/// Both sets.
pub struct HeldOut {
    pub hard: Vec<Item>,
    /// What a better model must not forget.
    pub easy: Vec<Item>,
}

impl HeldOut {
    pub fn new(ranker: &Ranker<'_>) -> Self {
        let (mut hard, mut easy) = (Vec::new(), Vec::new());
        for f in ranker.facts.iter().filter(|f| f.collection == HELD_OUT) {
            let item = |v: usize, k: usize, prompt: String| Item {
                id: format!("{}#{v}k{k}", f.chunk_id),
                prompt,
                expect: f.value.clone(),
                cluster: f.chunk_id.clone(),
            };
            for (v, question) in f.questions.iter().enumerate() {
                let notes = ranker.top(question, NOTES.k).into_iter().map(|n| n.text.as_str());
                hard.push(item(v, NOTES.k, NOTES.user_text(notes, question)));
            }
            easy.push(item(0, 1, user_text([f.text.as_str()], &f.questions[0])));
        }
        Self { hard, easy }
    }
}
