//! Chat templates. GGUF stores them as Jinja programs; the known families are recognised by their text and
//! rendered here, everything else is refused: a wrong template shows as endless or wordless answers.

use super::{Part, TokenizerError};
use crate::gguf::Gguf;
use std::borrow::Cow;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    pub role: Role,
    pub content: &'a str,
}

impl<'a> Message<'a> {
    #[must_use]
    pub fn system(content: &'a str) -> Self {
        Self { role: Role::System, content }
    }
    #[must_use]
    pub fn user(content: &'a str) -> Self {
        Self { role: Role::User, content }
    }
    #[must_use]
    pub fn assistant(content: &'a str) -> Self {
        Self { role: Role::Assistant, content }
    }
}

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    #[error("a conversation needs at least one message")]
    Empty,
    #[error("message {index} is a system message; only the first may be")]
    LateSystem { index: usize },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Family {
    /// `<|im_start|>role\n…<|im_end|>\n` (SmolLM2, Qwen2 to Qwen3).
    ChatMl {
        /// Sent when the conversation has no system message.
        default_system: Option<String>,
    },
    /// `<｜User｜>…<｜Assistant｜>…<｜end▁of▁sentence｜>`.
    DeepSeekR1 {
        /// Whether the generation prompt already opens the reasoning.
        opens_think: bool,
    },
    /// `<|start_header_id|>role<|end_header_id|>\n\n…<|eot_id|>`.
    Llama3,
}

/// A recognised chat template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    family: Family,
    /// Text of the bos token where the template itself writes it.
    bos: &'static str,
    /// Whether reasoning of earlier answers is dropped.
    drops_think: bool,
}

const IM_START: &str = "<|im_start|>";
const IM_END: &str = "<|im_end|>";
const THINK_END: &str = "</think>";

impl ChatTemplate {
    /// The template in `tokenizer.chat_template`.
    ///
    /// # Errors
    /// [`TokenizerError::Gguf`] if there is none, [`TokenizerError::Vocabulary`] if it is not a known one.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::recognise(gguf.str("tokenizer.chat_template")?)
    }

    /// The same for the text of a template.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] if it is not a known one.
    pub fn recognise(jinja: &str) -> Result<Self, TokenizerError> {
        let has = |needle: &str| jinja.contains(needle);
        if has("<｜User｜>") && has("<｜Assistant｜>") && has("<｜end▁of▁sentence｜>") {
            let opens_think = has("<｜Assistant｜><think>");
            let family = Family::DeepSeekR1 { opens_think };
            return Ok(Self { family, bos: "<｜begin▁of▁sentence｜>", drops_think: has(THINK_END) });
        }
        // Llama 3.1 and later insert dates and tool texts: another template.
        if has("<|start_header_id|>") && has("<|eot_id|>") && !has("strftime_now") && !has("date_string") {
            return Ok(Self { family: Family::Llama3, bos: "<|begin_of_text|>", drops_think: false });
        }
        if has(IM_START) && has(IM_END) && !has("<|start_header_id|>") {
            let family = Family::ChatMl { default_system: default_system(jinja) };
            return Ok(Self { family, bos: "", drops_think: has(THINK_END) });
        }
        let start: String = jinja.chars().take(60).collect();
        Err(TokenizerError::vocabulary(format!(
            "the chat template is not one of ChatML, DeepSeek-R1, Llama 3 (it starts with `{start}`)"
        )))
    }

    /// Plain ChatML without a default system message, for files that carry no template.
    #[must_use]
    pub fn chat_ml() -> Self {
        Self { family: Family::ChatMl { default_system: None }, bos: "", drops_think: false }
    }

    /// The whole prompt as text; use [`super::Tokenizer::encode_chat`] to get tokens, since message text must not be
    /// parsed for special tokens.
    ///
    /// # Errors
    /// [`ChatError`].
    pub fn render(&self, messages: &[Message<'_>], add_generation_prompt: bool) -> Result<String, ChatError> {
        Ok(self.parts(messages, add_generation_prompt)?.iter().map(|p| p.text.as_ref()).collect())
    }

    /// The prompt in parts: markup, where special tokens are parsed, and message text, where they are not.
    ///
    /// # Errors
    /// [`ChatError`].
    pub fn parts<'a>(&self, messages: &[Message<'a>], add_generation_prompt: bool) -> Result<Vec<Part<'a>>, ChatError> {
        if messages.is_empty() {
            return Err(ChatError::Empty);
        }
        if let Some(late) = messages.iter().skip(1).position(|m| m.role == Role::System) {
            return Err(ChatError::LateSystem { index: late + 1 });
        }
        let mut out = Vec::with_capacity(messages.len() * 3 + 3);
        markup(&mut out, self.bos);
        self.default_turn(&mut out, messages);
        for message in messages {
            self.turn(&mut out, *message);
        }
        if add_generation_prompt {
            markup(&mut out, self.generation_prompt());
        }
        Ok(out)
    }

    /// What precedes an answer, for example `<|im_start|>assistant\n`.
    #[must_use]
    pub fn generation_prompt(&self) -> &'static str {
        match &self.family {
            Family::ChatMl { .. } => "<|im_start|>assistant\n",
            Family::DeepSeekR1 { opens_think: true } => "<｜Assistant｜><think>\n",
            Family::DeepSeekR1 { opens_think: false } => "<｜Assistant｜>",
            Family::Llama3 => "<|start_header_id|>assistant<|end_header_id|>\n\n",
        }
    }

    /// The special token that ends an answer; a training target ends with it.
    #[must_use]
    pub fn end_of_answer(&self) -> &'static str {
        match &self.family {
            Family::ChatMl { .. } => IM_END,
            Family::DeepSeekR1 { .. } => "<｜end▁of▁sentence｜>",
            Family::Llama3 => "<|eot_id|>",
        }
    }

    fn default_turn<'a>(&self, out: &mut Vec<Part<'a>>, messages: &[Message<'a>]) {
        let Family::ChatMl { default_system: Some(system) } = &self.family else { return };
        if messages.first().is_none_or(|m| m.role != Role::System) {
            markup(out, format!("{IM_START}system\n{system}{IM_END}\n"));
        }
    }

    fn turn<'a>(&self, out: &mut Vec<Part<'a>>, message: Message<'a>) {
        let content = match message.content.rfind(THINK_END) {
            Some(at) if self.drops_think && message.role == Role::Assistant => {
                let rest = &message.content[at + THINK_END.len()..];
                if matches!(self.family, Family::ChatMl { .. }) { rest.trim_start_matches('\n') } else { rest }
            }
            _ => message.content,
        };
        let role = message.role.name();
        match &self.family {
            Family::ChatMl { .. } => {
                markup(out, format!("{IM_START}{role}\n"));
                text(out, content);
                markup(out, "<|im_end|>\n");
            }
            Family::DeepSeekR1 { .. } => {
                markup(
                    out,
                    match message.role {
                        Role::System => "",
                        Role::User => "<｜User｜>",
                        Role::Assistant => "<｜Assistant｜>",
                    },
                );
                text(out, content);
                if message.role == Role::Assistant {
                    markup(out, "<｜end▁of▁sentence｜>");
                }
            }
            Family::Llama3 => {
                markup(out, format!("<|start_header_id|>{role}<|end_header_id|>\n\n"));
                text(out, content.trim());
                markup(out, "<|eot_id|>");
            }
        }
    }
}

fn markup<'a>(out: &mut Vec<Part<'a>>, text: impl Into<Cow<'a, str>>) {
    let text = text.into();
    if !text.is_empty() {
        out.push(Part { text, parse_special: true });
    }
}

fn text<'a>(out: &mut Vec<Part<'a>>, text: &'a str) {
    if !text.is_empty() {
        out.push(Part { text: text.into(), parse_special: false });
    }
}

/// The system text that a ChatML template writes by itself: a literal between the system header and the end
/// of the turn, with a real or an escaped line break.
fn default_system(jinja: &str) -> Option<String> {
    const HEADER: &str = "<|im_start|>system";
    let mut rest = jinja;
    while let Some(at) = rest.find(HEADER) {
        rest = &rest[at + HEADER.len()..];
        let literal = rest.strip_prefix('\n').or_else(|| rest.strip_prefix("\\n"));
        let Some((system, _)) = literal.and_then(|l| l.split_once(IM_END)) else { continue };
        if !system.is_empty() && !system.contains(['\'', '"', '{', '\n', '\\']) {
            return Some(system.to_owned());
        }
    }
    None
}
