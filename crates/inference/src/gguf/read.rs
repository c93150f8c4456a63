//! Parser of the head of a GGUF file: every length is checked against the bytes that are left before it is
//! used for memory or arithmetic.

use super::{Array, DEFAULT_ALIGNMENT, GgufError, MAX_NAME, TensorInfo, TensorType, Value};
use std::collections::HashSet;

/// Everything before the tensor data.
#[derive(Debug)]
pub(super) struct Head {
    pub version: u32,
    pub alignment: u32,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<TensorInfo>,
    /// Byte of the file where tensor data starts.
    pub data_start: usize,
}

/// Smallest encodings, used to refuse absurd counts before allocating.
const MIN_KV_BYTES: usize = 8 + 1 + 4 + 1;
const MIN_TENSOR_BYTES: usize = 8 + 1 + 4 + 8 + 4 + 8;
const MAX_DIMS: u32 = 4;

pub(super) fn parse(bytes: &[u8]) -> Result<Head, GgufError> {
    let mut c = Cursor { bytes, at: 0 };
    let version = version(&mut c)?;
    let n_tensors = c.count("tensor count", MIN_TENSOR_BYTES)?;
    let n_kv = c.count("metadata count", MIN_KV_BYTES)?;
    let metadata = metadata(&mut c, n_kv)?;
    let alignment = alignment(&metadata)?;
    let tensors = tensors(&mut c, n_tensors, alignment as usize)?;
    let data_start = pad(c.at, alignment as usize).ok_or_else(|| c.error("header too large"))?;
    check_extent(bytes.len(), data_start, &tensors, alignment as usize)?;
    Ok(Head { version, alignment, metadata, tensors, data_start })
}

fn version(c: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let magic = c.take(4, "magic")?;
    if magic != b"GGUF" {
        return Err(GgufError::malformed(0, format!("the magic is {magic:02x?}, not \"GGUF\"")));
    }
    let version = c.u32("version")?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(GgufError::Unsupported {
            what: "version 1 (32-bit lengths); convert the file with a current llama.cpp first".into(),
        }),
        v if v.swap_bytes() == 2 || v.swap_bytes() == 3 => {
            Err(GgufError::Unsupported { what: "a big-endian file; convert it to little-endian".into() })
        }
        v => Err(GgufError::Unsupported { what: format!("version {v}; known are 2 and 3") }),
    }
}

fn metadata(c: &mut Cursor<'_>, n: usize) -> Result<Vec<(String, Value)>, GgufError> {
    let mut out = Vec::with_capacity(n);
    let mut seen = HashSet::with_capacity(n);
    for _ in 0..n {
        let at = c.at;
        let key = c.string("metadata key")?.to_owned();
        if key.is_empty() {
            return Err(GgufError::malformed(at, "empty metadata key"));
        }
        if !seen.insert(key.clone()) {
            return Err(GgufError::malformed(at, format!("duplicate metadata key `{key}`")));
        }
        let kind = c.u32("type of a metadata value")?;
        let value = value(c, &key, kind)?;
        out.push((key, value));
    }
    Ok(out)
}

fn value(c: &mut Cursor<'_>, key: &str, kind: u32) -> Result<Value, GgufError> {
    Ok(match kind {
        0 => Value::U8(c.scalar(u8::from_le_bytes, key)?),
        1 => Value::I8(c.scalar(i8::from_le_bytes, key)?),
        2 => Value::U16(c.scalar(u16::from_le_bytes, key)?),
        3 => Value::I16(c.scalar(i16::from_le_bytes, key)?),
        4 => Value::U32(c.scalar(u32::from_le_bytes, key)?),
        5 => Value::I32(c.scalar(i32::from_le_bytes, key)?),
        6 => Value::F32(c.scalar(f32::from_le_bytes, key)?),
        7 => Value::Bool(c.bool(key)?),
        8 => Value::String(c.string(key)?.to_owned()),
        9 => Value::Array(array(c, key)?),
        10 => Value::U64(c.scalar(u64::from_le_bytes, key)?),
        11 => Value::I64(c.scalar(i64::from_le_bytes, key)?),
        12 => Value::F64(c.scalar(f64::from_le_bytes, key)?),
        other => return Err(c.error(format!("metadata key `{key}` has unknown type {other}"))),
    })
}

fn array(c: &mut Cursor<'_>, key: &str) -> Result<Array, GgufError> {
    let kind = c.u32(key)?;
    Ok(match kind {
        0 => Array::U8(c.scalars(u8::from_le_bytes, key)?),
        1 => Array::I8(c.scalars(i8::from_le_bytes, key)?),
        2 => Array::U16(c.scalars(u16::from_le_bytes, key)?),
        3 => Array::I16(c.scalars(i16::from_le_bytes, key)?),
        4 => Array::U32(c.scalars(u32::from_le_bytes, key)?),
        5 => Array::I32(c.scalars(i32::from_le_bytes, key)?),
        6 => Array::F32(c.scalars(f32::from_le_bytes, key)?),
        7 => {
            let n = c.count(key, 1)?;
            Array::Bool((0..n).map(|_| c.bool(key)).collect::<Result<_, _>>()?)
        }
        8 => {
            let n = c.count(key, 8)?;
            Array::String((0..n).map(|_| c.string(key).map(str::to_owned)).collect::<Result<_, _>>()?)
        }
        10 => Array::U64(c.scalars(u64::from_le_bytes, key)?),
        11 => Array::I64(c.scalars(i64::from_le_bytes, key)?),
        12 => Array::F64(c.scalars(f64::from_le_bytes, key)?),
        9 => {
            return Err(GgufError::Unsupported { what: format!("metadata key `{key}` is an array of arrays") });
        }
        other => return Err(c.error(format!("metadata key `{key}` is an array of unknown type {other}"))),
    })
}

fn alignment(metadata: &[(String, Value)]) -> Result<u32, GgufError> {
    let Some((key, value)) = metadata.iter().find(|(k, _)| k == "general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let alignment: u32 = super::value::typed(key, value)?;
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(GgufError::malformed(0, format!("general.alignment is {alignment}, not a power of two")))
    }
}

fn tensors(c: &mut Cursor<'_>, n: usize, alignment: usize) -> Result<Vec<TensorInfo>, GgufError> {
    let mut out: Vec<TensorInfo> = Vec::with_capacity(n);
    let mut seen = HashSet::with_capacity(n);
    let mut expected = 0usize;
    for _ in 0..n {
        let at = c.at;
        let tensor = tensor(c)?;
        if !seen.insert(tensor.name.clone()) {
            return Err(GgufError::malformed(at, format!("duplicate tensor `{}`", tensor.name)));
        }
        if tensor.offset != expected as u64 {
            let what = format!(
                "tensor `{}` starts at {} of the data section, expected {expected}: tensors must be contiguous \
                 in listed order",
                tensor.name, tensor.offset
            );
            return Err(GgufError::malformed(at, what));
        }
        expected = expected
            .checked_add(tensor.len)
            .and_then(|end| pad(end, alignment))
            .ok_or_else(|| GgufError::malformed(at, "the sizes of the tensors overflow"))?;
        out.push(tensor);
    }
    Ok(out)
}

fn tensor(c: &mut Cursor<'_>) -> Result<TensorInfo, GgufError> {
    let at = c.at;
    let name = c.string("tensor name")?.to_owned();
    if name.is_empty() || name.len() >= MAX_NAME {
        let what = format!("tensor name of {} bytes; allowed are 1 to {}", name.len(), MAX_NAME - 1);
        return Err(GgufError::malformed(at, what));
    }
    let n_dims = c.u32("number of dimensions")?;
    if n_dims == 0 || n_dims > MAX_DIMS {
        return Err(c.error(format!("tensor `{name}` has {n_dims} dimensions; allowed are 1 to {MAX_DIMS}")));
    }
    let dims: Vec<u64> = (0..n_dims).map(|_| c.scalar(u64::from_le_bytes, "dimension")).collect::<Result<_, _>>()?;
    let id = c.u32("tensor type")?;
    let ty = TensorType::from_id(id).ok_or_else(|| GgufError::Unsupported {
        what: format!("tensor `{name}` has type {} ({id}), which this program cannot decode", type_name(id)),
    })?;
    let len = data_len(ty, &dims)
        .ok_or_else(|| c.error(format!("tensor `{name}` of type {ty} cannot have shape {dims:?}")))?;
    let offset = c.scalar(u64::from_le_bytes, "tensor offset")?;
    Ok(TensorInfo { name, dims, ty, offset, len, shard: 0 })
}

/// Bytes of a tensor; `None` for an empty dimension, a row that is not whole blocks, or an overflow.
pub(super) fn data_len(ty: TensorType, dims: &[u64]) -> Option<usize> {
    let mut row = None;
    let mut rows = 1usize;
    for &d in dims {
        let d = usize::try_from(d).ok().filter(|&d| d > 0 && i64::try_from(d).is_ok())?;
        if row.is_none() {
            row = Some(d);
        } else {
            rows = rows.checked_mul(d)?;
        }
    }
    // The number of weights must fit too, since callers multiply it out.
    row?.checked_mul(rows)?.checked_mul(4)?;
    ty.row_bytes(row?)?.checked_mul(rows)
}

/// The data must be there, with nothing but padding after it.
fn check_extent(size: usize, start: usize, tensors: &[TensorInfo], alignment: usize) -> Result<(), GgufError> {
    let Some(last) = tensors.last() else { return Ok(()) };
    let end = start.checked_add(last.offset as usize).and_then(|at| at.checked_add(last.len));
    let Some(end) = end.filter(|&end| end <= size) else {
        let first = tensors.iter().find(|t| {
            start.checked_add(t.offset as usize).and_then(|at| at.checked_add(t.len)).is_none_or(|e| e > size)
        });
        let name = first.map_or(last.name.as_str(), |t| t.name.as_str());
        let what = format!("the file ends inside the data of tensor `{name}`: it is truncated");
        return Err(GgufError::malformed(size, what));
    };
    let limit = pad(end, alignment).unwrap_or(end);
    if size > limit {
        let what = format!("{} bytes follow the last tensor: the file is not what its header says", size - limit);
        return Err(GgufError::malformed(limit, what));
    }
    Ok(())
}

/// `at` rounded up to a multiple of `alignment` (a power of two).
pub(super) fn pad(at: usize, alignment: usize) -> Option<usize> {
    at.checked_next_multiple_of(alignment)
}

/// Names of ggml types that are known but not decodable here, for the message.
fn type_name(id: u32) -> &'static str {
    match id {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn error(&self, what: impl Into<String>) -> GgufError {
        GgufError::malformed(self.at, what)
    }
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], GgufError> {
        if n > self.left() {
            return Err(self.error(format!("{what}: {n} bytes needed, {} left: truncated", self.left())));
        }
        let out = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(out)
    }
    fn scalar<const N: usize, T>(&mut self, read: fn([u8; N]) -> T, what: &str) -> Result<T, GgufError> {
        let mut raw = [0; N];
        raw.copy_from_slice(self.take(N, what)?);
        Ok(read(raw))
    }
    fn scalars<const N: usize, T>(&mut self, read: fn([u8; N]) -> T, what: &str) -> Result<Vec<T>, GgufError> {
        let n = self.count(what, N)?;
        let raw = self.take(n * N, what)?;
        Ok(raw.as_chunks::<N>().0.iter().map(|c| read(*c)).collect())
    }
    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.scalar(u32::from_le_bytes, what)
    }
    fn bool(&mut self, key: &str) -> Result<bool, GgufError> {
        match self.scalar(u8::from_le_bytes, key)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.error(format!("{key}: a boolean is {other}"))),
        }
    }
    /// A count of things of at least `each` bytes: refused if they cannot all be there.
    fn count(&mut self, what: &str, each: usize) -> Result<usize, GgufError> {
        let n = self.scalar(u64::from_le_bytes, what)?;
        usize::try_from(n)
            .ok()
            .filter(|&n| n <= self.left() / each)
            .ok_or_else(|| self.error(format!("{what}: {n} entries do not fit in the {} bytes left", self.left())))
    }
    fn string(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let at = self.at;
        let n = self.count(what, 1)?;
        std::str::from_utf8(self.take(n, what)?)
            .map_err(|_| GgufError::malformed(at, format!("{what}: a string is not UTF-8")))
    }
}
