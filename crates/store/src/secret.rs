//! Secrets that are shown once and kept as a digest: API tokens and ingest keys. 256 random bits need no slow hash.

use flywheel_types::Digest;
use rand::CryptoRng;
use std::fmt;

/// A secret in clear. `Debug` hides it; print it once with [`Secret::reveal`].
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Draws 32 bytes from `rng`; `prefix` makes leaked secrets easy to find (`fwt_` tokens, `fwk_` ingest keys).
    #[must_use]
    pub fn draw(prefix: &str, rng: &mut impl CryptoRng) -> Self {
        let mut bytes = [0u8; 32];
        rng.fill_bytes(&mut bytes);
        Self(format!("{prefix}{}", hex::encode(bytes)))
    }
    /// Wraps what a caller presented.
    #[must_use]
    pub fn presented(text: impl Into<String>) -> Self {
        Self(text.into())
    }
    /// The secret itself: for the answer that shows it once.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
    /// What is stored.
    pub(crate) fn digest(&self) -> Digest {
        Digest::of(self.0.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;

    #[test]
    fn debug_hides_the_secret() {
        let s = Secret::draw("fwt_", &mut rand::rngs::StdRng::seed_from_u64(1));
        assert_eq!(s.reveal().len(), 4 + 64);
        assert_eq!(format!("{s:?}"), "Secret(…)");
    }
}
