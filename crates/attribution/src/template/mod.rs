//! Which prompt template is behind a prompt: the id that was sent, a known template that fits, or a mined one.

mod mask;
mod miner;

pub use mask::mask;
pub use miner::{Mined, MinerConfig, TemplateMiner};

use flywheel_types::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How a template was recognised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum TemplateMatch {
    /// The client named it.
    Id { template_id: String },
    /// The client sent the hash of a known template's text.
    Hash { template_id: String },
    /// The prompt fits the literal parts of a known template.
    Text { template_id: String },
    /// Nothing known fits: mined.
    Mined { mined: Mined },
}

impl TemplateMatch {
    #[must_use]
    pub fn template_id(&self) -> &str {
        match self {
            Self::Id { template_id } | Self::Hash { template_id } | Self::Text { template_id } => template_id,
            Self::Mined { mined } => &mined.template_id,
        }
    }
}

/// The templates an app registered: text with `{placeholders}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownTemplates {
    by_hash: BTreeMap<String, String>,
    /// (literal characters, id, literal parts), longest first.
    parts: Vec<(usize, String, Vec<String>)>,
}

impl KnownTemplates {
    /// Registers a template under its id. `{name}` is a placeholder; `{{` and `}}` are literal braces.
    pub fn add(&mut self, template_id: &str, text: &str) {
        self.by_hash.insert(template_hash(text), template_id.to_owned());
        let parts = literals(text);
        let size = parts.iter().map(|p| p.chars().count()).sum();
        self.parts.retain(|p| p.1 != template_id);
        self.parts.push((size, template_id.to_owned(), parts));
        self.parts.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    }

    /// The known template whose literal parts occur in `prompt` in order, the first at its start and the last at its
    /// end; the one with most literal text wins. A template without literal text never fits.
    #[must_use]
    pub fn match_text(&self, prompt: &str) -> Option<&str> {
        self.parts.iter().find(|(size, _, parts)| *size > 0 && fits(prompt, parts)).map(|(_, id, _)| id.as_str())
    }

    /// Recognises the template: sent id, sent hash, text, miner, in this order.
    pub fn resolve(
        &self,
        miner: &mut TemplateMiner,
        sent_id: Option<&str>,
        sent_hash: Option<&str>,
        prompt: &str,
    ) -> TemplateMatch {
        if let Some(id) = sent_id.filter(|i| !i.is_empty()) {
            return TemplateMatch::Id { template_id: id.to_owned() };
        }
        if let Some(id) = sent_hash.and_then(|h| self.by_hash.get(h)) {
            return TemplateMatch::Hash { template_id: id.clone() };
        }
        match self.match_text(prompt) {
            Some(id) => TemplateMatch::Text { template_id: id.to_owned() },
            None => TemplateMatch::Mined { mined: miner.observe(prompt) },
        }
    }
}

/// Hash of a template's text: SHA-256 in hexadecimal, line ends unified and outer white space removed first.
#[must_use]
pub fn template_hash(text: &str) -> String {
    Digest::of(text.replace("\r\n", "\n").trim().as_bytes()).to_hex()
}

/// Literal parts around the placeholders; always one more than there are placeholders.
fn literals(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    let push = |parts: &mut Vec<String>, c: char| {
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    };
    while let Some(c) = chars.next() {
        match c {
            '{' | '}' if chars.peek() == Some(&c) => {
                chars.next();
                push(&mut parts, c);
            }
            '{' => {
                chars.by_ref().take_while(|c| *c != '}').for_each(drop);
                parts.push(String::new());
            }
            c => push(&mut parts, c),
        }
    }
    parts
}

fn fits(prompt: &str, parts: &[String]) -> bool {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
        return false;
    };
    if parts.len() == 1 {
        return prompt == first;
    }
    let Some(mut rest) = prompt.strip_prefix(first.as_str()) else {
        return false;
    };
    for part in &parts[1..parts.len() - 1] {
        match rest.find(part.as_str()) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_hash_text_then_miner() {
        let mut known = KnownTemplates::default();
        let text = "Answer from the notes.\n{context}\nQuestion: {question}\nAnswer:";
        known.add("support-v1", text);
        known.add("bare", "{question}");
        known.add("longer", "Answer from the notes.\n{context}\nBe brief.\nQuestion: {question}\nAnswer:");
        let mut miner = TemplateMiner::default();
        let prompt = "Answer from the notes.\nThe hub has two ports.\nQuestion: How many ports?\nAnswer:";
        let mut by = |id, hash: Option<&str>, p: &str| known.resolve(&mut miner, id, hash, p);
        assert!(matches!(by(Some("given"), None, prompt), TemplateMatch::Id { .. }));
        assert!(matches!(by(None, Some(&template_hash(text)), "x"), TemplateMatch::Hash { .. }));
        assert_eq!(by(None, None, prompt).template_id(), "support-v1");
        let brief = "Answer from the notes.\nA\nBe brief.\nQuestion: B\nAnswer:";
        assert_eq!(by(None, None, brief).template_id(), "longer", "most literal text wins");
        assert!(matches!(by(None, None, "something else"), TemplateMatch::Mined { .. }));
    }

    #[test]
    fn literal_braces_and_open_placeholders() {
        assert_eq!(literals("a {{x}} {q} b"), ["a {x} ", " b"]);
        assert_eq!(literals("{open"), ["", ""]);
        assert_eq!(template_hash(" a\r\nb "), template_hash("a\nb"));
    }
}
