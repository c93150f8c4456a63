//! The signed envelope around every metadata document, and the threshold check.

use super::metadata::RoleKeys;
use super::{MetadataError, PublicKey, Role};
use crate::canonical::olpc_bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// One signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    pub keyid: String,
    /// Hexadecimal.
    pub sig: String,
}

/// A metadata file: the document and who signed it. The document stays a JSON value: signatures cover every
/// field, also those this build does not know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    pub signatures: Vec<Signature>,
    pub signed: Value,
}

impl Envelope {
    /// Parses a file after checking its size and its `_type`.
    ///
    /// # Errors
    /// [`MetadataError::TooLarge`] or [`MetadataError::Malformed`].
    pub fn parse(role: Role, bytes: &[u8]) -> Result<Self, MetadataError> {
        if bytes.len() as u64 > role.max_bytes() {
            return Err(MetadataError::TooLarge { role, limit: role.max_bytes() });
        }
        let malformed = |why: String| MetadataError::Malformed { role, why };
        let this: Self = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        let found = this.signed.get("_type").and_then(Value::as_str).unwrap_or_default();
        if found != role.type_word() {
            return Err(malformed(format!("`_type` is `{found}`, expected `{}`", role.type_word())));
        }
        let spec = this.signed.get("spec_version").and_then(Value::as_str).unwrap_or_default();
        if !spec.starts_with("1.") {
            return Err(malformed(format!("spec_version `{spec}` is not 1.x")));
        }
        Ok(this)
    }

    /// The bytes that signatures cover.
    ///
    /// # Errors
    /// [`MetadataError::Malformed`] when the document has no canonical form.
    pub fn signed_bytes(&self, role: Role) -> Result<Vec<u8>, MetadataError> {
        olpc_bytes(&self.signed).map_err(|e| MetadataError::Malformed { role, why: e.to_string() })
    }

    /// Checks that enough of the role's keys signed. A key counts once, whatever ids it is listed under and
    /// however many signatures it left.
    ///
    /// # Errors
    /// [`MetadataError::BelowThreshold`].
    pub fn verify(
        &self,
        role: Role,
        keys: &BTreeMap<String, PublicKey>,
        needed: &RoleKeys,
    ) -> Result<(), MetadataError> {
        let message = self.signed_bytes(role)?;
        let mut counted: BTreeSet<[u8; 32]> = BTreeSet::new();
        for signature in &self.signatures {
            if counted.len() >= needed.threshold as usize {
                break;
            }
            if !needed.keyids.contains(&signature.keyid) {
                continue;
            }
            let Some(key) = keys.get(&signature.keyid) else {
                continue;
            };
            let Some(material) = key.material() else {
                continue;
            };
            if !counted.contains(&material) && key.verifies(&message, &signature.sig) {
                counted.insert(material);
            }
        }
        if counted.len() < needed.threshold as usize {
            return Err(MetadataError::BelowThreshold { role, valid: counted.len(), threshold: needed.threshold });
        }
        Ok(())
    }
}
