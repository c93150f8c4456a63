//! Signing keys: the trait that hides where a key lives, and a key in a file. Where the file lies and who may
//! read it (mode 0600) is the caller's business; so is the randomness of a new key.

use super::error::PublishError;
use crate::tuf::{PublicKey, Role};
use ed25519_dalek::{Signer as _, SigningKey};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A key could not sign.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SignError(pub String);

/// Something that signs for a role: a key in memory, a token, a key service.
pub trait RoleSigner {
    /// The public half.
    fn public(&self) -> &PublicKey;
    /// Ed25519 signature of `message`.
    ///
    /// # Errors
    /// [`SignError`] when the key is out of reach.
    fn sign(&self, message: &[u8]) -> Result<[u8; 64], SignError>;
}

/// An Ed25519 key of one role. `Debug` shows the public half only; the secret is wiped on drop.
pub struct SecretKey {
    role: Role,
    public: PublicKey,
    key: SigningKey,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFileV1 {
    format: u8,
    role: Role,
    keyid: String,
    public: PublicKey,
    /// Hexadecimal seed (RFC 8032 secret key).
    private: String,
}

impl SecretKey {
    /// A key made of 32 random bytes.
    #[must_use]
    pub fn from_seed(role: Role, seed: &[u8; 32]) -> Self {
        let key = SigningKey::from_bytes(seed);
        Self { role, public: PublicKey::ed25519(&key.verifying_key().to_bytes()), key }
    }

    /// The role this key was made for.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// The key file, JSON. Write it with mode 0600.
    ///
    /// # Errors
    /// [`PublishError::KeyFile`].
    pub fn to_file(&self) -> Result<String, PublishError> {
        serde_json::to_string_pretty(&KeyFileV1 {
            format: 1,
            role: self.role,
            keyid: self.public.id(),
            public: self.public.clone(),
            private: hex::encode(self.key.to_bytes()),
        })
        .map_err(|e| PublishError::KeyFile(e.to_string()))
    }

    /// Reads a key file that must hold a key of `role`.
    ///
    /// # Errors
    /// [`PublishError::KeyFile`] says what is wrong, never showing the secret.
    pub fn from_file(role: Role, text: &str) -> Result<Self, PublishError> {
        let bad = |why: &str| PublishError::KeyFile(why.to_owned());
        // serde_json errors carry positions and field names, not values of this file's strings.
        let file: KeyFileV1 = serde_json::from_str(text)
            .map_err(|e| PublishError::KeyFile(format!("not a key file (line {})", e.line())))?;
        if file.format != 1 {
            return Err(PublishError::KeyFile(format!("format {}, this build reads 1", file.format)));
        }
        if file.role != role {
            return Err(PublishError::KeyFile(format!("holds a {} key, {role} needed", file.role)));
        }
        let mut seed = [0u8; 32];
        hex::decode_to_slice(&file.private, &mut seed).map_err(|_| bad("private half is not 32 bytes"))?;
        let key = Self::from_seed(role, &seed);
        if key.public != file.public || key.public.id() != file.keyid {
            return Err(bad("public and private half do not belong together"));
        }
        Ok(key)
    }
}

impl RoleSigner for SecretKey {
    fn public(&self) -> &PublicKey {
        &self.public
    }
    fn sign(&self, message: &[u8]) -> Result<[u8; 64], SignError> {
        Ok(self.key.sign(message).to_bytes())
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({} {})", self.role, self.public.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_round_trips_and_refuses_mistakes() {
        let key = SecretKey::from_seed(Role::Catalog, &[7; 32]);
        let text = key.to_file().unwrap();
        let back = SecretKey::from_file(Role::Catalog, &text).unwrap();
        assert_eq!(back.public(), key.public());
        assert_eq!(back.sign(b"m").unwrap(), key.sign(b"m").unwrap());
        let wrong_role = SecretKey::from_file(Role::Rollout, &text).unwrap_err().to_string();
        assert!(wrong_role.contains("catalog key"), "{wrong_role}");
        let swapped = text.replace(&hex::encode([7u8; 32]), &hex::encode([8u8; 32]));
        assert!(SecretKey::from_file(Role::Catalog, &swapped).is_err());
    }

    #[test]
    fn secrets_stay_out_of_debug_and_errors() {
        let key = SecretKey::from_seed(Role::Catalog, &[7; 32]);
        let secret = hex::encode([7u8; 32]);
        assert!(!format!("{key:?}").contains(&secret));
        let broken = key.to_file().unwrap().replace("\"format\": 1", &format!("\"format\": \"{secret}\""));
        assert!(!SecretKey::from_file(Role::Catalog, &broken).unwrap_err().to_string().contains(&secret));
    }
}
