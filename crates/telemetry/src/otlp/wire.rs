//! The protobuf wire format: tags, varints, fixed words and length-delimited bytes, with every length checked
//! against what is left. Groups (deprecated) are refused.

/// Why bytes are not a protobuf message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("a varint is longer than 10 bytes or cut short")]
    Varint,
    #[error("a field claims {claimed} bytes, {left} are left")]
    Length { claimed: u64, left: usize },
    #[error("wire type {0} is not supported")]
    WireType(u8),
    #[error("field number 0")]
    FieldZero,
    #[error("field {0} has the wrong wire type")]
    Mismatch(u32),
    #[error("values are nested deeper than {0} levels")]
    Depth(usize),
    #[error("more than {0} attributes")]
    Attributes(usize),
    #[error("more than {0} buckets or quantiles")]
    Buckets(usize),
    #[error("a packed field of {0} bytes is no list of 64-bit words")]
    Packed(usize),
}

impl WireError {
    /// The word for a record that has this wrong.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Attributes(_) => "too_many_attributes",
            Self::Depth(_) => "too_deep",
            Self::Buckets(_) => "too_many_buckets",
            Self::Varint
            | Self::Length { .. }
            | Self::WireType(_)
            | Self::FieldZero
            | Self::Mismatch(_)
            | Self::Packed(_) => "bad_record",
        }
    }
}

/// Value of one field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Field<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
}

impl<'a> Field<'a> {
    /// The bytes of a length-delimited field.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type.
    pub fn bytes(self, number: u32) -> Result<&'a [u8], WireError> {
        match self {
            Self::Bytes(b) => Ok(b),
            Self::Varint(_) | Self::Fixed64(_) | Self::Fixed32(_) => Err(WireError::Mismatch(number)),
        }
    }
    /// The value of a fixed64 field.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type.
    pub fn fixed64(self, number: u32) -> Result<u64, WireError> {
        match self {
            Self::Fixed64(v) => Ok(v),
            Self::Varint(_) | Self::Bytes(_) | Self::Fixed32(_) => Err(WireError::Mismatch(number)),
        }
    }
    /// The value of a varint field.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type.
    pub fn varint(self, number: u32) -> Result<u64, WireError> {
        match self {
            Self::Varint(v) => Ok(v),
            Self::Fixed64(_) | Self::Bytes(_) | Self::Fixed32(_) => Err(WireError::Mismatch(number)),
        }
    }
    /// The value of a sint32 field: zigzag, cut to 32 bits.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type.
    pub fn sint32(self, number: u32) -> Result<i32, WireError> {
        let word = self.varint(number)? as u32;
        Ok((word >> 1) as i32 ^ -((word & 1) as i32))
    }
    /// Adds the values of a repeated fixed64 field, one or packed.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type, and past the limit.
    pub fn fixed64s(self, number: u32, into: &mut Vec<u64>, limit: usize) -> Result<(), WireError> {
        if let Self::Fixed64(v) = self {
            return push(into, v, limit);
        }
        let (words, rest) = self.bytes(number)?.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(WireError::Packed(8 * words.len() + rest.len()));
        }
        words.iter().try_for_each(|w| push(into, u64::from_le_bytes(*w), limit))
    }
    /// Adds the values of a repeated uint64 field, one or packed.
    ///
    /// # Errors
    /// [`WireError::Mismatch`] for another wire type, and past the limit.
    pub fn varints(self, number: u32, into: &mut Vec<u64>, limit: usize) -> Result<(), WireError> {
        if let Self::Varint(v) = self {
            return push(into, v, limit);
        }
        let mut packed = Fields(self.bytes(number)?);
        while !packed.0.is_empty() {
            push(into, packed.varint()?, limit)?;
        }
        Ok(())
    }
}

fn push(into: &mut Vec<u64>, value: u64, limit: usize) -> Result<(), WireError> {
    if into.len() >= limit {
        return Err(WireError::Buckets(limit));
    }
    into.push(value);
    Ok(())
}

/// Fields of one message, in order.
#[derive(Debug, Clone)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Result<u64, WireError> {
        let mut out = 0u64;
        for (i, b) in self.0.iter().take(10).enumerate() {
            let part = u64::from(b & 0x7f);
            // The tenth byte may only carry the top bit of 64.
            if i == 9 && part > 1 {
                return Err(WireError::Varint);
            }
            out |= part << (7 * i);
            if b & 0x80 == 0 {
                self.0 = &self.0[i + 1..];
                return Ok(out);
            }
        }
        Err(WireError::Varint)
    }
    fn take(&mut self, n: u64) -> Result<&'a [u8], WireError> {
        match usize::try_from(n).ok().and_then(|n| self.0.split_at_checked(n)) {
            Some((head, rest)) => {
                self.0 = rest;
                Ok(head)
            }
            None => Err(WireError::Length { claimed: n, left: self.0.len() }),
        }
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut out = [0u8; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }
    fn field(&mut self) -> Result<(u32, Field<'a>), WireError> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).map_err(|_| WireError::Varint)?;
        if number == 0 {
            return Err(WireError::FieldZero);
        }
        let value = match (tag & 7) as u8 {
            0 => Field::Varint(self.varint()?),
            1 => Field::Fixed64(u64::from_le_bytes(self.array()?)),
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Fixed32(u32::from_le_bytes(self.array()?)),
            other => return Err(WireError::WireType(other)),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Field<'a>), WireError>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let out = self.field();
        if out.is_err() {
            // Nothing after a broken field can be trusted.
            self.0 = &[];
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_encodings() {
        // Field 1 varint 150 and field 2 "testing", from the protobuf encoding guide.
        let got: Vec<_> = Fields(&[0x08, 0x96, 0x01, 0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67])
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(got, [(1, Field::Varint(150)), (2, Field::Bytes(b"testing"))]);
    }

    #[test]
    fn limits_of_varints_and_lengths() {
        let max = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(Fields(&max).next().unwrap().unwrap(), (1, Field::Varint(u64::MAX)));
        let over = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert_eq!(Fields(&over).next().unwrap(), Err(WireError::Varint));
        assert_eq!(Fields(&[0x0a, 0x05, 1]).next().unwrap(), Err(WireError::Length { claimed: 5, left: 1 }));
        assert_eq!(Fields(&[0x0b]).next().unwrap(), Err(WireError::WireType(3)));
        assert_eq!(Fields(&[0x00]).next().unwrap(), Err(WireError::FieldZero));
    }

    #[test]
    fn repeated_numbers_are_read_one_by_one_and_packed() {
        let mut out = Vec::new();
        Field::Fixed64(7).fixed64s(1, &mut out, 9).unwrap();
        Field::Bytes(&[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]).fixed64s(1, &mut out, 9).unwrap();
        Field::Varint(5).varints(1, &mut out, 9).unwrap();
        Field::Bytes(&[0x96, 0x01, 3]).varints(1, &mut out, 9).unwrap();
        assert_eq!(out, [7, 1, 2, 5, 150, 3]);
        assert_eq!(Field::Bytes(&[1; 9]).fixed64s(1, &mut out, 9), Err(WireError::Packed(9)));
        assert_eq!(Field::Bytes(&[0x80]).varints(1, &mut out, 9), Err(WireError::Varint));
        assert_eq!(Field::Bytes(&[1; 9]).varints(1, &mut out, 8), Err(WireError::Buckets(8)));
        assert_eq!(Field::Fixed32(1).varints(4, &mut out, 8), Err(WireError::Mismatch(4)));
        let zigzag = [0, 1, 2, 4_294_967_294, 4_294_967_295].map(|v| Field::Varint(v).sint32(1).unwrap());
        assert_eq!(zigzag, [0, -1, 1, i32::MAX, i32::MIN]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            let n = Fields(&bytes).count();
            proptest::prop_assert!(n <= bytes.len());
        }
    }
}
