//! Whose record it is, as a key that only this installation can compute: an app's own user id never reaches the disk, and two
//! apps with the same user have different keys. A person who asks to be forgotten names the id; the key is computed again.

use flywheel_types::AppId;
use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// Bytes of a key; 128 bits, so that two users share one only by a search nobody can afford.
const KEY_BYTES: usize = 16;

/// Makes user keys: HMAC-SHA-256 (RFC 2104) over app, zero byte and user id, the first 128 bits as hexadecimal.
#[derive(Clone)]
pub struct UserKeys(Hmac<Sha256>);

impl UserKeys {
    /// Keys under a secret salt. All ingest nodes of an installation need the same.
    #[must_use]
    pub fn new(salt: &[u8; 32]) -> Self {
        // the block size of SHA-256 is 64 bytes, and shorter keys are filled with zeros
        let mut block = [0; 64];
        block[..32].copy_from_slice(salt);
        Self(Hmac::new(&block.into()))
    }

    /// The key of `user`, the id that the app itself uses; `None` for an empty one.
    #[must_use]
    pub fn key(&self, app: &AppId, user: &str) -> Option<String> {
        if user.is_empty() {
            return None;
        }
        let mut mac = self.0.clone();
        mac.update(app.as_str().as_bytes());
        mac.update(&[0]);
        mac.update(user.as_bytes());
        Some(hex::encode(&mac.finalize().into_bytes()[..KEY_BYTES]))
    }
}

impl UserKeys {
    /// Whether a text has the form of a key: files of history may hold keys of this installation.
    #[must_use]
    pub fn is_key(text: &str) -> bool {
        text.len() == KEY_BYTES * 2 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    }
}

/// Names under which a record says whose it is.
pub(crate) const USER_NAMES: [&str; 5] = ["user_id", "user.id", "user.hash", "enduser.id", "enduser.pseudo.id"];
/// Names of what is nobody's business.
pub(crate) const PRIVATE_NAMES: [&str; 3] = ["user.name", "user.full_name", "user.email"];

/// Says nothing of the salt.
impl std::fmt::Debug for UserKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UserKeys")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_hmac_of_app_and_user() {
        let app = |name: &str| AppId::new(name).unwrap();
        let keys = UserKeys::new(&[0x0b; 32]);
        // python: hmac.new(b"\x0b" * 32, b"shop\0anna", "sha256").hexdigest()[:32]
        assert_eq!(keys.key(&app("shop"), "anna").as_deref(), Some("94b3e5bb0ab852629fdf75d77bbaa009"));
        assert_ne!(keys.key(&app("shop"), "anna"), keys.key(&app("news"), "anna"));
        assert_ne!(keys.key(&app("shop"), "anna"), UserKeys::new(&[1; 32]).key(&app("shop"), "anna"));
        assert_eq!(keys.key(&app("shop"), ""), None);
        assert!(UserKeys::is_key(&keys.key(&app("shop"), "anna").unwrap()) && !UserKeys::is_key("anna"));
        assert_eq!(format!("{keys:?}"), "UserKeys");
    }
}
