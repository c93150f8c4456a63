//! Text while its tokens arrive: whole characters only, and nothing that may be the beginning of a stop string.

use crate::tokenizer::{StreamDecoder, Tokenizer};

/// Turns tokens into text to show. A stop string ends the text before its first character, wherever token boundaries
/// are; what might still become one is held back.
#[derive(Debug)]
pub struct TextStream<'a> {
    characters: StreamDecoder<'a>,
    held: Held,
}

/// Text that may end in the beginning of a stop string.
#[derive(Debug)]
struct Held {
    stops: Vec<String>,
    text: String,
    stopped: bool,
}

impl Held {
    /// Adds text and takes what can be shown.
    fn push(&mut self, more: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.text.push_str(more);
        if let Some(at) = self.stops.iter().filter_map(|s| self.text.find(s.as_str())).min() {
            self.stopped = true;
            self.text.truncate(at);
            return std::mem::take(&mut self.text);
        }
        let begins = |from: usize| {
            let tail = &self.text[from..];
            self.stops.iter().any(|s| s.len() > tail.len() && s.starts_with(tail))
        };
        let from = self.text.char_indices().map(|(i, _)| i).find(|i| begins(*i)).unwrap_or(self.text.len());
        let held = self.text.split_off(from);
        std::mem::replace(&mut self.text, held)
    }
}

impl<'a> TextStream<'a> {
    /// Empty stop strings are left out.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        let held = Held { stops, text: String::new(), stopped: false };
        Self { characters: tokenizer.stream(), held }
    }

    /// Adds a token; returns the text that can be shown now.
    pub fn push(&mut self, token: u32) -> String {
        let text = self.characters.push(token);
        self.held.push(&text)
    }

    /// Whether a stop string was met: further tokens show nothing, and need not be generated.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.held.stopped
    }

    /// What was held back, when no further token comes.
    #[must_use]
    pub fn finish(mut self) -> String {
        let rest = self.characters.finish();
        let mut out = self.held.push(&rest);
        if !self.held.stopped {
            out.push_str(&self.held.text);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(stops: &[&str]) -> Held {
        Held { stops: stops.iter().map(|s| (*s).to_owned()).collect(), text: String::new(), stopped: false }
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_its_beginning_is_held_back() {
        let mut h = held(&["</end>", "STOP"]);
        assert_eq!(h.push("a<"), "a");
        assert_eq!(h.push("/e"), "");
        assert_eq!(h.push("m><"), "</em>");
        assert_eq!(h.push("/end"), "");
        assert_eq!(h.push(">rest"), "");
        assert!(h.stopped && h.text.is_empty());
        assert_eq!(h.push("more"), "");
    }

    #[test]
    fn the_earliest_stop_wins_and_overlaps_are_seen() {
        let mut h = held(&["bc", "abd"]);
        assert_eq!(h.push("xab"), "x");
        assert_eq!(h.push("c"), "a");
        assert!(h.stopped);
        let mut h = held(&["aab"]);
        assert_eq!(h.push("aa"), "");
        assert_eq!(h.push("a"), "a");
        assert_eq!(h.push("b!"), "");
        assert!(h.stopped);
    }

    #[test]
    fn characters_of_several_bytes_are_not_cut() {
        let mut h = held(&["é停"]);
        assert_eq!(h.push("né"), "n");
        assert_eq!(h.push("e"), "ée");
        assert_eq!(h.push("é"), "");
        assert_eq!(h.push("停x"), "");
        assert!(h.stopped);
    }

    #[test]
    fn a_stream_of_tokens_shows_all_text_at_its_end() {
        let Some(path) = crate::testing::model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
        let tokenizer = Tokenizer::from_gguf(&crate::gguf::Gguf::open(&path).unwrap()).unwrap();
        let text = "Grüße, 世界 🌍! The end is near";
        let tokens = tokenizer.encode(text, false);
        let run = |stops: &[String]| {
            let mut stream = TextStream::new(&tokenizer, stops);
            let mut out = String::new();
            for t in &tokens {
                out += &stream.push(*t);
                assert!(text.starts_with(&out), "{out}");
            }
            let stopped = stream.stopped();
            (out + &stream.finish(), stopped)
        };
        assert_eq!(run(&["near the".into(), String::new()]), (text.to_owned(), false));
        assert_eq!(run(&["界 🌍".into()]), ("Grüße, 世".to_owned(), true));
    }
}
