//! Decoding while tokens arrive: a character is given out only when all its bytes are there.

use super::Tokenizer;

/// See [`Tokenizer::stream`].
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// Adds a token; returns the text that became complete (control tokens add nothing). Bytes that can never
    /// become UTF-8 are given out as U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(&self.tokenizer.piece(id, false));
        let mut out = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return out;
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
                    // `None`: the rest is the beginning of a character.
                    let Some(bad) = e.error_len() else {
                        self.pending.drain(..valid);
                        return out;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.pending.drain(..valid + bad);
                }
            }
        }
    }

    /// What is left at the end: an unfinished character as U+FFFD.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
