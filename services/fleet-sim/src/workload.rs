//! What users ask and what is retrieved for it.

use flywheel_sdk::IndexSnapshot;
use flywheel_types::{ChunkId, Digest, TemplateId};
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A question a user may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Unique within the workload; key of the retrieval memo.
    pub id: String,
    pub text: Arc<str>,
    /// Language prefix of locales that ask it, for example `en`.
    pub lang: String,
    /// Text that a right answer contains.
    pub expected: String,
    /// Chunk that holds the answer.
    pub chunk: Option<ChunkId>,
}

/// One question asked on a phone now.
#[derive(Debug, Clone)]
pub struct Ask {
    pub template: TemplateId,
    pub question: Arc<Question>,
    /// Chunks that go into the prompt.
    pub k: usize,
}

/// Who asks what. Must depend on its arguments only.
pub trait Workload: Send + Sync {
    /// Questions of phone `index` in this tick. `rng` belongs to (phone, tick).
    fn asks(&self, index: usize, locale: &str, tick: u64, rng: &mut ChaCha8Rng) -> Vec<Ask>;
}

/// Questions drawn uniformly among those of the phone's language.
pub struct UniformWorkload {
    pub questions: Vec<Arc<Question>>,
    /// Template and chunks in the prompt, drawn uniformly.
    pub templates: Vec<(TemplateId, usize)>,
    /// Mean number of questions per phone and tick.
    pub per_tick: f64,
}

impl Workload for UniformWorkload {
    fn asks(&self, _index: usize, locale: &str, _tick: u64, rng: &mut ChaCha8Rng) -> Vec<Ask> {
        let mine: Vec<&Arc<Question>> = self.questions.iter().filter(|q| locale.starts_with(q.lang.as_str())).collect();
        if mine.is_empty() || self.templates.is_empty() {
            return Vec::new();
        }
        let whole = self.per_tick.max(0.0).floor();
        let count = whole as usize + usize::from(rng.random_bool((self.per_tick.max(0.0) - whole).clamp(0.0, 1.0)));
        (0..count)
            .map(|_| {
                let (template, k) = &self.templates[rng.random_range(0..self.templates.len())];
                let question = mine[rng.random_range(0..mine.len())];
                Ask { template: template.clone(), question: Arc::clone(question), k: *k }
            })
            .collect()
    }
}

/// Ranked chunk ids with scores, best first.
pub type Ranking = Arc<Vec<(ChunkId, f32)>>;

/// Ranks chunks for a question; what real apps do with an embedder or BM25. Must depend on its arguments only.
pub trait Retriever: Send + Sync {
    fn rank(&self, index: &IndexSnapshot, question: &Question) -> Vec<(ChunkId, f32)>;
}

/// Rankings by (index state, question): all phones with the same index share one.
#[derive(Default)]
pub struct RankingMemo(Mutex<HashMap<(Digest, String), Ranking>>);

/// More entries than this and the memo starts over (old index states are never asked again).
const MAX_RANKINGS: usize = 50_000;

impl RankingMemo {
    /// The ranking, computed once.
    pub fn rank(&self, retriever: &dyn Retriever, index: &IndexSnapshot, question: &Question) -> Ranking {
        let key = (index.fingerprint(), question.id.clone());
        if let Some(found) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Arc::clone(found);
        }
        let made: Ranking = Arc::new(retriever.rank(index, question));
        let mut memo = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if memo.len() >= MAX_RANKINGS {
            memo.clear();
        }
        Arc::clone(memo.entry(key).or_insert(made))
    }
}
