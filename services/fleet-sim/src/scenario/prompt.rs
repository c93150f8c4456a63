//! The prompts of the support app: three templates, one more chunk in each. Phones, annotators and evaluation sets
//! build them with the same function, so that what is trained and measured is what the fleet sees.

use flywheel_inference::tokenizer::Message;

/// One prompt template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Template {
    pub id: &'static str,
    /// Chunks in the prompt.
    pub k: usize,
}

/// One note, the first template of the app.
pub const SHORT: Template = Template { id: "answer-short", k: 1 };
/// Two notes.
pub const PAIR: Template = Template { id: "answer-pair", k: 2 };
/// Three notes, launched later.
pub const NOTES: Template = Template { id: "answer-notes", k: 3 };
pub const ALL: [Template; 3] = [SHORT, PAIR, NOTES];

/// The user's message: notes in rank order, then the question.
pub fn user_text<'a>(notes: impl IntoIterator<Item = &'a str>, question: &str) -> String {
    let list: Vec<&str> = notes.into_iter().collect();
    format!("Use the notes to answer.\n\n{}\n\nQuestion: {question}\nAnswer with the value only.", list.join("\n"))
}

/// The conversation as the model gets it.
pub fn messages(user: &str) -> [Message<'_>; 1] {
    [Message::user(user)]
}
