//! The support knowledge base of the demo: invented facts about invented products, each with its true value and
//! three phrasings of the question. Written for this project.

use anyhow::{Context, Result};
use flywheel_inference::eval::MatchRule;
use serde::Deserialize;

/// One fact.
#[derive(Debug, Clone, Deserialize)]
pub struct Fact {
    pub chunk_id: String,
    /// Team that looks after it; annotators work on one collection.
    pub collection: String,
    pub lang: String,
    /// What the chunk says when the scenario starts.
    pub text: String,
    /// What is true.
    pub value: String,
    /// One phrasing per template.
    pub questions: [String; 3],
    /// What the editor will write instead.
    #[serde(default)]
    pub corrected_text: Option<String>,
    /// `stale`, `buddy`, `hard`, `spam` or nothing.
    #[serde(default)]
    pub role: Option<String>,
}

impl Fact {
    pub fn is(&self, role: &str) -> bool {
        self.role.as_deref() == Some(role)
    }
    /// Whether an answer gives the true value, by the rule that the server's evaluation judges by.
    pub fn accepts(&self, answer: &str) -> bool {
        MatchRule::Value.accepts(answer, &self.value)
    }
}

#[derive(Deserialize)]
struct File {
    chunks: Vec<Fact>,
}

/// Loads the built-in knowledge base.
pub fn load() -> Result<Vec<Fact>> {
    parse(include_str!("../../data/support_kb.json")).context("the built-in knowledge base does not parse")
}

/// Reads a knowledge base.
pub fn parse(text: &str) -> Result<Vec<Fact>> {
    let file: File = serde_json::from_str(text)?;
    Ok(file.chunks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_knowledge_base_has_what_the_scenario_needs() {
        let kb = load().unwrap();
        assert!(kb.len() >= 40);
        let ids: HashSet<_> = kb.iter().map(|f| &f.chunk_id).collect();
        assert_eq!(ids.len(), kb.len(), "chunk ids are unique");
        assert!(kb.iter().filter(|f| f.collection == "sound").count() * 2 >= 60);
        assert!(kb.iter().any(|f| f.lang == "zh"));
        for role in ["stale", "buddy", "spam"] {
            assert_eq!(kb.iter().filter(|f| f.is(role)).count(), 1, "{role}");
        }
        for f in kb.iter().filter(|f| !f.is("stale")) {
            assert!(f.accepts(&f.text), "{} does not hold its value", f.chunk_id);
        }
        let stale = kb.iter().find(|f| f.is("stale")).unwrap();
        assert!(!stale.accepts(&stale.text));
        assert!(stale.accepts(stale.corrected_text.as_deref().unwrap()));
    }
}
