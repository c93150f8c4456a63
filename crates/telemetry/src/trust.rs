//! Who sent a request. An SDK signs the uncompressed body with the key made on the device; the install id is the
//! digest of that key, so a valid signature proves the id and nothing else needs to be looked up.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signature, VerifyingKey};
use flywheel_types::wire::{PUBLIC_KEY_HEADER, SIGNATURE_HEADER, signing_bytes};
use flywheel_types::{AppId, Error, ErrorKind, InstallId, TrustClass};

/// What the signature headers proved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    pub trust: TrustClass,
    /// Set when the trust class is `keyed`.
    pub install: Option<InstallId>,
}

impl Sender {
    /// A sender that proved nothing.
    pub const ANONYMOUS: Self = Self { trust: TrustClass::Anonymous, install: None };
}

/// Checks the signature headers against the uncompressed body.
///
/// # Errors
/// `bad_signature` (unauthenticated) when one header is there without the other, when either is not base64 of the
/// right length, when the key is weak, or when the signature does not fit. Never downgrades to anonymous.
pub fn verify(app: &AppId, signature: Option<&str>, public_key: Option<&str>, body: &[u8]) -> Result<Sender, Error> {
    let (signature, public_key) = match (signature, public_key) {
        (None, None) => return Ok(Sender::ANONYMOUS),
        (Some(s), Some(k)) => (s, k),
        (Some(_), None) => {
            return Err(refused(format!("`{SIGNATURE_HEADER}` without `{PUBLIC_KEY_HEADER}`")));
        }
        (None, Some(_)) => {
            return Err(refused(format!("`{PUBLIC_KEY_HEADER}` without `{SIGNATURE_HEADER}`")));
        }
    };
    let key_bytes: [u8; 32] = fixed(public_key, PUBLIC_KEY_HEADER)?;
    let sig_bytes: [u8; 64] = fixed(signature, SIGNATURE_HEADER)?;
    let key = VerifyingKey::from_bytes(&key_bytes)
        .map_err(|_| refused(format!("`{PUBLIC_KEY_HEADER}` is not an Ed25519 public key")))?;
    key.verify_strict(&signing_bytes(app, body), &Signature::from_bytes(&sig_bytes))
        .map_err(|_| refused("the signature does not fit the body, the app and the key".to_owned()))?;
    Ok(Sender { trust: TrustClass::Keyed, install: Some(InstallId::of_public_key(&key_bytes)) })
}

fn fixed<const N: usize>(text: &str, header: &str) -> Result<[u8; N], Error> {
    STANDARD
        .decode(text.trim())
        .ok()
        .and_then(|b| b.try_into().ok())
        .ok_or_else(|| refused(format!("`{header}` is not the base64 of {N} bytes")))
}

pub(crate) fn refused(message: String) -> Error {
    Error::new(
        ErrorKind::Unauthenticated,
        "bad_signature",
        message,
        "sign the uncompressed body for this app with the install key, or send no signature headers",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ed25519_dalek::{Signer, SigningKey};

    fn parts(app: &AppId, body: &[u8]) -> (String, String, InstallId) {
        let key = SigningKey::from_bytes(&[7; 32]);
        let public = key.verifying_key().to_bytes();
        let sig = key.sign(&signing_bytes(app, body)).to_bytes();
        (STANDARD.encode(sig), STANDARD.encode(public), InstallId::of_public_key(&public))
    }

    #[test]
    fn a_good_signature_proves_the_install() {
        let app = AppId::new("a").unwrap();
        let (sig, key, install) = parts(&app, b"body");
        let got = verify(&app, Some(&sig), Some(&key), b"body").unwrap();
        assert_eq!(got, Sender { trust: TrustClass::Keyed, install: Some(install) });
    }

    #[test]
    fn anything_wrong_is_refused_not_downgraded() {
        let app = AppId::new("a").unwrap();
        let other = AppId::new("b").unwrap();
        let (sig, key, _) = parts(&app, b"body");
        for (a, s, k, b) in [
            (&app, Some(&*sig), Some(&*key), &b"bodY"[..]),
            (&other, Some(&*sig), Some(&*key), b"body"),
            (&app, Some(&*sig), None, b"body"),
            (&app, None, Some(&*key), b"body"),
            (&app, Some("AAAA"), Some(&*key), b"body"),
            (&app, Some(&*sig), Some("?"), b"body"),
        ] {
            assert_eq!(verify(a, s, k, b).unwrap_err().kind, ErrorKind::Unauthenticated);
        }
        assert_eq!(verify(&app, None, None, b"x").unwrap(), Sender::ANONYMOUS);
    }

    #[test]
    fn a_small_order_key_is_refused() {
        // The identity point verifies everything under the lax rule; `verify_strict` refuses it.
        let app = AppId::new("a").unwrap();
        let mut weak = [0u8; 32];
        weak[0] = 1;
        let mut sig = [0u8; 64];
        sig[0] = 1;
        let got = verify(&app, Some(&STANDARD.encode(sig)), Some(&STANDARD.encode(weak)), b"x");
        assert_eq!(got.unwrap_err().code, "bad_signature");
    }
}
