//! The world of the story: what customers ask, how they judge, how phones retrieve, and the real model that answers.

use super::kb::Fact;
use super::model::Engine;
use super::prompt;
use super::repair::CORRECTED;
use anyhow::{Context, Result, anyhow};
use fleet_sim::{
    Ask, Behaviour, Brain, BrainAnswer, BrainAsk, Honest, Judgement, LoadTrial, Question, RandomRejecter, Retriever,
    Spammer, Verdict, Workload,
};
use flywheel_inference::encoder::Encoder;
use flywheel_sdk::{IndexSnapshot, InstalledBundle};
use flywheel_types::{ChunkId, Digest, LabelKind, TemplateId};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Spam accounts and people who reject at random, by phone index.
pub const SPAMMERS: usize = 20;
const RANDOM_REJECTERS: usize = 40;

/// What customers ask about.
pub struct Customers {
    asked: Vec<Asked>,
    /// Facts drawn more often stand more often in this list.
    popular: Vec<usize>,
    /// Templates in use: the first `n` of [`prompt::ALL`].
    templates: Arc<AtomicUsize>,
    /// Mean questions per phone and tick.
    per_tick: f64,
}

/// A fact as customers ask about it.
struct Asked {
    /// The same question in three phrasings.
    phrasings: Vec<Arc<Question>>,
    /// Policies and fees are asked on the help pages, which use two notes; the rest is about products.
    help: bool,
    /// Kitchen pages have a search box: every phrasing is asked there.
    search: bool,
}

impl Asked {
    fn new(f: &Fact) -> Result<Self> {
        let chunk = ChunkId::new(f.chunk_id.as_str())?;
        let phrasing = |(i, text): (usize, &String)| {
            Arc::new(Question {
                id: format!("{}#{i}", f.chunk_id),
                text: text.as_str().into(),
                lang: f.lang.clone(),
                expected: f.value.clone(),
                chunk: Some(chunk.clone()),
            })
        };
        let phrasings = f.questions.iter().enumerate().map(phrasing).collect();
        Ok(Self { phrasings, help: f.collection == "policy", search: f.collection == CORRECTED })
    }

    /// Template and phrasing of one question.
    fn ask(&self, templates: usize, rng: &mut ChaCha8Rng) -> (prompt::Template, &Arc<Question>) {
        let (roll, any) = (rng.random::<f64>(), rng.random_range(0..self.phrasings.len()));
        if self.help {
            (if roll < 0.85 { prompt::PAIR } else { prompt::SHORT }, &self.phrasings[0])
        } else if templates > 2 && self.phrasings[0].lang == "en" && roll < 0.6 {
            (prompt::NOTES, &self.phrasings[if self.search { any } else { 0 }])
        } else {
            (prompt::SHORT, &self.phrasings[0])
        }
    }
}

impl Customers {
    pub fn new(facts: &[Fact], templates: Arc<AtomicUsize>, per_tick: f64) -> Result<Self> {
        let popular =
            (0..facts.len()).flat_map(|i| std::iter::repeat_n(i, if facts[i].role.is_some() { 3 } else { 1 }));
        let asked = facts.iter().map(Asked::new).collect::<Result<_>>()?;
        Ok(Self { asked, popular: popular.collect(), templates, per_tick })
    }
}

impl Workload for Customers {
    fn asks(&self, _index: usize, locale: &str, _tick: u64, rng: &mut ChaCha8Rng) -> Vec<Ask> {
        let whole = self.per_tick.floor() as usize;
        let n = whole + usize::from(rng.random_bool(self.per_tick.fract()));
        let templates = self.templates.load(Ordering::Relaxed);
        (0..n)
            .filter_map(|_| {
                let asked = &self.asked[self.popular[rng.random_range(0..self.popular.len())]];
                let (template, question) = asked.ask(templates, rng);
                if !locale.starts_with(question.lang.as_str()) && question.lang != "en" {
                    return None; // people ask in their own language; everybody's phone also gets English questions
                }
                Some(Ask { template: TemplateId::new(template.id).ok()?, question: question.clone(), k: template.k })
            })
            .collect()
    }
}

/// A customer: rejects wrong answers, and on a topic that annoys people also many right ones.
struct Customer {
    honest: Honest,
    hard: Arc<Vec<ChunkId>>,
}

impl Behaviour for Customer {
    fn judge(&self, seen: &Judgement<'_>, rng: &mut ChaCha8Rng) -> Option<Verdict> {
        let annoying = seen.question.chunk.as_ref().is_some_and(|c| self.hard.contains(c));
        if annoying && seen.is_right() && rng.random_bool(0.3) {
            return Some(Verdict { label: LabelKind::Rejected, reason: None, later: false });
        }
        self.honest.judge(seen, rng)
    }
}

/// Phone index to its user.
pub type Users = Box<dyn Fn(usize) -> Arc<dyn Behaviour>>;

/// Who sits behind phone `i`.
pub fn behaviour(facts: &[Fact]) -> Result<Users> {
    let ids = |role: &str| -> Result<Vec<ChunkId>> {
        facts.iter().filter(|f| f.is(role)).map(|f| Ok(ChunkId::new(f.chunk_id.as_str())?)).collect()
    };
    let target = ids("spam")?.pop().context("the knowledge base has no spam target")?;
    let hard = Arc::new(ids("hard")?);
    let spammer: Arc<dyn Behaviour> = Arc::new(Spammer { target });
    let random: Arc<dyn Behaviour> = Arc::new(RandomRejecter { rate: 0.3 });
    let honest = Honest { says_right: 0.1, says_wrong: 0.9, mistake: 0.02 };
    let customer: Arc<dyn Behaviour> = Arc::new(Customer { honest, hard });
    Ok(Box::new(move |i| {
        if i < SPAMMERS {
            spammer.clone()
        } else if i < RANDOM_REJECTERS {
            random.clone()
        } else {
            customer.clone()
        }
    }))
}

/// Retrieval as phones do it: cosine of question and chunk vectors.
pub struct Dense {
    /// Question id → vector.
    vectors: HashMap<String, Vec<f32>>,
}

impl Dense {
    pub fn new(encoder: &Encoder, customers: &Customers) -> Self {
        let all: Vec<&Arc<Question>> = customers.asked.iter().flat_map(|a| &a.phrasings).collect();
        let texts: Vec<&str> = all.iter().map(|q| &*q.text).collect();
        let vectors = encoder.embed(&texts);
        Self { vectors: all.iter().map(|q| q.id.clone()).zip(vectors).collect() }
    }
}

/// Candidates per question: hidden ones make room for the next.
const CANDIDATES: usize = 8;

impl Retriever for Dense {
    fn rank(&self, index: &IndexSnapshot, question: &Question) -> Vec<(ChunkId, f32)> {
        self.vectors.get(&question.id).map(|v| index.nearest(v, CANDIDATES)).unwrap_or_default()
    }
}

/// The real model, memoised per bundle and prompt.
#[derive(Default)]
pub struct RealModel {
    files: Mutex<HashMap<Digest, PathBuf>>,
    inner: Arc<Mutex<Memo>>,
}

#[derive(Default)]
struct Memo {
    answers: HashMap<(Digest, String), BrainAnswer>,
    /// One model in memory: bundles change rarely.
    engine: Option<(Digest, Engine)>,
}

fn user_text(ask: &BrainAsk) -> String {
    let template = prompt::Template::named(ask.template.as_str());
    template.user_text(ask.chunks.iter().map(|c| c.text.as_str()), &ask.question)
}

impl Memo {
    fn fill(&mut self, bundle: Digest, file: &Path, mut users: Vec<String>) -> Result<()> {
        users.sort_unstable();
        users.dedup();
        users.retain(|u| !self.answers.contains_key(&(bundle, u.clone())));
        if users.is_empty() {
            self.engine = None; // nothing new is asked: its memory serves others, such as a training
            return Ok(());
        }
        if self.engine.as_ref().is_none_or(|(b, _)| *b != bundle) {
            self.engine = None; // free the old one first
            self.engine = Some((bundle, Engine::open(file)?));
        }
        let Some((_, engine)) = &self.engine else { return Ok(()) };
        let made = engine.answer(&users)?;
        self.answers.extend(users.into_iter().map(|u| (bundle, u)).zip(made));
        Ok(())
    }
}

#[async_trait::async_trait]
impl Brain for RealModel {
    async fn answer(&self, asks: &[BrainAsk]) -> Result<Vec<BrainAnswer>> {
        let mut by_bundle: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
        for a in asks {
            by_bundle.entry(a.bundle).or_default().push(user_text(a));
        }
        for (bundle, users) in by_bundle {
            let file = {
                let files = self.files.lock().map_err(|_| anyhow!("poisoned"))?;
                files.get(&bundle).cloned().with_context(|| format!("no phone loaded bundle {bundle}"))?
            };
            let inner = self.inner.clone();
            tokio::task::spawn_blocking(move || {
                inner.lock().map_err(|_| anyhow!("poisoned"))?.fill(bundle, &file, users)
            })
            .await??;
        }
        let memo = self.inner.lock().map_err(|_| anyhow!("poisoned"))?;
        asks.iter()
            .map(|a| memo.answers.get(&(a.bundle, user_text(a))).cloned().context("an answer is missing"))
            .collect()
    }

    fn load(&self, bundle: &InstalledBundle, _class: &str, _roll: f64) -> LoadTrial {
        match (self.files.lock(), bundle.files.first()) {
            (Ok(mut files), Some(file)) => {
                files.entry(bundle.bundle).or_insert_with(|| file.clone());
                LoadTrial::Works
            }
            _ => LoadTrial::Fails { reason: "no_file".into(), out_of_memory: false },
        }
    }
}
