//! Metadata values: the twelve scalar types of GGUF and flat arrays of them.

use super::GgufError;

/// One metadata value. Integer width is part of the type: stock llama.cpp refuses a key with another width.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A flat array of one scalar type (arrays of arrays exist in the specification, but stock refuses them; so do we).
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Array {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The strings, or `None` for an array of numbers.
    #[must_use]
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Self::String(v) = self { Some(v) } else { None }
    }
    /// The numbers, or `None` for another type.
    #[must_use]
    pub fn as_f32(&self) -> Option<&[f32]> {
        if let Self::F32(v) = self { Some(v) } else { None }
    }
    /// The numbers, or `None` for another type.
    #[must_use]
    pub fn as_i32(&self) -> Option<&[i32]> {
        if let Self::I32(v) = self { Some(v) } else { None }
    }
    /// Type id and name of the elements.
    pub(crate) fn element(&self) -> (u32, &'static str) {
        match self {
            Self::U8(_) => (0, "u8"),
            Self::I8(_) => (1, "i8"),
            Self::U16(_) => (2, "u16"),
            Self::I16(_) => (3, "i16"),
            Self::U32(_) => (4, "u32"),
            Self::I32(_) => (5, "i32"),
            Self::F32(_) => (6, "f32"),
            Self::Bool(_) => (7, "bool"),
            Self::String(_) => (8, "string"),
            Self::U64(_) => (10, "u64"),
            Self::I64(_) => (11, "i64"),
            Self::F64(_) => (12, "f64"),
        }
    }
}

impl Value {
    /// Type id in the file and a name for messages.
    pub(crate) fn kind(&self) -> (u32, &'static str) {
        match self {
            Self::U8(_) => (0, "u8"),
            Self::I8(_) => (1, "i8"),
            Self::U16(_) => (2, "u16"),
            Self::I16(_) => (3, "i16"),
            Self::U32(_) => (4, "u32"),
            Self::I32(_) => (5, "i32"),
            Self::F32(_) => (6, "f32"),
            Self::Bool(_) => (7, "bool"),
            Self::String(_) => (8, "string"),
            Self::Array(_) => (9, "array"),
            Self::U64(_) => (10, "u64"),
            Self::I64(_) => (11, "i64"),
            Self::F64(_) => (12, "f64"),
        }
    }
    /// Type name, for example `u32` or `array of string`.
    #[must_use]
    pub fn type_name(&self) -> String {
        match self {
            Self::Array(a) => format!("array of {}", a.element().1),
            other => other.kind().1.to_owned(),
        }
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Self::String(v.to_owned())
    }
}
impl From<u32> for Value {
    fn from(v: u32) -> Self {
        Self::U32(v)
    }
}
impl From<f32> for Value {
    fn from(v: f32) -> Self {
        Self::F32(v)
    }
}
impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}
impl From<String> for Value {
    fn from(v: String) -> Self {
        Self::String(v)
    }
}

mod sealed {
    pub trait Sealed<'a> {}
}

/// A Rust type that a metadata value can be read as, by exact type (see [`super::Gguf::required`]).
pub trait FromValue<'a>: Sized + sealed::Sealed<'a> {
    /// Name for messages.
    const EXPECTED: &'static str;
    /// `None` when the value has another type.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! from_value {
    ($a:lifetime, $t:ty, $name:literal, $pattern:pat => $out:expr) => {
        impl<$a> sealed::Sealed<$a> for $t {}
        impl<$a> FromValue<$a> for $t {
            const EXPECTED: &'static str = $name;
            fn from_value(value: &$a Value) -> Option<Self> {
                if let $pattern = value { Some($out) } else { None }
            }
        }
    };
}
from_value!('a, u16, "u16", Value::U16(v) => *v);
from_value!('a, u32, "u32", Value::U32(v) => *v);
from_value!('a, i32, "i32", Value::I32(v) => *v);
from_value!('a, u64, "u64", Value::U64(v) => *v);
from_value!('a, f32, "f32", Value::F32(v) => *v);
from_value!('a, bool, "bool", Value::Bool(v) => *v);
from_value!('a, &'a str, "string", Value::String(v) => v.as_str());
from_value!('a, &'a Array, "array", Value::Array(v) => v);
from_value!('a, &'a [String], "array of string", Value::Array(Array::String(v)) => v.as_slice());
from_value!('a, &'a [f32], "array of f32", Value::Array(Array::F32(v)) => v.as_slice());
from_value!('a, &'a [i32], "array of i32", Value::Array(Array::I32(v)) => v.as_slice());
from_value!('a, &'a [u32], "array of u32", Value::Array(Array::U32(v)) => v.as_slice());

/// Reads `value` of `key` as `T`, or says what it is instead.
pub(crate) fn typed<'a, T: FromValue<'a>>(key: &str, value: &'a Value) -> Result<T, GgufError> {
    T::from_value(value).ok_or_else(|| GgufError::WrongType {
        key: key.to_owned(),
        expected: T::EXPECTED,
        found: value.type_name(),
    })
}
