//! The prompts of the support app: three templates, one more chunk in each. Phones, annotators and evaluation sets
//! build them with the same function, so that what is trained and measured is what the fleet sees.

use flywheel_inference::tokenizer::Message;
use flywheel_types::Digest;

/// One prompt template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Template {
    pub id: &'static str,
    /// Chunks in the prompt.
    pub k: usize,
    pub order: Order,
}

/// In which order notes stand in the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// As they were ranked.
    BestFirst,
    /// The best note nearest to the question; a small model reads that one best.
    BestLast,
    /// Turned by a hash of the question: neither a model nor its training can rely on the place of the best note.
    Mixed,
}

impl Order {
    pub fn apply(self, notes: &mut [&str], question: &str) {
        match self {
            Self::BestFirst => {}
            Self::BestLast => notes.reverse(),
            Self::Mixed if notes.is_empty() => {}
            Self::Mixed => {
                let turn = usize::from(Digest::of(question.as_bytes()).0[0]) % notes.len();
                notes.rotate_left(turn);
            }
        }
    }
}

/// One note: questions about products, the first template of the app.
pub const SHORT: Template = Template { id: "answer-short", k: 1, order: Order::BestFirst };
/// Two notes: questions about policies and fees.
pub const PAIR: Template = Template { id: "answer-pair", k: 2, order: Order::BestLast };
/// Three notes, launched later for products.
pub const NOTES: Template = Template { id: "answer-notes", k: 3, order: Order::Mixed };
pub const ALL: [Template; 3] = [SHORT, PAIR, NOTES];

impl Template {
    /// The template of that id; [`NOTES`] for an unknown one.
    pub fn named(id: &str) -> Self {
        ALL.into_iter().find(|t| t.id == id).unwrap_or(NOTES)
    }

    /// The user's message; `notes` in rank order.
    pub fn user_text<'a>(&self, notes: impl IntoIterator<Item = &'a str>, question: &str) -> String {
        let mut list: Vec<&str> = notes.into_iter().collect();
        self.order.apply(&mut list, question);
        user_text(list, question)
    }
}

/// The user's message: notes, then the question.
pub fn user_text<'a>(notes: impl IntoIterator<Item = &'a str>, question: &str) -> String {
    let list: Vec<&str> = notes.into_iter().collect();
    format!("Use the notes to answer.\n\n{}\n\nQuestion: {question}\nAnswer with the value only.", list.join("\n"))
}

/// The conversation as the model gets it.
pub fn messages(user: &str) -> [Message<'_>; 1] {
    [Message::user(user)]
}
