//! A walk over the bytes of an ONNX file before they are decoded: every field must be known, of its wire type and whole,
//! and the number of messages and strings and their depth are bounded, so that decoding cannot take more memory than a
//! small multiple of the file. Encoding: <https://protobuf.dev/programming-guides/encoding/>.
//!
//! Unknown fields are refused: a decoder that skips them would silently drop them when the file is written back.

use super::OnnxError;

/// Largest file: what protobuf itself allows.
const MAX_BYTES: usize = 0x7fff_ffff;
/// Messages of all kinds in one file. Graphs of large language models have tens of thousands of nodes.
const MAX_MESSAGES: usize = 1 << 19;
/// Strings, byte fields and unpacked numbers.
const MAX_SCALARS: usize = 1 << 21;
/// Messages inside messages; a graph inside a node takes three.
const MAX_DEPTH: usize = 24;

/// What the value of a field is.
#[derive(Clone, Copy)]
enum Kind {
    Varint,
    Fixed32,
    Text,
    Bytes,
    /// Numbers, in one piece or one by one, of this wire type.
    Numbers(u8),
    Message(&'static Schema),
}

use Kind::{Bytes, Fixed32, Message, Numbers, Text, Varint};

struct Schema {
    name: &'static str,
    fields: &'static [(u32, Kind)],
}

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED32: u8 = 5;

static MODEL: Schema = Schema {
    name: "ModelProto",
    fields: &[
        (1, Varint),
        (2, Text),
        (3, Text),
        (4, Text),
        (5, Varint),
        (6, Text),
        (7, Message(&GRAPH)),
        (8, Message(&OPSET)),
        (14, Bytes),
        (20, Bytes),
        (25, Bytes),
        (26, Bytes),
    ],
};
static OPSET: Schema = Schema { name: "OperatorSetIdProto", fields: &[(1, Text), (2, Varint)] };
static GRAPH: Schema = Schema {
    name: "GraphProto",
    fields: &[
        (1, Message(&NODE)),
        (2, Text),
        (5, Message(&TENSOR)),
        (10, Text),
        (11, Message(&VALUE)),
        (12, Message(&VALUE)),
        (13, Message(&VALUE)),
        (14, Bytes),
        (15, Bytes),
        (16, Bytes),
    ],
};
static NODE: Schema = Schema {
    name: "NodeProto",
    fields: &[
        (1, Text),
        (2, Text),
        (3, Text),
        (4, Text),
        (5, Message(&ATTRIBUTE)),
        (6, Text),
        (7, Text),
        (8, Text),
        (9, Bytes),
        (10, Bytes),
    ],
};
static ATTRIBUTE: Schema = Schema {
    name: "AttributeProto",
    fields: &[
        (1, Text),
        (2, Fixed32),
        (3, Varint),
        (4, Bytes),
        (5, Message(&TENSOR)),
        (6, Message(&GRAPH)),
        (7, Numbers(FIXED32)),
        (8, Numbers(VARINT)),
        (9, Bytes),
        (10, Message(&TENSOR)),
        (11, Message(&GRAPH)),
        (13, Text),
        (14, Bytes),
        (15, Bytes),
        (20, Varint),
        (21, Text),
        (22, Bytes),
        (23, Bytes),
    ],
};
static VALUE: Schema =
    Schema { name: "ValueInfoProto", fields: &[(1, Text), (2, Message(&TYPE)), (3, Text), (4, Bytes)] };
static TYPE: Schema = Schema {
    name: "TypeProto",
    fields: &[(1, Message(&TENSOR_TYPE)), (4, Bytes), (5, Bytes), (6, Text), (7, Bytes), (8, Bytes), (9, Bytes)],
};
static TENSOR_TYPE: Schema = Schema { name: "TypeProto.Tensor", fields: &[(1, Varint), (2, Message(&SHAPE))] };
static SHAPE: Schema = Schema { name: "TensorShapeProto", fields: &[(1, Message(&DIMENSION))] };
static DIMENSION: Schema = Schema { name: "TensorShapeProto.Dimension", fields: &[(1, Varint), (2, Text), (3, Text)] };
static TENSOR: Schema = Schema {
    name: "TensorProto",
    fields: &[
        (1, Numbers(VARINT)),
        (2, Varint),
        (3, Bytes),
        (4, Numbers(FIXED32)),
        (5, Numbers(VARINT)),
        (6, Bytes),
        (7, Numbers(VARINT)),
        (8, Text),
        (9, Bytes),
        (10, Numbers(FIXED64)),
        (11, Numbers(VARINT)),
        (12, Text),
        (13, Bytes),
        (14, Varint),
        (16, Bytes),
    ],
};

/// Checks that `bytes` are a whole `ModelProto` within the limits.
pub(super) fn check(bytes: &[u8]) -> Result<(), OnnxError> {
    if bytes.len() > MAX_BYTES {
        let what = format!("a file of {} bytes; protobuf ends at {MAX_BYTES}", bytes.len());
        return Err(OnnxError::unsupported(what));
    }
    Walk { bytes, messages: 0, scalars: 0 }.message(&MODEL, 0, bytes.len(), 0)
}

struct Walk<'a> {
    bytes: &'a [u8],
    messages: usize,
    scalars: usize,
}

impl Walk<'_> {
    fn message(&mut self, schema: &'static Schema, mut at: usize, end: usize, depth: usize) -> Result<(), OnnxError> {
        self.messages += 1;
        if self.messages > MAX_MESSAGES || depth > MAX_DEPTH {
            let what = format!("more than {MAX_MESSAGES} messages, or messages nested deeper than {MAX_DEPTH}");
            return Err(OnnxError::unsupported(what));
        }
        while at < end {
            let start = at;
            let fail = |what: String| OnnxError::Malformed { at: start, place: schema.name, what };
            let key = self.varint(&mut at, end).ok_or_else(|| fail("a field key is cut off".into()))?;
            let (number, wire) = (key >> 3, (key & 7) as u8);
            let known = schema.fields.iter().find(|(n, _)| u64::from(*n) == number);
            let Some((_, kind)) = known else {
                let what =
                    format!("unknown field {number}; it would be lost when the file is written, so it is refused");
                return Err(fail(what));
            };
            let value = self.value(&mut at, end, wire).ok_or_else(|| fail(format!("field {number} is cut off")))?;
            match (kind, wire) {
                (Varint | Numbers(VARINT), VARINT) | (Fixed32, FIXED32) => self.scalars += 1,
                (Numbers(want), got) if *want == got => self.scalars += 1,
                (Numbers(want), LENGTH) => self
                    .numbers(value.clone(), *want)
                    .ok_or_else(|| fail(format!("the packed numbers of field {number} do not end with the field")))?,
                (Bytes, LENGTH) => self.scalars += 1,
                (Text, LENGTH) => {
                    self.scalars += 1;
                    if std::str::from_utf8(&self.bytes[value]).is_err() {
                        return Err(fail(format!("field {number} is not UTF-8 text")));
                    }
                }
                (Message(inner), LENGTH) => self.message(inner, value.start, value.end, depth + 1)?,
                _ => return Err(fail(format!("field {number} has wire type {wire}, which it cannot have"))),
            }
            if self.scalars > MAX_SCALARS {
                return Err(OnnxError::unsupported(format!("more than {MAX_SCALARS} single values")));
            }
        }
        Ok(())
    }

    /// Where the value of a field lies; `at` moves behind it.
    fn value(&self, at: &mut usize, end: usize, wire: u8) -> Option<std::ops::Range<usize>> {
        let start = *at;
        let len = match wire {
            VARINT => {
                self.varint(at, end)?;
                return Some(start..*at);
            }
            FIXED64 => 8,
            FIXED32 => 4,
            LENGTH => usize::try_from(self.varint(at, end)?).ok()?,
            _ => return None,
        };
        let from = *at;
        *at = from.checked_add(len).filter(|to| *to <= end)?;
        Some(from..*at)
    }

    /// Packed numbers that end where their field ends.
    fn numbers(&self, range: std::ops::Range<usize>, wire: u8) -> Option<()> {
        match wire {
            FIXED32 => range.len().is_multiple_of(4).then_some(()),
            FIXED64 => range.len().is_multiple_of(8).then_some(()),
            _ => {
                let mut at = range.start;
                while at < range.end {
                    self.varint(&mut at, range.end)?;
                }
                Some(())
            }
        }
    }

    /// A number of 7 bits a byte, at most 10 bytes and 64 bits.
    fn varint(&self, at: &mut usize, end: usize) -> Option<u64> {
        let mut value = 0u64;
        for i in 0..10 {
            let byte = *self.bytes[..end].get(*at)?;
            *at += 1;
            if i == 9 && byte > 1 {
                return None;
            }
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}
