//! The device's key, made on the device and never sent. The install id is the digest of its public half, so only
//! the holder of the key can speak for it.

use crate::config::Durability;
use crate::error::SdkError;
use crate::files;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use flywheel_types::wire::signing_bytes;
use flywheel_types::{AppId, InstallId};
use rand::RngCore;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// An Ed25519 key pair and the install id that belongs to it.
pub struct Identity {
    key: SigningKey,
    install: InstallId,
    public_base64: String,
}

impl Identity {
    /// The identity of a 32-byte secret seed.
    #[must_use]
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let key = SigningKey::from_bytes(seed);
        let public = key.verifying_key().to_bytes();
        Self { key, install: InstallId::of_public_key(&public), public_base64: STANDARD.encode(public) }
    }

    /// Reads the key in `path`, or makes one from `rng` and stores it readable by the owner only.
    ///
    /// # Errors
    /// [`SdkError::Corrupt`] when the file is not 32 bytes long. A new key is *not* made then: it would be a new
    /// installation, and the app must decide that.
    pub(crate) fn load_or_create(path: &Path, rng: &mut dyn RngCore, durability: Durability) -> Result<Self, SdkError> {
        if let Some(bytes) = files::read(path)? {
            let seed: [u8; 32] = bytes.as_slice().try_into().map_err(|_| SdkError::Corrupt {
                path: path.to_path_buf(),
                why: format!(
                    "an install key has 32 bytes, this file {}; delete it to begin as a new installation",
                    bytes.len()
                ),
            })?;
            return Ok(Self::from_seed(&seed));
        }
        let mut seed = [0u8; 32];
        rng.fill_bytes(&mut seed);
        write_private(path, &seed, durability)?;
        Ok(Self::from_seed(&seed))
    }

    #[must_use]
    pub fn install_id(&self) -> InstallId {
        self.install
    }

    /// The public key as it stands in the upload header: base64 of 32 bytes.
    #[must_use]
    pub fn public_key_base64(&self) -> &str {
        &self.public_base64
    }

    /// Signs an uncompressed upload body for `app`; base64 of 64 bytes.
    #[must_use]
    pub fn sign_body(&self, app: &AppId, body: &[u8]) -> String {
        STANDARD.encode(self.key.sign(&signing_bytes(app, body)).to_bytes())
    }
}

/// Creates the file with mode 0600 before a byte of the secret is in it, under a temporary name.
fn write_private(path: &Path, bytes: &[u8], durability: Durability) -> Result<(), SdkError> {
    let temp = path.with_extension("new");
    files::remove(&temp)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    let write = || -> std::io::Result<()> {
        let mut file = options.open(&temp)?;
        file.write_all(bytes)?;
        if durability == Durability::Full {
            file.sync_all()?;
        }
        std::fs::rename(&temp, path)
    };
    write().map_err(|e| SdkError::io("storing the install key", path, e))?;
    files::sync_parent(path, durability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ed25519_dalek::{Signature, Verifier as _};
    use rand::SeedableRng as _;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn key_is_made_once_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("install.key");
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let a = Identity::load_or_create(&path, &mut rng, Durability::Full).unwrap();
        let b = Identity::load_or_create(&path, &mut rng, Durability::Full).unwrap();
        assert_eq!(a.install_id(), b.install_id());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn damaged_key_is_never_replaced_silently() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("install.key");
        std::fs::write(&path, b"short").unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let got = Identity::load_or_create(&path, &mut rng, Durability::Full);
        assert!(matches!(got, Err(SdkError::Corrupt { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
    }

    #[test]
    fn signature_verifies_against_the_header_key_and_names_the_install() {
        let id = Identity::from_seed(&[7; 32]);
        let app = AppId::new("app").unwrap();
        let public: [u8; 32] = STANDARD.decode(id.public_key_base64()).unwrap().try_into().unwrap();
        assert_eq!(InstallId::of_public_key(&public), id.install_id());
        let sig: [u8; 64] = STANDARD.decode(id.sign_body(&app, b"{}")).unwrap().try_into().unwrap();
        let key = ed25519_dalek::VerifyingKey::from_bytes(&public).unwrap();
        key.verify(&signing_bytes(&app, b"{}"), &Signature::from_bytes(&sig)).unwrap();
        assert!(key.verify(&signing_bytes(&app, b"{ }"), &Signature::from_bytes(&sig)).is_err());
    }
}
