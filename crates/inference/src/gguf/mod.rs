//! GGUF files: a strict, bounds-checked reader over memory maps and an ordered, atomic v3 writer, both for one
//! file and for a set of shards.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.
//! The reader accepts at most what stock llama.cpp accepts and refuses what it does not know: a file that is
//! opened here is whole, has contiguous tensors in listed order, and only decodable types.

mod error;
mod metadata;
mod read;
mod shards;
mod tensor;
mod value;
mod write;

pub use error::GgufError;
pub use metadata::Metadata;
pub use shards::{shard_path, write_shards};
pub use tensor::{TensorInfo, TensorSpec, TensorType, UnknownTensorType};
pub use value::{Array, FromValue, Value};
pub use write::{TensorData, Writer, file_bytes, write};
pub(crate) use write::{encode_str, encode_value};

use memmap2::Mmap;
use std::{collections::HashMap, fs::File, ops::Deref, path::Path, sync::Arc};

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
    fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(|e| GgufError::io(path, e))?;
        // SAFETY: the map is read-only; the documented contract is that nobody writes into a model file in
        // place. All offsets are checked against the mapped length before use.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| GgufError::io(path, e))?;
        Ok(Self::Map(map))
    }
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Map(m) => m,
            Self::Memory(v) => v,
        }
    }
}

/// One file of a model.
#[derive(Debug)]
struct Part {
    source: Source,
    /// Byte of the file where tensor data starts.
    data_start: usize,
}

/// An opened model: one GGUF file, or the set of its shards, which reads as if it were one file. Cheap to share
/// behind `Arc`; tensor bytes stay in the page cache until touched. Dereferences to its [`Metadata`].
#[derive(Debug)]
pub struct Gguf {
    parts: Arc<Vec<Part>>,
    version: u32,
    alignment: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_tensor: HashMap<String, usize>,
}

impl Deref for Gguf {
    type Target = Metadata;
    fn deref(&self) -> &Metadata {
        &self.metadata
    }
}

impl Gguf {
    /// Opens and checks `path`, and with the first shard of a set (`…-00001-of-00003.gguf`) all others. The files
    /// must not be changed while the value lives: our own writers only ever replace files by rename, which leaves
    /// an open map intact. The `split.*` keys of shards are not part of the metadata.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Malformed`] for bytes that are not a whole valid file,
    /// [`GgufError::Unsupported`] for a version or tensor type that is not known, [`GgufError::Shards`] for a set
    /// that is incomplete or mixed, or entered by another shard than its first.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let source = Source::open(path)?;
        let head = read::parse(source.bytes())?;
        shards::complete(path, source, head)
    }

    /// The same over the bytes of one file in memory.
    ///
    /// # Errors
    /// As [`Gguf::open`]; a shard of a larger set is refused.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        let source = Source::Memory(bytes);
        let head = read::parse(source.bytes())?;
        shards::alone(source, head)
    }

    /// The files in order, each with its head; names of tensors are unique.
    fn assemble(files: Vec<(Source, read::Head)>) -> Self {
        let mut this = Self {
            parts: Arc::default(),
            version: 0,
            alignment: DEFAULT_ALIGNMENT,
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_tensor: HashMap::new(),
        };
        let mut parts = Vec::with_capacity(files.len());
        for (shard, (source, head)) in files.into_iter().enumerate() {
            if shard == 0 {
                (this.version, this.alignment) = (head.version, head.alignment);
                let own = head.metadata.into_iter().filter(|(k, _)| !k.starts_with(shards::KEYS)).collect();
                this.metadata = Metadata::new(own);
            }
            parts.push(Part { source, data_start: head.data_start });
            this.tensors.extend(head.tensors.into_iter().map(|t| TensorInfo { shard, ..t }));
        }
        this.parts = Arc::new(parts);
        this.by_tensor = this.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        this
    }

    /// Format version of the (first) file, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }
    /// Alignment of tensor data in the (first) file, bytes.
    #[must_use]
    pub fn alignment(&self) -> u32 {
        self.alignment
    }
    /// Number of files that the model lies in.
    #[must_use]
    pub fn n_files(&self) -> usize {
        self.parts.len()
    }
    /// Size of all files, bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.source.bytes().len() as u64).sum()
    }
    /// All metadata in file order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, Value)] {
        self.metadata.entries()
    }

    /// All tensors in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.find(name).ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })
    }
    /// A tensor that may be absent (biases, an untied output).
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.by_tensor.get(name).map(|&i| &self.tensors[i])
    }
    /// The tensors without metadata and names: cheap, shares the open files.
    pub(crate) fn tensors_only(&self) -> Self {
        Self {
            parts: self.parts.clone(),
            version: self.version,
            alignment: self.alignment,
            metadata: Metadata::default(),
            tensors: self.tensors.clone(),
            by_tensor: HashMap::new(),
        }
    }
    /// Raw data of a tensor of THIS model, rows one after the other; not aligned for wider types.
    /// An entry of another file gives whatever overlaps this file, never out-of-bounds memory.
    #[must_use]
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        let Some(part) = self.parts.get(tensor.shard) else { return &[] };
        let all = part.source.bytes();
        let from = part.data_start.saturating_add(tensor.offset as usize).min(all.len());
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
    /// Every tensor as something to write: with [`write`] shards become one file, with [`write_shards`] one file
    /// becomes shards.
    pub fn contents(&self) -> impl Iterator<Item = (TensorSpec, TensorData<'_>)> {
        self.tensors.iter().map(|t| (t.spec(), TensorData::Bytes(self.bytes(t).into())))
    }
}

#[cfg(test)]
mod shard_tests;
#[cfg(test)]
mod tests;
