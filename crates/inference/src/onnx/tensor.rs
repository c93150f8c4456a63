//! Element types, and constants that rewriting computes with.

use super::{OnnxError, proto::TensorProto};

/// Codes of `TensorProto.DataType`.
pub(super) const FLOAT: i32 = 1;
pub(super) const INT32: i32 = 6;
pub(super) const INT64: i32 = 7;
pub(super) const BOOL: i32 = 9;

/// Bits of an element; `None` for strings and codes that are not known.
pub(super) fn element_bits(code: i32) -> Option<u64> {
    Some(match code {
        25 | 26 => 2,
        21..=23 => 4,
        2 | 3 | BOOL | 17..=20 | 24 => 8,
        4 | 5 | 10 | 16 => 16,
        FLOAT | INT32 | 12 => 32,
        INT64 | 11 | 13 | 14 => 64,
        15 => 128,
        _ => return None,
    })
}

/// Product of dimensions, `None` when it overflows.
pub(super) fn count(dims: &[usize]) -> Option<usize> {
    dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
}

/// Values of the types that folding computes with.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Values {
    F32(Vec<f32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    Bool(Vec<bool>),
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::Bool(v) => v.len(),
        }
    }
    pub fn element(&self) -> i32 {
        match self {
            Self::F32(_) => FLOAT,
            Self::I32(_) => INT32,
            Self::I64(_) => INT64,
            Self::Bool(_) => BOOL,
        }
    }
    /// The values at these flat positions, in their order; `None` when one is outside.
    pub fn pick(&self, at: &[usize]) -> Option<Self> {
        fn take<T: Copy>(values: &[T], at: &[usize]) -> Option<Vec<T>> {
            at.iter().map(|i| values.get(*i).copied()).collect()
        }
        Some(match self {
            Self::F32(v) => Self::F32(take(v, at)?),
            Self::I32(v) => Self::I32(take(v, at)?),
            Self::I64(v) => Self::I64(take(v, at)?),
            Self::Bool(v) => Self::Bool(take(v, at)?),
        })
    }
}

/// A tensor whose values are known: row-major, last dimension fastest.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Constant {
    pub dims: Vec<usize>,
    pub values: Values,
}

impl Constant {
    /// `None` if the number of values is not that of the shape, or if distances between values would overflow (an empty
    /// tensor can have any other sizes).
    pub fn new(dims: Vec<usize>, values: Values) -> Option<Self> {
        let full: Vec<usize> = dims.iter().map(|d| (*d).max(1)).collect();
        let possible = count(&full).is_some_and(|n| n <= isize::MAX as usize);
        (possible && count(&dims) == Some(values.len())).then_some(Self { dims, values })
    }

    /// The constant of a checked tensor; `None` for types that folding does not compute with.
    pub fn read(tensor: &TensorProto) -> Option<Self> {
        let dims: Vec<usize> = tensor.dims.iter().map(|d| usize::try_from(*d).ok()).collect::<Option<_>>()?;
        let raw = tensor.raw_data.as_deref();
        let values = match tensor.data_type? {
            FLOAT => Values::F32(raw.map_or_else(|| tensor.float_data.clone(), |b| each(b, f32::from_le_bytes))),
            INT32 => Values::I32(raw.map_or_else(|| tensor.int32_data.clone(), |b| each(b, i32::from_le_bytes))),
            INT64 => Values::I64(raw.map_or_else(|| tensor.int64_data.clone(), |b| each(b, i64::from_le_bytes))),
            BOOL => Values::Bool(match raw {
                Some(bytes) => bytes.iter().map(|b| *b != 0).collect(),
                None => tensor.int32_data.iter().map(|v| *v != 0).collect(),
            }),
            _ => return None,
        };
        Self::new(dims, values)
    }

    /// As an initialiser with raw data.
    pub fn to_proto(&self, name: &str) -> TensorProto {
        let raw = match &self.values {
            Values::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::Bool(v) => v.iter().map(|x| u8::from(*x)).collect(),
        };
        TensorProto {
            dims: self.dims.iter().map(|d| *d as i64).collect(),
            data_type: Some(self.values.element()),
            name: Some(name.to_owned()),
            raw_data: Some(raw),
            ..TensorProto::default()
        }
    }

    pub fn floats(&self) -> Option<&[f32]> {
        if let Values::F32(v) = &self.values { Some(v) } else { None }
    }
    /// Integers of any width and truth values.
    pub fn ints_or_bools(&self) -> Option<Vec<i64>> {
        if let Values::Bool(v) = &self.values { Some(v.iter().map(|x| i64::from(*x)).collect()) } else { self.ints() }
    }
    /// Integers of either width.
    pub fn ints(&self) -> Option<Vec<i64>> {
        match &self.values {
            Values::I64(v) => Some(v.clone()),
            Values::I32(v) => Some(v.iter().map(|x| i64::from(*x)).collect()),
            _ => None,
        }
    }
}

fn each<const N: usize, T>(bytes: &[u8], read: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
}

/// Refuses constants whose data are elsewhere or not as many as their shape says.
pub(super) fn check(tensor: &TensorProto) -> Result<(), OnnxError> {
    let name = tensor.name.as_deref().unwrap_or("without a name");
    if tensor.data_location.unwrap_or(0) != 0 || !tensor.external_data.is_empty() {
        let what = format!("tensor `{name}` has its data in another file; save the model as one file");
        return Err(OnnxError::unsupported(what));
    }
    if tensor.segment.is_some() {
        return Err(OnnxError::unsupported(format!("tensor `{name}` is stored in segments")));
    }
    let refuse = |what: String| Err(OnnxError::graph(format!("tensor `{name}` {what}")));
    let dims: Option<Vec<usize>> = tensor.dims.iter().map(|d| usize::try_from(*d).ok()).collect();
    let Some(elements) = dims.as_deref().and_then(count) else {
        return refuse(format!("has shape {:?}, which cannot be", tensor.dims));
    };
    let code = tensor.data_type.unwrap_or(0);
    let (given, want) = match (&tensor.raw_data, code) {
        (Some(raw), code) => match element_bits(code) {
            Some(bits) => {
                (raw.len(), (elements as u64).checked_mul(bits).map_or(usize::MAX, |b| b.div_ceil(8) as usize))
            }
            None => return refuse(format!("has raw data of type {code}, which has no raw form")),
        },
        (None, FLOAT) => (tensor.float_data.len(), elements),
        (None, INT64) => (tensor.int64_data.len(), elements),
        (None, INT32 | BOOL) => (tensor.int32_data.len(), elements),
        // Other types are carried along and never computed with.
        (None, _) => return Ok(()),
    };
    if given == want { Ok(()) } else { refuse(format!("of shape {:?} has {given} data, not {want}", tensor.dims)) }
}
