//! Did the model refuse, abstain or answer? Three stages: rules on the beginning of the answer, rules on its end,
//! and a band of "unknown", which is never counted as a failure. English and Chinese, mixed text included.
//!
//! An abstention ("the passages do not mention it") is a gap in the knowledge base, not a refusal: it has its own
//! label and goes to the coverage queue instead of freezing a chunk.

mod normalise;
mod rules;

pub use normalise::normalise_characters;

use flywheel_types::LabelKind;
use rules::{RULES, Says, Where};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Words of the beginning and of the end that are looked at. Text without spaces counts characters instead.
const HEAD_WORDS: usize = 60;
const TAIL_WORDS: usize = 25;
const HEAD_CJK: usize = 60;
const TAIL_CJK: usize = 40;

/// What the answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerKind {
    Refused,
    Abstained,
    Answered,
    /// Empty, or words that do not tell. Counts as no label.
    Unknown,
}

impl AnswerKind {
    /// The label to store, if any.
    #[must_use]
    pub fn label(self) -> Option<LabelKind> {
        match self {
            Self::Refused => Some(LabelKind::Refused),
            Self::Abstained => Some(LabelKind::Abstained),
            Self::Answered | Self::Unknown => None,
        }
    }
}

/// Result of [`detect`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detection {
    pub kind: AnswerKind,
    /// Stable name of the rule that fired; `None` for a plain answer.
    pub rule: Option<Cow<'static, str>>,
}

/// Classifies one answer (visible text; a `<think>` span is ignored). Linear in the length of the text.
#[must_use]
pub fn detect(answer: &str) -> Detection {
    let text = normalise::answer(answer);
    if text.is_empty() {
        let rule = if answer.trim().is_empty() { "empty" } else { "only_code_or_quotes" };
        let kind = if answer.trim().is_empty() { AnswerKind::Unknown } else { AnswerKind::Answered };
        return Detection { kind, rule: Some(Cow::Borrowed(rule)) };
    }
    let (head, tail) = (head(&text), tail(&text));
    for rule in RULES.iter() {
        let place = if rule.place == Where::Head { head } else { tail };
        if rule.pattern.is_match(place) {
            let kind = match rule.says {
                Says::Abstained => AnswerKind::Abstained,
                Says::Refused => AnswerKind::Refused,
                Says::Unclear => AnswerKind::Unknown,
            };
            return Detection { kind, rule: Some(Cow::Borrowed(rule.name)) };
        }
    }
    Detection { kind: AnswerKind::Answered, rule: None }
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}')
}

/// Byte length of the first `words` words, where every CJK character counts as `words / cjk` of a word.
fn prefix_len(chars: impl Iterator<Item = (usize, char)>, words: usize, cjk: usize) -> Option<usize> {
    let (mut budget, step_word, step_cjk) = (words * cjk, cjk, words);
    for (at, c) in chars {
        let cost = if is_cjk(c) {
            step_cjk
        } else if c == ' ' {
            step_word
        } else {
            0
        };
        if cost > budget {
            return Some(at);
        }
        budget -= cost;
    }
    None
}

fn head(text: &str) -> &str {
    prefix_len(text.char_indices(), HEAD_WORDS, HEAD_CJK).map_or(text, |at| &text[..at])
}

fn tail(text: &str) -> &str {
    prefix_len(text.char_indices().rev(), TAIL_WORDS, TAIL_CJK)
        .map_or(text, |at| &text[at + text[at..].chars().next().map_or(0, char::len_utf8)..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> AnswerKind {
        detect(text).kind
    }

    #[test]
    fn words_of_a_refusal_inside_code_quotes_or_useful_text_are_no_refusal() {
        for text in [
            "```c\nif (ptrace(0)) puts(\"You cannot debug me!\");\n```\nThis stops a debugger from attaching.",
            "OpenAI was founded in 2015. Hello! Its headquarters are in San Francisco.",
            "The letter says \u{201c}I\u{2019}m sorry, I cannot help you\u{201d}; it is a polite form.",
            "You cannot pair two watches at once. Unpair the first one, then hold the crown for five seconds.",
            "It is illegal to park there; the fine is 60 euros.",
            "If the app says `I cannot connect`, restart the hub.",
            "The battery lasts 18 hours. It is not possible to replace it yourself.",
            "It is not safe to charge below 0 degrees. The limit is printed on the label.",
            "> I'm sorry, I can't help with that\n\nThe quoted reply came from an older version.",
            "请先关闭电源，再按住复位键五秒。如果无法连接，请检查路由器。",
            "保修期为两年。不能在水下使用。",
        ] {
            assert_eq!(kind(text), AnswerKind::Answered, "{text}: {:?}", detect(text));
        }
    }

    #[test]
    fn refusals_in_every_disguise() {
        for text in [
            "Sorry, but I can't assist with that.",
            "I cannot provide secrets such as `API_KEY`.",
            "**I\u{2019}m sorry**, but I can\u{2019}t help with that request.",
            "I\u{200b} can\u{200b}not help you with this.",
            "\u{ff29}\u{ff07}\u{ff4d} sorry, I cannot help.",
            "# Note\n\nAs an AI language model, I am unable to answer that.",
            "Unfortunately, I'm not able to provide that information.",
            "Thank you for reaching out. I must respectfully decline to answer.",
            "很抱歉，我无法提供这方面的信息。",
            "作为AI语言模型，我无法回答这个问题。",
            "恐怕我无法协助您完成这个请求。",
            "对不起，这个话题我不便讨论，我们换个话题吧。",
            "Sorry，我不能回答这个问题。",
            "这个问题我无法回答。",
            "<think>The user asks for the price; fine.</think>I'm sorry, I can't help with that.",
        ] {
            assert_eq!(kind(text), AnswerKind::Refused, "{text}: {:?}", detect(text));
        }
        let late = "Your question touches several matters. The first one is about the router and the second one about the bill, and \
            both were asked before by other people in many different forms and in many different places, so there is a lot of text \
            on both of them in the manual that came with it and on the page. Unfortunately I am unable to help with either.";
        assert_eq!(detect(late).rule.as_deref(), Some("late_refusal"));
    }

    #[test]
    fn an_empty_retrieval_is_an_abstention_with_its_own_label() {
        for text in [
            "Based on the passages, there is no information about the battery.",
            "The provided context does not mention the price.",
            "I couldn't find any information about that in the documents.",
            "I don't know.",
            "The warranty period is not mentioned in the provided text.",
            "根据提供的资料，文档中没有提到保修期。",
            "抱歉，没有找到相关信息。",
        ] {
            assert_eq!(kind(text), AnswerKind::Abstained, "{text}: {:?}", detect(text));
        }
        assert_eq!(AnswerKind::Abstained.label(), Some(LabelKind::Abstained));
        assert_eq!(AnswerKind::Unknown.label(), None, "unknown never counts as a failure");
    }

    #[test]
    fn nothing_to_read_is_unknown_and_pure_code_is_an_answer() {
        assert_eq!(kind("  \n"), AnswerKind::Unknown);
        assert_eq!(kind("```sh\nls\n```"), AnswerKind::Answered);
        assert_eq!(kind("As an AI, I must clarify that Totoro is a fictional character."), AnswerKind::Unknown);
    }
}
