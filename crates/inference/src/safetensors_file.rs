//! Safetensors files over a memory map: names, shapes and bytes, checked when the file is opened.

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, tensor::Metadata};
use std::{
    fs::File,
    path::{Path, PathBuf},
};

/// Why a safetensors file, or one tensor of it, cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub struct SafetensorsError {
    pub path: PathBuf,
    pub what: String,
}

#[derive(Debug)]
enum Source {
    Map(Mmap),
    Memory(Vec<u8>),
}

/// An opened file; tensor bytes stay in the page cache until touched.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    source: Source,
    /// Byte where the data of the tensors starts.
    start: usize,
    metadata: Metadata,
}

/// One tensor.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    file: &'a SafetensorsFile,
    pub name: &'a str,
    /// Outermost dimension first, as in PyTorch.
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub bytes: &'a [u8],
}

impl SafetensorsFile {
    /// Opens `path`, which must not be written in place while the value lives.
    ///
    /// # Errors
    /// [`SafetensorsError`] if it cannot be read or is not a whole file of this format.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let error = |e: std::io::Error| SafetensorsError { path: path.to_owned(), what: e.to_string() };
        let file = File::open(path).map_err(error)?;
        // SAFETY: read-only map of a model file that is only ever replaced by rename, never written in place;
        // all offsets are checked against the mapped length.
        let map = unsafe { Mmap::map(&file) }.map_err(error)?;
        Self::parse(path, Source::Map(map))
    }

    /// The same over bytes in memory; `path` is for messages.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, SafetensorsError> {
        Self::parse(path, Source::Memory(bytes))
    }

    fn parse(path: &Path, source: Source) -> Result<Self, SafetensorsError> {
        let bytes: &[u8] = match &source {
            Source::Map(map) => map,
            Source::Memory(bytes) => bytes,
        };
        // The parser checks that the tensors cover the data exactly.
        let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| SafetensorsError {
            path: path.to_owned(),
            what: format!("not a whole safetensors file: {e}"),
        })?;
        Ok(Self { path: path.to_owned(), source, start: header + 8, metadata })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Names of all tensors, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort_unstable();
        names
    }
    /// A text that the writer left in the header.
    #[must_use]
    pub fn note(&self, key: &str) -> Option<String> {
        self.metadata.metadata().as_ref()?.get(key).cloned()
    }
    /// A tensor that may be absent.
    #[must_use]
    pub fn find<'a>(&'a self, name: &'a str) -> Option<View<'a>> {
        let info = self.metadata.info(name)?;
        let bytes: &[u8] = match &self.source {
            Source::Map(map) => map,
            Source::Memory(bytes) => bytes,
        };
        let (from, to) = info.data_offsets;
        let bytes = bytes.get(self.start.checked_add(from)?..self.start.checked_add(to)?)?;
        Some(View { file: self, name, shape: &info.shape, dtype: info.dtype, bytes })
    }
    /// A tensor that must be there with this shape.
    ///
    /// # Errors
    /// [`SafetensorsError`] naming the tensor.
    pub fn get<'a>(&'a self, name: &'a str, shape: &[usize]) -> Result<View<'a>, SafetensorsError> {
        let view = self.find(name).ok_or_else(|| self.error(format!("there is no tensor `{name}`")))?;
        if view.shape == shape {
            Ok(view)
        } else {
            Err(view.error(format!("shape {:?}, expected {shape:?}", view.shape)))
        }
    }
    fn error(&self, what: String) -> SafetensorsError {
        SafetensorsError { path: self.path.clone(), what }
    }
}

impl View<'_> {
    /// A complaint about this tensor.
    pub(crate) fn error(&self, what: impl AsRef<str>) -> SafetensorsError {
        self.file.error(format!("tensor `{}`: {}", self.name, what.as_ref()))
    }

    /// All values, row-major.
    ///
    /// # Errors
    /// [`SafetensorsError`] for another type than F32, F16 and BF16, or a value that is not finite.
    pub fn values(&self) -> Result<Vec<f32>, SafetensorsError> {
        let halves = || self.bytes.as_chunks::<2>().0.iter();
        let values: Vec<f32> = match self.dtype {
            Dtype::F32 => self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => halves().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => halves().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(self.error(format!("type {other:?} is not supported"))),
        };
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => Err(self.error(format!("value {at} is {}", values[at]))),
            None => Ok(values),
        }
    }
}
