//! Typed identifiers. A string id is 1..=128 characters of `[A-Za-z0-9._:/@-]`; anything else is refused
//! where it enters, so that no id ever needs escaping in a URL, a path or a log line.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// Why a text is not a valid id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("id is empty")]
    Empty,
    #[error("id is {0} characters long, 128 is the limit")]
    TooLong(usize),
    #[error("id holds {0:?}; allowed are letters, digits and `. _ : / @ -`")]
    BadCharacter(char),
    #[error("expected 64 hexadecimal characters")]
    BadDigest,
}

fn check(text: &str) -> Result<(), IdError> {
    if text.is_empty() {
        return Err(IdError::Empty);
    }
    if text.len() > 128 {
        return Err(IdError::TooLong(text.len()));
    }
    match text.chars().find(|c| !(c.is_ascii_alphanumeric() || "._:/@-".contains(*c))) {
        Some(bad) => Err(IdError::BadCharacter(bad)),
        None => Ok(()),
    }
}

macro_rules! string_id {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// Checks and wraps `text`.
            ///
            /// # Errors
            /// [`IdError`] when the text is empty, too long or holds a foreign character.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check(&text)?;
                Ok(Self(text))
            }
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl FromStr for $name {
            type Err = IdError;
            fn from_str(s: &str) -> Result<Self, IdError> {
                Self::new(s)
            }
        }
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                Self::new(String::deserialize(d)?).map_err(serde::de::Error::custom)
            }
        }
    )+};
}

string_id! {
    /// An app: the tenant. Everything stored belongs to exactly one.
    AppId,
    /// One answer a model gave on a device; made on the device (UUIDv7 text).
    InteractionId,
    /// A prompt template as the app names it.
    TemplateId,
    /// A knowledge chunk; its versions are numbered beside it.
    ChunkId,
    /// A rollout of one candidate bundle.
    RolloutId,
    /// A model that may become a bundle: a job's result or registered from outside.
    CandidateId,
    /// A suspected cause of failures.
    FindingId,
    /// A unit of background work.
    JobId,
}

/// SHA-256 of some bytes; written as 64 lower-case hexadecimal characters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
    #[must_use]
    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}
impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}
impl FromStr for Digest {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let mut out = [0u8; 32];
        if s.len() != 64 || s.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(IdError::BadDigest);
        }
        hex::decode_to_slice(s, &mut out).map_err(|_| IdError::BadDigest)?;
        Ok(Self(out))
    }
}
impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.to_hex())
    }
}
impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A device installation: SHA-256 of the Ed25519 public key that was made on the device, so that only the
/// holder of the private key can speak for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstallId(pub Digest);

impl InstallId {
    /// The id that belongs to a 32-byte Ed25519 public key.
    #[must_use]
    pub fn of_public_key(key: &[u8; 32]) -> Self {
        Self(Digest::of(key))
    }
}
impl fmt::Display for InstallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
impl FromStr for InstallId {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        s.parse().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_refuse_what_would_need_escaping() {
        assert_eq!(AppId::new(""), Err(IdError::Empty));
        assert_eq!(AppId::new("a b"), Err(IdError::BadCharacter(' ')));
        assert_eq!(AppId::new("é"), Err(IdError::BadCharacter('é')));
        assert_eq!(AppId::new("x".repeat(129)), Err(IdError::TooLong(129)));
        assert_eq!(AppId::new("support/v2").unwrap().as_str(), "support/v2");
    }

    #[test]
    fn digest_round_trips_and_is_strict() {
        let d = Digest::of(b"");
        assert_eq!(d.to_hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(d.to_hex().parse::<Digest>().unwrap(), d);
        assert!(d.to_hex().to_uppercase().parse::<Digest>().is_err());
        assert!("00".parse::<Digest>().is_err());
    }
}
