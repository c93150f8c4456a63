//! Conversations and plain texts as tokens: to train on, to calibrate on, to measure on.

use super::refused;
use flywheel_attribution::dataset::{Message as Turn, SampleV1, Split};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use flywheel_inference::train::Sample;
use flywheel_types::Error;
use serde::Deserialize;

/// A conversation that ends with an answer. Lines of dataset snapshots have this form and more, which is not read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Conversation {
    #[serde(default)]
    pub id: String,
    #[serde(default = "train")]
    pub split: Split,
    pub messages: Vec<Turn>,
}

fn train() -> Split {
    Split::Train
}

impl From<SampleV1> for Conversation {
    fn from(s: SampleV1) -> Self {
        Self { id: s.id, split: s.split, messages: s.messages }
    }
}

impl Conversation {
    /// As tokens; the loss counts the answer and its end mark only.
    ///
    /// # Errors
    /// `Invalid` for a conversation without an answer at its end, a role that is not known, or one that the template
    /// refuses.
    pub fn sample(&self, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Sample, Error> {
        let bad = |what: String| {
            let message = format!("sample `{}` {what}", self.id);
            Error::invalid("bad_sample", message, "messages are system, user, assistant …; the last is the assistant's")
        };
        let ends = self.messages.split_last().filter(|(last, _)| last.role == "assistant");
        let (answer, asked) = ends.ok_or_else(|| bad("does not end with an answer".into()))?;
        let asked = asked
            .iter()
            .map(|m| match m.role.as_str() {
                "system" => Ok(Message::system(&m.content)),
                "user" => Ok(Message::user(&m.content)),
                "assistant" => Ok(Message::assistant(&m.content)),
                other => Err(bad(format!("has a message of the role `{other}`"))),
            })
            .collect::<Result<Vec<_>, Error>>()?;
        Sample::chat(tokenizer, template, &asked, &answer.content).map_err(refused)
    }
}

/// Reads JSON lines of conversations; empty lines are skipped, lines without an id get their number.
///
/// # Errors
/// `Invalid` with the line's number.
pub fn read_conversations(jsonl: &str) -> Result<Vec<Conversation>, Error> {
    let lines = jsonl.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| {
            let mut read: Conversation = serde_json::from_str(line).map_err(|e| {
                let hint =
                    "a line is {\"messages\": [{\"role\": \"user\", \"content\": …}, {\"role\": \"assistant\", …}]}";
                Error::invalid("bad_sample", format!("line {}: {e}", i + 1), hint)
            })?;
            if read.id.is_empty() {
                read.id = format!("line {}", i + 1);
            }
            Ok(read)
        })
        .collect()
}

/// Every k-th text, so that about `max_tokens` are left, spread over all of them.
#[must_use]
pub fn spread(texts: Vec<Vec<u32>>, max_tokens: usize) -> Vec<Vec<u32>> {
    let total: usize = texts.iter().map(Vec::len).sum();
    let step = total.div_ceil(max_tokens.max(1)).max(1);
    texts.into_iter().step_by(step).collect()
}

/// Cuts a text into pieces of `len` tokens, each with the beginning that the vocabulary wants; a rest that is shorter than
/// half of that is dropped unless it is all there is.
#[must_use]
pub fn pieces(tokenizer: &Tokenizer, tokens: &[u32], len: usize) -> Vec<Vec<u32>> {
    let special = tokenizer.special();
    let bos = special.bos.filter(|_| special.add_bos);
    let room = len.saturating_sub(usize::from(bos.is_some())).max(1);
    let cut = tokens.chunks(room);
    let whole: Vec<&[u32]> = cut.clone().filter(|piece| piece.len() * 2 >= room).collect();
    let used = if whole.is_empty() { cut.collect() } else { whole };
    used.into_iter().map(|piece| bos.into_iter().chain(piece.iter().copied()).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_conversations() {
        let snapshot =
            r#"{"id":"a","interaction_id":"i","split":"holdout","group":"g","messages":[{"role":"user","content":"q"},
            {"role":"assistant","content":"a"}],"rejected":"","chunks":[],"people":[],"edits":[]}"#
                .replace('\n', "");
        let plain = r#"{"messages":[{"role":"assistant","content":"hi"}]}"#;
        let read = read_conversations(&format!("{snapshot}\n\n{plain}\n")).unwrap();
        assert_eq!((read[0].id.as_str(), read[0].split, read[0].messages.len()), ("a", Split::Holdout, 2));
        assert_eq!((read[1].id.as_str(), read[1].split), ("line 3", Split::Train));
        let e = read_conversations("{}\n").unwrap_err();
        assert!(e.code == "bad_sample" && e.message.starts_with("line 1: "), "{e}");
    }

    #[test]
    fn texts_are_spread() {
        let texts: Vec<Vec<u32>> = (0..10).map(|i| vec![i; 10]).collect();
        let firsts = |max| spread(texts.clone(), max).iter().map(|t| t[0]).collect::<Vec<_>>();
        assert_eq!(firsts(1000), (0..10).collect::<Vec<_>>());
        assert_eq!(firsts(40), [0, 3, 6, 9]);
        assert_eq!(firsts(0).len(), 1);
    }
}
