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

    proptest::proptest! {
        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            let n = Fields(&bytes).count();
            proptest::prop_assert!(n <= bytes.len());
        }
    }
}
