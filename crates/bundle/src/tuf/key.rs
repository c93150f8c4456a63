//! TUF public keys. Ed25519 only; keys of another kind are kept but never verify anything.

use crate::canonical::olpc_bytes;
use ed25519_dalek::{Signature, VerifyingKey};
use flywheel_types::Digest;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Why a key cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("`{0}` is not a 32-byte Ed25519 public key in hexadecimal")]
    BadPublic(String),
}

/// A public key as it stands in metadata: exactly these three fields, which every TUF implementation accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicKey {
    pub keytype: String,
    pub scheme: String,
    pub keyval: KeyVal,
}

/// The key material.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyVal {
    /// Hexadecimal for Ed25519.
    pub public: String,
}

impl PublicKey {
    /// Wraps a 32-byte Ed25519 public key.
    #[must_use]
    pub fn ed25519(public: &[u8; 32]) -> Self {
        Self {
            keytype: "ed25519".to_owned(),
            scheme: "ed25519".to_owned(),
            keyval: KeyVal { public: hex::encode(public) },
        }
    }

    /// Key id: SHA-256 of the canonical form of {keytype, scheme, keyval} (spec 4.2). We always write this id;
    /// when reading, the declared id counts (other publishers choose theirs freely).
    #[must_use]
    pub fn id(&self) -> String {
        let value = json!({
            "keytype": self.keytype, "scheme": self.scheme, "keyval": {"public": self.keyval.public}
        });
        // Three strings always have a canonical form.
        Digest::of(&olpc_bytes(&value).unwrap_or_default()).to_hex()
    }

    /// The key for checking signatures; `None` for kinds this build does not know.
    ///
    /// # Errors
    /// [`KeyError`] when the key says Ed25519 but is not one.
    pub fn verifier(&self) -> Result<Option<VerifyingKey>, KeyError> {
        if self.keytype != "ed25519" || self.scheme != "ed25519" {
            return Ok(None);
        }
        let bad = || KeyError::BadPublic(self.keyval.public.clone());
        let mut raw = [0u8; 32];
        hex::decode_to_slice(&self.keyval.public, &mut raw).map_err(|_| bad())?;
        VerifyingKey::from_bytes(&raw).map(Some).map_err(|_| bad())
    }

    /// The raw key, for counting keys by material instead of by id; `None` when it cannot verify anything.
    #[must_use]
    pub fn material(&self) -> Option<[u8; 32]> {
        self.verifier().ok().flatten().map(|k| k.to_bytes())
    }

    /// Whether `signature` (hexadecimal) by this key covers `message`. Strict verification: weak keys and
    /// malleable signatures are refused.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &str) -> bool {
        let mut raw = [0u8; 64];
        match (self.verifier(), hex::decode_to_slice(signature, &mut raw)) {
            (Ok(Some(key)), Ok(())) => key.verify_strict(message, &Signature::from_bytes(&raw)).is_ok(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8032, section 7.1, test 2.
    #[test]
    fn rfc_8032_vector() {
        let mut public = [0u8; 32];
        hex::decode_to_slice("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", &mut public).unwrap();
        let key = PublicKey::ed25519(&public);
        let sig = "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00";
        assert!(key.verifies(&[0x72], sig));
        assert!(!key.verifies(&[0x73], sig));
        assert!(!key.verifies(&[0x72], "00"));
    }

    /// Computed with python-tuf 7.0.1: `SSlibKey` id over the same three fields.
    #[test]
    fn key_id_covers_exactly_three_fields() {
        let canonical =
            format!(r#"{{"keytype":"ed25519","keyval":{{"public":"{}"}},"scheme":"ed25519"}}"#, "00".repeat(32));
        assert_eq!(PublicKey::ed25519(&[0; 32]).id(), Digest::of(canonical.as_bytes()).to_hex());
    }

    #[test]
    fn foreign_kinds_never_verify() {
        let mut key = PublicKey::ed25519(&[1; 32]);
        key.keytype = "rsa".to_owned();
        assert_eq!(key.verifier(), Ok(None));
        assert!(!key.verifies(b"", &"00".repeat(64)));
    }
}
