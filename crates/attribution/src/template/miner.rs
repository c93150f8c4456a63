//! A Drain-style miner (He et al. 2017): a prefix tree over length and first tokens, then the most similar cluster;
//! differing tokens become wildcards. Bounded: least recently used clusters are forgotten, ids are never reused.

use super::mask::{WILD, mask, tokens};
use crate::hash::text_hash;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Settings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MinerConfig {
    /// Leading tokens that must agree (tree depth).
    pub prefix_tokens: usize,
    /// Share of equal tokens needed to join a cluster.
    pub similarity: f64,
    /// Clusters kept.
    pub max_clusters: usize,
    /// Tokens of a prompt that are looked at.
    pub max_tokens: usize,
}

impl Default for MinerConfig {
    fn default() -> Self {
        Self { prefix_tokens: 1, similarity: 0.5, max_clusters: 10_000, max_tokens: 256 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Cluster {
    tokens: Vec<String>,
    count: u64,
    last_used: u64,
    leaf: u64,
}

/// What became of one prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mined {
    /// Stable id, never reused: `mined-<n>`.
    pub template_id: String,
    /// A new cluster was opened.
    pub created: bool,
    /// The template's text changed from this to [`TemplateMiner::text`]; history keeps pointing at the id.
    pub changed_from: Option<String>,
    /// The cluster that was forgotten to make room.
    pub forgotten: Option<String>,
}

/// Online template miner; serialisable.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TemplateMiner {
    config: MinerConfig,
    clusters: BTreeMap<u64, Cluster>,
    /// Tree leaf → clusters.
    leaves: BTreeMap<u64, Vec<u64>>,
    next_id: u64,
    clock: u64,
}

impl TemplateMiner {
    #[must_use]
    pub fn new(config: MinerConfig) -> Self {
        Self { config, ..Self::default() }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.clusters.len()
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clusters.is_empty()
    }

    /// Template text of an id, wildcards as `<*>`; `None` when unknown or forgotten. Show it only when enough
    /// distinct devices sent it.
    #[must_use]
    pub fn text(&self, template_id: &str) -> Option<String> {
        let id = template_id.strip_prefix("mined-")?.parse().ok()?;
        self.clusters.get(&id).map(|c| c.tokens.join(" "))
    }

    /// Assigns a prompt to its template.
    pub fn observe(&mut self, prompt: &str) -> Mined {
        let mut words = tokens(&mask(prompt));
        words.truncate(self.config.max_tokens);
        self.clock += 1;
        let leaf = self.leaf(&words);
        let found = self.best(leaf, &words);
        if let Some(id) = found
            && let Some(c) = self.clusters.get_mut(&id)
        {
            let before = c.tokens.join(" ");
            for (t, w) in c.tokens.iter_mut().zip(&words) {
                if t != w {
                    WILD.clone_into(t);
                }
            }
            c.count += 1;
            c.last_used = self.clock;
            let changed = c.tokens.join(" ") != before;
            return Mined {
                template_id: format!("mined-{id}"),
                created: false,
                changed_from: changed.then_some(before),
                forgotten: None,
            };
        }
        let forgotten = (self.clusters.len() >= self.config.max_clusters.max(1)).then(|| self.forget()).flatten();
        self.next_id += 1;
        let id = self.next_id;
        self.clusters.insert(id, Cluster { tokens: words, count: 1, last_used: self.clock, leaf });
        self.leaves.entry(leaf).or_default().push(id);
        Mined {
            template_id: format!("mined-{id}"),
            created: true,
            changed_from: None,
            forgotten: forgotten.map(|f| format!("mined-{f}")),
        }
    }

    /// Leaf of the tree: length and leading tokens; tokens with digits count as wildcards.
    fn leaf(&self, words: &[String]) -> u64 {
        let mut key = words.len().to_string();
        for w in words.iter().take(self.config.prefix_tokens) {
            key.push('\u{1f}');
            key.push_str(if w.chars().any(|c| c.is_ascii_digit()) || w.contains('<') { WILD } else { w });
        }
        text_hash(key.as_bytes())
    }

    fn best(&self, leaf: u64, words: &[String]) -> Option<u64> {
        let mut best: Option<(usize, usize, u64)> = None; // equal tokens, wildcards, id
        for id in self.leaves.get(&leaf)? {
            let Some(c) = self.clusters.get(id) else {
                continue;
            };
            if c.tokens.len() != words.len() {
                continue; // two leaves with the same hash
            }
            let equal = c.tokens.iter().zip(words).filter(|(t, w)| t == w).count();
            let wild = c.tokens.iter().filter(|t| *t == WILD).count();
            if best.is_none_or(|b| (equal, wild) > (b.0, b.1)) {
                best = Some((equal, wild, *id));
            }
        }
        let (equal, _, id) = best?;
        (equal as f64 >= self.config.similarity * words.len() as f64).then_some(id)
    }

    /// Drops the least recently used cluster.
    fn forget(&mut self) -> Option<u64> {
        let (&id, _) = self.clusters.iter().min_by_key(|(id, c)| (c.last_used, **id))?;
        let c = self.clusters.remove(&id)?;
        if let Some(list) = self.leaves.get_mut(&c.leaf) {
            list.retain(|x| *x != id);
            if list.is_empty() {
                self.leaves.remove(&c.leaf);
            }
        }
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_one_template_share_an_id_and_the_change_is_told() {
        let mut m = TemplateMiner::default();
        let a = m.observe("Translate the word apple into German please");
        let b = m.observe("Translate the word pear into German please");
        assert!(a.created && !b.created);
        assert_eq!(a.template_id, b.template_id);
        assert_eq!(b.changed_from.as_deref(), Some("Translate the word apple into German please"));
        assert_eq!(m.text(&a.template_id).unwrap(), "Translate the word <*> into German please");
        let c = m.observe("Summarise the following text in three lines");
        assert_ne!(c.template_id, a.template_id);
    }

    #[test]
    fn chinese_without_spaces_is_mined_too() {
        let mut m = TemplateMiner::default();
        let a = m.observe("请把苹果翻译成英文");
        let b = m.observe("请把香蕉翻译成英文");
        assert_eq!(a.template_id, b.template_id);
        assert_eq!(m.text(&b.template_id).unwrap(), "请 把 <*> <*> 翻 译 成 英 文");
    }

    #[test]
    fn memory_is_bounded_and_ids_are_never_reused() {
        let mut m = TemplateMiner::new(MinerConfig { max_clusters: 8, ..MinerConfig::default() });
        let mut ids = std::collections::BTreeSet::new();
        for i in 0..200u32 {
            let word: String = i.to_string().chars().map(|c| char::from(b'a' + c as u8 - b'0')).collect();
            let mined = m.observe(&format!("{word} only once {word}"));
            assert!(ids.insert(mined.template_id), "ids are new");
            assert_eq!(mined.forgotten.is_some(), i >= 8);
        }
        assert_eq!(m.len(), 8);
        assert_eq!(m.leaves.len(), 8);
    }
}
