//! Tokenizers and chat templates: text of users goes in, and must never become a control token.

use crate::choice;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::tokenizer::{ChatTemplate, Message, Role, StreamDecoder, Tokenizer, WordPiece};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Pre-tokenizers of byte-level BPE, as files name them.
const PRE: [&str; 7] = ["gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "deepseek-llm", "deepseek-coder"];
/// Control tokens of the fixed vocabularies.
const CONTROL: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];

/// Just enough of the GGUF form (version 3) to carry a vocabulary.
#[derive(Default)]
pub struct Metadata {
    entries: u64,
    bytes: Vec<u8>,
}

impl Metadata {
    fn key(&mut self, key: &str, kind: u32) {
        self.entries += 1;
        self.text(key);
        self.bytes.extend_from_slice(&kind.to_le_bytes());
    }
    fn text(&mut self, text: &str) {
        self.bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(text.as_bytes());
    }
    fn array(&mut self, key: &str, kind: u32, len: usize) {
        self.key(key, 9);
        self.bytes.extend_from_slice(&kind.to_le_bytes());
        self.bytes.extend_from_slice(&(len as u64).to_le_bytes());
    }
    pub fn string(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        self.text(value);
    }
    pub fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }
    pub fn f32(&mut self, key: &str, value: f32) {
        self.key(key, 6);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }
    pub fn strings(&mut self, key: &str, values: &[String]) {
        self.array(key, 8, values.len());
        values.iter().for_each(|v| self.text(v));
    }
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.array(key, 5, values.len());
        values.iter().for_each(|v| self.bytes.extend_from_slice(&v.to_le_bytes()));
    }
    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        self.array(key, 6, values.len());
        values.iter().for_each(|v| self.bytes.extend_from_slice(&v.to_le_bytes()));
    }
    /// The head of a file with `tensors` tensors, whose entries and data follow.
    #[must_use]
    pub fn head(&self, tensors: u64) -> Vec<u8> {
        [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &self.entries.to_le_bytes(), &self.bytes].concat()
    }
    fn open(&self) -> Option<Gguf> {
        let mut file = self.head(0);
        file.resize(file.len().next_multiple_of(32), 0);
        Gguf::from_bytes(file).ok()
    }
}

/// The characters that stand for bytes in byte-level BPE (GPT-2).
#[must_use]
pub fn byte_tokens() -> Vec<String> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0xff;
    let stand_in = |b: u8| {
        if printable(b) {
            return char::from(b).to_string();
        }
        next += 1;
        char::from_u32(next).expect("a character").to_string()
    };
    (0..=255).map(stand_in).collect()
}

/// Metadata of a BPE vocabulary with every byte, some merges and the control tokens.
#[must_use]
pub fn bpe(pre: &str) -> Metadata {
    let mut tokens = byte_tokens();
    let merges = ["t h", "th e", "h e", "Ġ t", "Ġt he", "i n", "e r", "Ġ Ġ", "ä ½", "ä½ ł"];
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    let mut kinds = vec![1; tokens.len()];
    tokens.extend(CONTROL.map(str::to_owned));
    kinds.extend([3; CONTROL.len()]);
    tokens.push("<user defined>".to_owned());
    kinds.push(4);
    let mut m = Metadata::default();
    m.string("tokenizer.ggml.model", "gpt2");
    m.string("tokenizer.ggml.pre", pre);
    m.strings("tokenizer.ggml.tokens", &tokens);
    m.i32s("tokenizer.ggml.token_type", &kinds);
    m.strings("tokenizer.ggml.merges", &merges.map(str::to_owned));
    m
}

/// Metadata of a SentencePiece vocabulary with every byte.
#[must_use]
pub fn spm() -> Metadata {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut kinds = vec![2, 3, 3];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([6; 256]);
    tokens.extend(["▁", "▁t", "he", "▁the", "a", "t", "h", "e", "你", "你好"].map(str::to_owned));
    kinds.resize(tokens.len(), 1);
    let scores: Vec<f32> = (0..tokens.len()).map(|i| -(i as f32)).collect();
    let mut m = Metadata::default();
    m.string("tokenizer.ggml.model", "llama");
    m.strings("tokenizer.ggml.tokens", &tokens);
    m.i32s("tokenizer.ggml.token_type", &kinds);
    m.f32s("tokenizer.ggml.scores", &scores);
    m.u32("tokenizer.ggml.unknown_token_id", 0);
    m
}

fn open(metadata: &Metadata) -> Tokenizer {
    let file = metadata.open().expect("the fixed vocabulary is a file");
    Tokenizer::from_gguf(&file).expect("the fixed vocabulary is a tokenizer")
}

/// One tokenizer per pre-tokenizer, then SentencePiece. Made once: compiling their patterns is slow.
static FIXED: LazyLock<Vec<Tokenizer>> =
    LazyLock::new(|| PRE.iter().map(|pre| open(&bpe(pre))).chain([open(&spm())]).collect());

static WORD_PIECE: LazyLock<WordPiece> = LazyLock::new(|| {
    let tokens = ["[CLS]", "[SEP]", "[UNK]", "how", "long", "##er", "?", "保", "a", "##a", "é"];
    let vocab: HashMap<String, u32> = tokens.iter().zip(0..).map(|(t, id)| ((*t).to_owned(), id)).collect();
    WordPiece::new(vocab, true).expect("the vocabulary has the special tokens")
});

/// First byte: below 128 a fixed vocabulary, and the rest is text; else the rest is a vocabulary (one token a line), a
/// zero byte, merges (one a line), a zero byte, and text.
pub fn tokenizer(data: &[u8]) {
    let (first, rest) = choice(data);
    if first >= 128 {
        own_vocabulary(first, rest);
        return;
    }
    let text = String::from_utf8_lossy(rest);
    let tokenizer = &FIXED[usize::from(first) % FIXED.len()];
    let ids = both_ways(tokenizer, &text);
    // SentencePiece writes a space as U+2581, and so cannot tell the two apart
    if !text.contains('▁') {
        assert_eq!(tokenizer.decode(&ids), *text, "a vocabulary with every byte loses nothing");
    }
    for control in CONTROL.iter().chain(&["<s>", "</s>"]) {
        let id = tokenizer.id_of(control);
        assert!(id.is_none_or(|id| !ids.contains(&id)), "text of a user became {control}");
    }
    let ids = WORD_PIECE.encode(&text, 32);
    assert!(ids.len() <= 32 && ids.iter().all(|id| (*id as usize) < WORD_PIECE.vocab_size()));
}

/// Encodes and decodes; returns the ids without special tokens.
fn both_ways(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    for special in [true, false] {
        let ids = tokenizer.encode(text, special);
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "ids lie in the vocabulary");
        let mut stream: StreamDecoder<'_> = tokenizer.stream();
        let mut streamed: String = ids.iter().map(|id| stream.push(*id)).collect();
        streamed.push_str(&stream.finish());
        assert!(streamed.ends_with(&tokenizer.decode(&ids)), "a stream gives the text of its tokens");
    }
    tokenizer.encode(text, false)
}

fn own_vocabulary(first: u8, data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.splitn(3, '\0');
    let mut lines = || -> Vec<String> { parts.next().unwrap_or_default().split('\n').map(str::to_owned).collect() };
    let (tokens, merges) = (lines(), lines());
    let text = parts.next().unwrap_or_default();
    let kinds: Vec<i32> = tokens.iter().map(|t| t.bytes().next_back().map_or(1, |b| i32::from(b % 8))).collect();
    let mut m = Metadata::default();
    m.strings("tokenizer.ggml.tokens", &tokens);
    if first & 1 != 0 {
        m.i32s("tokenizer.ggml.token_type", &kinds);
    }
    if first & 2 != 0 {
        m.string("tokenizer.ggml.model", "llama");
        m.f32s("tokenizer.ggml.scores", &tokens.iter().map(|t| t.len() as f32).collect::<Vec<_>>());
    } else {
        m.string("tokenizer.ggml.model", "gpt2");
        m.string("tokenizer.ggml.pre", PRE[usize::from(first >> 2) % PRE.len()]);
        m.strings("tokenizer.ggml.merges", &merges);
    }
    m.u32("tokenizer.ggml.eos_token_id", u32::from(first >> 3 & 3));
    let Some(file) = m.open() else { return };
    if let Ok(tokenizer) = Tokenizer::from_gguf(&file) {
        both_ways(&tokenizer, text);
    }
}

/// The template, a zero byte, then messages separated by zero bytes; the first byte of each says who speaks.
pub fn chat_template(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split('\0');
    let jinja = parts.next().unwrap_or_default();
    let Ok(template) = ChatTemplate::recognise(jinja) else { return };
    let messages: Vec<Message<'_>> = parts.map(message).collect();
    for prompt in [false, true] {
        let Ok(parts) = template.parts(&messages, prompt) else { continue };
        let rendered = template.render(&messages, prompt).expect("parts and text agree");
        assert_eq!(parts.iter().map(|p| p.text.as_ref()).collect::<String>(), rendered);
        assert!(!prompt || rendered.ends_with(template.generation_prompt()));
        let told: Vec<&str> = parts.iter().filter(|p| !p.parse_special).map(|p| p.text.as_ref()).collect();
        assert!(told.len() <= messages.len());
        for text in told {
            assert!(messages.iter().any(|m| m.content.contains(text)), "only messages are plain text");
        }
        for part in parts.iter().filter(|p| p.parse_special) {
            let leaked = messages.iter().find(|m| m.content.len() > 64 && part.text.contains(m.content));
            assert!(leaked.is_none_or(|m| jinja.contains(m.content)), "a message is never parsed as markup");
        }
    }
    assert!(!template.end_of_answer().is_empty());
}

fn message(text: &str) -> Message<'_> {
    let role = match text.bytes().next() {
        Some(b's') => Role::System,
        Some(b'a') => Role::Assistant,
        _ => Role::User,
    };
    let mut rest = text.chars();
    rest.next();
    Message { role, content: rest.as_str() }
}
