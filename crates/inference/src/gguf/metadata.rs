//! The metadata of a model: keys and values in order, looked up by exact type.

use super::{Array, FromValue, GgufError, Value, value};
use std::collections::HashMap;

/// Keys and values in file order. The same whether they come from a GGUF file or were made from the JSON files of
/// a safetensors model.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// The first of several entries with one key counts.
    #[must_use]
    pub fn new(entries: Vec<(String, Value)>) -> Self {
        let by_key = entries.iter().enumerate().rev().map(|(i, (k, _))| (k.clone(), i)).collect();
        Self { entries, by_key }
    }
    /// All entries in order.
    #[must_use]
    pub fn entries(&self) -> &[(String, Value)] {
        &self.entries
    }
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }
    /// A key that must be there, with exactly this type: `metadata.required::<u32>("llama.block_count")?`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], [`GgufError::WrongType`].
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.optional(key)?.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })
    }
    /// A key that may be absent, but must have this type if it is there.
    ///
    /// # Errors
    /// [`GgufError::WrongType`].
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        self.get(key).map(|v| value::typed(key, v)).transpose()
    }
    /// # Errors
    /// As [`Metadata::required`].
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Metadata::required`].
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Metadata::required`].
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Metadata::required`].
    pub fn array(&self, key: &str) -> Result<&Array, GgufError> {
        self.required(key)
    }
}
