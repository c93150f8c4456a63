//! The support knowledge base of the demo: invented facts about invented products, each with its true value and
//! three phrasings of the question. Written for this project.

use anyhow::{Context, Result};
use serde::Deserialize;

/// One fact.
#[derive(Debug, Clone, Deserialize)]
pub struct Fact {
    pub chunk_id: String,
    /// Team that looks after it; annotators work on one collection.
    pub collection: String,
    pub topic: String,
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
    /// Whether an answer gives the true value: the value stands in it as a word of its own.
    pub fn accepts(&self, answer: &str) -> bool {
        contains_value(answer, &self.value)
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

/// Whether `value` occurs in `answer` and is not part of a longer number or word.
pub fn contains_value(answer: &str, value: &str) -> bool {
    let (answer, value) = (answer.to_lowercase(), value.to_lowercase());
    let glued = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    answer.match_indices(&value).any(|(at, found)| {
        let before = answer[..at].chars().next_back();
        let after = answer[at + found.len()..].chars().collect::<Vec<_>>();
        let decimal = matches!(after.as_slice(), ['.' | ',', d, ..] if d.is_ascii_digit())
            || (before == Some('.') && answer[..at - 1].ends_with(|c: char| c.is_ascii_digit()));
        !glued(before) && !glued(after.first().copied()) && !decimal
    })
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
            assert!(contains_value(&f.text, &f.value), "{} does not hold its value", f.chunk_id);
        }
        let stale = kb.iter().find(|f| f.is("stale")).unwrap();
        assert!(!contains_value(&stale.text, &stale.value));
        assert!(contains_value(stale.corrected_text.as_deref().unwrap(), &stale.value));
    }

    #[test]
    fn values_match_as_words() {
        assert!(contains_value("It is 14 days.", "14"));
        assert!(contains_value("14", "14"));
        assert!(contains_value("约14天", "14"));
        assert!(!contains_value("140 days", "14"));
        assert!(!contains_value("14.5 days", "14"));
        assert!(!contains_value("1.14 days", "14"));
        assert!(contains_value("The answer is 14.", "14"));
    }
}
