//! GGUF files: a strict, bounds-checked reader over a memory map and an ordered, atomic v3 writer.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.
//! The reader accepts at most what stock llama.cpp accepts and refuses what it does not know: a file that is
//! opened here is whole, has contiguous tensors in listed order, and only decodable types.

mod error;
mod read;
mod tensor;
mod value;
mod write;

pub use error::GgufError;
pub use tensor::{TensorInfo, TensorSpec, TensorType, UnknownTensorType};
pub use value::{Array, FromValue, Value};
pub use write::{TensorData, Writer, file_bytes, write};
pub(crate) use write::{encode_str, encode_value};

use memmap2::Mmap;
use std::{collections::HashMap, fs::File, path::Path};

/// Alignment of the data section when `general.alignment` is absent.
pub const DEFAULT_ALIGNMENT: u32 = 32;
/// Longest tensor name plus one, as in ggml.
pub const MAX_NAME: usize = 64;

/// Where the bytes are.
#[derive(Debug)]
enum Source {
    Map(Mmap),
    Memory(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Map(m) => m,
            Self::Memory(v) => v,
        }
    }
}

/// An opened GGUF file. Cheap to share behind `Arc`; tensor bytes stay in the page cache until touched.
#[derive(Debug)]
pub struct Gguf {
    source: Source,
    head: read::Head,
    by_key: HashMap<String, usize>,
    by_tensor: HashMap<String, usize>,
}

impl Gguf {
    /// Opens and checks `path`. The file must not be changed while the value lives: our own writers only
    /// ever replace files by rename, which leaves an open map intact.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Malformed`] for bytes that are not a whole valid file,
    /// [`GgufError::Unsupported`] for a version or tensor type that is not known.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(|e| GgufError::io(path, e))?;
        // SAFETY: the map is read-only; the documented contract is that nobody writes into a model file in
        // place. All offsets are checked against the mapped length before use.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| GgufError::io(path, e))?;
        Self::parse(Source::Map(map))
    }

    /// The same over bytes in memory.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::parse(Source::Memory(bytes))
    }

    fn parse(source: Source) -> Result<Self, GgufError> {
        let head = read::parse(source.bytes())?;
        let by_key = head.metadata.iter().enumerate().map(|(i, (k, _))| (k.clone(), i)).collect();
        let by_tensor = head.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { source, head, by_key, by_tensor })
    }

    /// Format version of the file, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.head.version
    }
    /// Alignment of tensor data, bytes.
    #[must_use]
    pub fn alignment(&self) -> u32 {
        self.head.alignment
    }
    /// Size of the whole file, bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.source.bytes().len() as u64
    }
    /// All metadata in file order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.head.metadata
    }
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.head.metadata[i].1)
    }
    /// A key that must be there, with exactly this type: `gguf.required::<u32>("llama.block_count")?`.
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
    /// As [`Gguf::required`].
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Gguf::required`].
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Gguf::required`].
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key)
    }
    /// # Errors
    /// As [`Gguf::required`].
    pub fn array(&self, key: &str) -> Result<&Array, GgufError> {
        self.required(key)
    }

    /// All tensors in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.head.tensors
    }
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.find(name).ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })
    }
    /// A tensor that may be absent (biases, an untied output).
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.by_tensor.get(name).map(|&i| &self.head.tensors[i])
    }
    /// Raw data of a tensor of THIS file, rows one after the other; not aligned for wider types.
    /// An entry of another file gives whatever overlaps this file, never out-of-bounds memory.
    #[must_use]
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        let all = self.source.bytes();
        let from = self.head.data_start.saturating_add(tensor.offset as usize).min(all.len());
        let to = from.saturating_add(tensor.len).min(all.len());
        &all[from..to]
    }
    /// All weights as `f32`, row-major (`rows × row_len`); rows are decoded in parallel.
    /// Bit-exact to ggml's own dequantisation.
    ///
    /// # Errors
    /// [`GgufError::Tensor`] if the entry does not belong to this file.
    pub fn dequantize(&self, tensor: &TensorInfo) -> Result<Vec<f32>, GgufError> {
        crate::codec::dequantize(tensor.ty, self.bytes(tensor), tensor.n_elements())
            .map_err(|e| GgufError::tensor(&tensor.name, e.to_string()))
    }
}

#[cfg(test)]
mod tests;
