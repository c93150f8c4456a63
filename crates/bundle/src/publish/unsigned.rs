//! Metadata before and after signing. Signing may happen elsewhere and by several people, one after another.

use super::error::PublishError;
use super::keys::RoleSigner;
use crate::canonical::{json_bytes, olpc_bytes};
use crate::tuf::{Envelope, Role, SPEC_VERSION, Signature};
use serde::Serialize;
use serde_json::Value;

/// A document that waits for signatures.
#[derive(Debug, Clone, PartialEq)]
pub struct Unsigned {
    pub role: Role,
    pub version: u64,
    envelope: Envelope,
    message: Vec<u8>,
}

/// A finished metadata file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedMetadata {
    pub role: Role,
    pub version: u64,
    /// The file as it is stored and served.
    pub bytes: Vec<u8>,
}

impl Unsigned {
    /// Wraps a document.
    pub(super) fn new<T: Serialize>(role: Role, version: u64, document: &T) -> Result<Self, PublishError> {
        let why = |e: serde_json::Error| PublishError::Role { role, why: e.to_string() };
        let mut signed = serde_json::to_value(document).map_err(why)?;
        if let Value::Object(map) = &mut signed {
            map.insert("_type".to_owned(), role.type_word().into());
            map.insert("spec_version".to_owned(), SPEC_VERSION.into());
        }
        let message = olpc_bytes(&signed)?;
        Ok(Self { role, version, envelope: Envelope { signatures: Vec::new(), signed }, message })
    }

    /// Exactly the bytes to be signed.
    #[must_use]
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// Signs with each of `signers`.
    ///
    /// # Errors
    /// [`PublishError::Sign`].
    pub fn sign(mut self, signers: &[&dyn RoleSigner]) -> Result<SignedMetadata, PublishError> {
        sign_envelope(self.role, &mut self.envelope, &self.message, signers)?;
        Ok(SignedMetadata { role: self.role, version: self.version, bytes: json_bytes(&self.envelope)? })
    }
}

/// Adds signatures to a file that others signed already (three people for one root, each at home).
///
/// # Errors
/// Unreadable metadata or a key that cannot sign.
pub fn add_signatures(role: Role, bytes: &[u8], signers: &[&dyn RoleSigner]) -> Result<SignedMetadata, PublishError> {
    let mut envelope = Envelope::parse(role, bytes)?;
    let message = envelope.signed_bytes(role)?;
    sign_envelope(role, &mut envelope, &message, signers)?;
    let version = envelope.signed.get("version").and_then(Value::as_u64).unwrap_or(0);
    Ok(SignedMetadata { role, version, bytes: json_bytes(&envelope)? })
}

fn sign_envelope(
    role: Role,
    envelope: &mut Envelope,
    message: &[u8],
    signers: &[&dyn RoleSigner],
) -> Result<(), PublishError> {
    for signer in signers {
        let keyid = signer.public().id();
        // A key appears once: some clients refuse duplicate key ids.
        envelope.signatures.retain(|s| s.keyid != keyid);
        let sig = signer.sign(message).map_err(|source| PublishError::Sign { role, source })?;
        envelope.signatures.push(Signature { keyid, sig: hex::encode(sig) });
    }
    envelope.signatures.sort_by(|a, b| a.keyid.cmp(&b.keyid));
    Ok(())
}
