//! Attribute values and records as both walkers see them: borrowed from the body wherever possible.

use crate::column::Text;
use std::borrow::Cow;

/// An OTLP `AnyValue`.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    Null,
    Text(Cow<'a, str>),
    Bool(bool),
    Int(i64),
    /// Also carries NaN and infinities; the mapper turns them into NULL.
    Double(f64),
    List(Vec<Value<'a>>),
    /// A map as JSON text: kept only in `attrs`.
    Map(String),
    /// Bytes in the encoding's own text form: kept only in `attrs`.
    Bytes(String),
}

impl<'a> Value<'a> {
    /// Text form for a text column.
    #[must_use]
    pub fn to_text(&self) -> Option<Text<'a>> {
        match self {
            Self::Null => None,
            Self::Text(s) => Some(s.clone()),
            Self::Bool(b) => Some(Cow::Borrowed(if *b { "true" } else { "false" })),
            Self::Int(i) => Some(i.to_string().into()),
            Self::Double(d) => d.is_finite().then(|| d.to_string().into()),
            Self::List(_) => self.to_json().map(Cow::Owned),
            Self::Map(s) | Self::Bytes(s) => Some(s.clone().into()),
        }
    }
    /// JSON text in which every scalar is a string; `None` for what has no text. Lists and maps stay nested: as text
    /// within text their quotes would be escaped anew at every level, and double each time.
    #[must_use]
    pub fn to_json(&self) -> Option<String> {
        match self {
            Self::List(items) => {
                let parts: Vec<String> = items.iter().filter_map(Value::to_json).collect();
                Some(format!("[{}]", parts.join(",")))
            }
            Self::Map(json) => Some(json.clone()),
            Self::Null | Self::Text(_) | Self::Bool(_) | Self::Int(_) | Self::Double(_) | Self::Bytes(_) => {
                self.to_text().map(|text| serde_json::Value::from(text).to_string())
            }
        }
    }
    /// Whole number; a double with a fraction is none.
    #[must_use]
    pub fn to_int(&self) -> Option<i64> {
        match self {
            Self::Int(i) => Some(*i),
            Self::Double(d) if d.fract() == 0.0 && d.abs() < 9.0e15 => Some(*d as i64),
            Self::Text(s) => s.parse().ok(),
            Self::Null | Self::Bool(_) | Self::Double(_) | Self::List(_) | Self::Map(_) | Self::Bytes(_) => None,
        }
    }
    /// Floating point number, possibly not finite.
    #[must_use]
    pub fn to_double(&self) -> Option<f64> {
        match self {
            Self::Int(i) => Some(*i as f64),
            Self::Double(d) => Some(*d),
            Self::Text(s) => s.parse().ok(),
            Self::Null | Self::Bool(_) | Self::List(_) | Self::Map(_) | Self::Bytes(_) => None,
        }
    }
    /// Truth value, also from text.
    #[must_use]
    pub fn to_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            Self::Text(s) => s.parse().ok(),
            Self::Null | Self::Int(_) | Self::Double(_) | Self::List(_) | Self::Map(_) | Self::Bytes(_) => None,
        }
    }
}

/// A key with its value.
pub type Attribute<'a> = (Text<'a>, Value<'a>);

/// One log record, span, or span event.
#[derive(Debug, Clone, Default)]
pub struct Record<'a> {
    /// Event name of a log record, name of a span.
    pub name: Cow<'a, str>,
    pub is_span: bool,
    /// Start of a span, or the time of a log record; 0 = not given.
    pub time_ns: u64,
    pub end_ns: u64,
    pub trace_id: Cow<'a, [u8]>,
    pub span_id: Cow<'a, [u8]>,
    pub attributes: Vec<Attribute<'a>>,
    pub events: Vec<Record<'a>>,
    /// Strings in which invalid UTF-8 was replaced by U+FFFD.
    pub repaired: u32,
}

impl Record<'_> {
    /// Empties the record for the next one; the room for attributes stays.
    pub fn clear(&mut self) {
        let (mut attributes, mut events) = (std::mem::take(&mut self.attributes), std::mem::take(&mut self.events));
        attributes.clear();
        events.clear();
        *self = Self { attributes, events, ..Self::default() };
    }
}

/// Text of `bytes`; invalid UTF-8 is repaired and counted (SDKs that cut strings by bytes send it).
pub fn text<'a>(bytes: &'a [u8], repaired: &mut u32) -> Cow<'a, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => {
            *repaired += 1;
            String::from_utf8_lossy(bytes)
        }
    }
}

/// Receives what a walker finds.
pub trait Sink<'a> {
    /// A record with the attributes of its resource.
    fn record(&mut self, resource: &[Attribute<'a>], record: &Record<'a>);
    /// A record that could not be read.
    fn broken(&mut self, reason: &'static str, detail: String);
    /// Records seen so far, kept or not.
    fn seen(&self) -> usize;
}
