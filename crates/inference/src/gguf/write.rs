//! Ordered v3 writer: temporary file, fsync, rename, fsync of the folder. A crash leaves the old file or none.

use super::{Array, DEFAULT_ALIGNMENT, GgufError, MAX_NAME, TensorSpec, Value, read};
use std::{
    borrow::Cow,
    collections::HashSet,
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

/// Data of one tensor for [`write`]: ready, or made when its turn comes so that one tensor is in memory at a time.
pub enum TensorData<'a> {
    Bytes(Cow<'a, [u8]>),
    Lazy(Box<dyn FnOnce() -> Result<Vec<u8>, GgufError> + 'a>),
}

/// Writes a whole file: metadata in the given order, tensors in iterator order. The file appears under `path`
/// only when complete and durable. Returns its size in bytes.
///
/// # Errors
/// [`GgufError::Write`] for anything stock llama.cpp would refuse, [`GgufError::Io`], or what a lazy tensor returned.
pub fn write<'a>(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: impl IntoIterator<Item = (TensorSpec, TensorData<'a>)>,
) -> Result<u64, GgufError> {
    let (specs, data): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let mut writer = Writer::create(path, metadata, &specs)?;
    for data in data {
        writer.push_data(data)?;
    }
    writer.finish()
}

/// Size of the file that [`write`] would make, bytes.
///
/// # Errors
/// As [`Writer::create`], without touching a file.
pub fn file_bytes(metadata: &[(String, Value)], specs: &[TensorSpec]) -> Result<u64, GgufError> {
    let alignment = checked_alignment(metadata)?;
    let tensors = checked_tensors(specs)?;
    let mut head = Vec::new();
    encode_head(&mut head, metadata, specs, &tensors, alignment);
    let data: usize = tensors.iter().map(|(_, len)| len.next_multiple_of(alignment)).sum();
    Ok((head.len().next_multiple_of(alignment) + data) as u64)
}

/// Step-by-step form of [`write`]: [`Writer::create`], one [`Writer::push`] per tensor in order, [`Writer::finish`].
/// Dropped before `finish`, it removes its temporary file.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    temp: PathBuf,
    out: Option<BufWriter<File>>,
    alignment: usize,
    /// Name and byte length of each tensor.
    tensors: Vec<(String, usize)>,
    next: usize,
    written: usize,
}

impl Writer {
    /// Checks everything that can be checked, then writes the header to a temporary file beside `path`.
    /// `general.alignment` in `metadata` is honoured.
    ///
    /// # Errors
    /// [`GgufError::Write`], [`GgufError::WrongType`], [`GgufError::Io`].
    pub fn create(path: &Path, metadata: &[(String, Value)], specs: &[TensorSpec]) -> Result<Self, GgufError> {
        let alignment = checked_alignment(metadata)?;
        let tensors = checked_tensors(specs)?;
        let mut head = Vec::new();
        encode_head(&mut head, metadata, specs, &tensors, alignment);
        head.resize(head.len().next_multiple_of(alignment), 0);
        let temp = temp_path(path)?;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temp)
            .map_err(|e| GgufError::io(&temp, e))?;
        let mut this = Self {
            path: path.to_owned(),
            temp,
            out: Some(BufWriter::with_capacity(1 << 20, file)),
            alignment,
            tensors,
            next: 0,
            written: 0,
        };
        this.put(&head)?;
        Ok(this)
    }

    /// Writes the next tensor.
    ///
    /// # Errors
    /// [`GgufError::Write`] if the length is not that of the tensor's type and shape, or there is no tensor left.
    pub fn push(&mut self, data: &[u8]) -> Result<(), GgufError> {
        let Some((name, len)) = self.tensors.get(self.next) else {
            return Err(refuse("more data than tensors"));
        };
        if data.len() != *len {
            return Err(refuse(format!("tensor `{name}` needs {len} bytes, got {}", data.len())));
        }
        self.next += 1;
        self.put(data)?;
        let padding = self.written.next_multiple_of(self.alignment) - self.written;
        if padding > 0 {
            self.put(&vec![0; padding])?;
        }
        Ok(())
    }

    /// Writes the next tensor, making it if need be.
    pub(super) fn push_data(&mut self, data: TensorData<'_>) -> Result<(), GgufError> {
        match data {
            TensorData::Bytes(bytes) => self.push(&bytes),
            TensorData::Lazy(make) => self.push(&make()?),
        }
    }

    /// Makes the file durable and visible; returns its size in bytes.
    ///
    /// # Errors
    /// [`GgufError::Write`] if tensors are missing, [`GgufError::Io`].
    pub fn finish(self) -> Result<u64, GgufError> {
        self.seal()?.publish()
    }

    /// Makes the data durable under its temporary name.
    pub(super) fn seal(mut self) -> Result<Sealed, GgufError> {
        if let Some((name, _)) = self.tensors.get(self.next) {
            return Err(refuse(format!("the data of tensor `{name}` was never given")));
        }
        let Some(out) = self.out.take() else { return Err(refuse("the writer is already closed")) };
        let sealed = Sealed { path: self.path.clone(), temp: self.temp.clone(), size: self.written as u64 };
        // From here on `sealed` removes the temporary file.
        out.into_inner()
            .map_err(std::io::IntoInnerError::into_error)
            .and_then(|file| file.sync_all())
            .map_err(|e| GgufError::io(&self.temp, e))?;
        Ok(sealed)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        let Some(out) = self.out.as_mut() else { return Err(refuse("the writer is already closed")) };
        out.write_all(bytes).map_err(|e| GgufError::io(&self.temp, e))?;
        self.written += bytes.len();
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            remove(&self.temp);
        }
    }
}

/// A whole, durable file that still has its temporary name; dropped before [`Sealed::publish`], it is removed.
#[derive(Debug)]
pub(super) struct Sealed {
    path: PathBuf,
    temp: PathBuf,
    size: u64,
}

impl Sealed {
    /// Gives the file its name; returns its size in bytes.
    pub fn publish(self) -> Result<u64, GgufError> {
        fs::rename(&self.temp, &self.path)
            .and_then(|()| sync_parent(&self.path))
            .map_err(|e| GgufError::io(&self.path, e))?;
        Ok(self.size)
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        // After publishing there is nothing under this name.
        remove(&self.temp);
    }
}

fn remove(temp: &Path) {
    // Best effort: the error that led here is the one worth reporting.
    let _ = fs::remove_file(temp);
}

pub(super) fn refuse(what: impl Into<String>) -> GgufError {
    GgufError::Write { what: what.into() }
}

fn temp_path(path: &Path) -> Result<PathBuf, GgufError> {
    let name = path.file_name().ok_or_else(|| refuse(format!("{} is not a file name", path.display())))?;
    let mut temp = OsString::from(".");
    temp.push(name);
    temp.push(format!(".{}.part", std::process::id()));
    Ok(path.with_file_name(temp))
}

pub(super) fn sync_parent(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

pub(super) fn checked_alignment(metadata: &[(String, Value)]) -> Result<usize, GgufError> {
    let mut seen = HashSet::with_capacity(metadata.len());
    let mut alignment = DEFAULT_ALIGNMENT;
    for (key, value) in metadata {
        if key.is_empty() || !seen.insert(key.as_str()) {
            return Err(refuse(format!("metadata key `{key}` is empty or given twice")));
        }
        if key == "general.alignment" {
            alignment = super::value::typed(key, value)?;
        }
    }
    if alignment.is_power_of_two() {
        Ok(alignment as usize)
    } else {
        Err(refuse(format!("general.alignment is {alignment}, not a power of two")))
    }
}

pub(super) fn checked_tensors(specs: &[TensorSpec]) -> Result<Vec<(String, usize)>, GgufError> {
    let mut seen = HashSet::with_capacity(specs.len());
    let mut out = Vec::with_capacity(specs.len());
    for spec in specs {
        let name = &spec.name;
        if name.is_empty() || name.len() >= MAX_NAME || !seen.insert(name.as_str()) {
            return Err(refuse(format!(
                "tensor name `{name}` is empty, given twice, or longer than {} bytes",
                MAX_NAME - 1
            )));
        }
        let len = (1..=4).contains(&spec.dims.len()).then(|| read::data_len(spec.ty, &spec.dims)).flatten();
        let len = len
            .ok_or_else(|| refuse(format!("tensor `{name}` of type {} cannot have shape {:?}", spec.ty, spec.dims)))?;
        out.push((name.clone(), len));
    }
    Ok(out)
}

fn encode_head(
    out: &mut Vec<u8>,
    metadata: &[(String, Value)],
    specs: &[TensorSpec],
    tensors: &[(String, usize)],
    alignment: usize,
) {
    out.extend_from_slice(b"GGUF");
    out.extend_from_slice(&3u32.to_le_bytes());
    out.extend_from_slice(&(specs.len() as u64).to_le_bytes());
    out.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        encode_str(out, key);
        encode_value(out, value);
    }
    let mut offset = 0usize;
    for (spec, (_, len)) in specs.iter().zip(tensors) {
        encode_str(out, &spec.name);
        out.extend_from_slice(&(spec.dims.len() as u32).to_le_bytes());
        for d in &spec.dims {
            out.extend_from_slice(&d.to_le_bytes());
        }
        out.extend_from_slice(&spec.ty.id().to_le_bytes());
        out.extend_from_slice(&(offset as u64).to_le_bytes());
        offset += len.next_multiple_of(alignment);
    }
}

/// Length and bytes, as in the file.
pub(crate) fn encode_str(out: &mut Vec<u8>, s: &str) {
    out.extend_from_slice(&(s.len() as u64).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

/// Type and value, as in the file.
pub(crate) fn encode_value(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(&value.kind().0.to_le_bytes());
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => encode_str(out, v),
        Value::Array(v) => encode_array(out, v),
        Value::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
    }
}

fn encode_array(out: &mut Vec<u8>, array: &Array) {
    out.extend_from_slice(&array.element().0.to_le_bytes());
    out.extend_from_slice(&(array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|&b| u8::from(b))),
        Array::String(v) => v.iter().for_each(|s| encode_str(out, s)),
        Array::U64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
    }
}
