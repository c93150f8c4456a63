//! An install of the app as the intake sees it: a key made on the device, and signed batches of events counted by `seq`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// An install.
pub struct Install {
    key: SigningKey,
    id: String,
}

impl Install {
    /// The install with this number: always the same one.
    #[must_use]
    pub fn new(number: u64) -> Self {
        let mut seed = [7; 32];
        let (head, _) = seed.split_at_mut(8);
        head.copy_from_slice(&number.to_le_bytes());
        let key = SigningKey::from_bytes(&seed);
        let id = hex::encode(Sha256::digest(key.verifying_key().as_bytes()));
        Self { key, id }
    }

    /// Its id: the digest of its public key.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Body of `POST /v1/events`.
    #[must_use]
    pub fn batch(&self, seq: u64, events: &[Value]) -> String {
        let device = json!({ "class": "high-8gb", "locale": "de-DE", "ram_bytes": 8_589_934_592_u64 });
        json!({
            "v": 1, "install_id": self.id, "seq": seq, "sent_at": "2026-03-02T00:00:00Z", "sdk": "test/1",
            "device": device, "events": events,
        })
        .to_string()
    }

    /// The two headers that prove that `body` is of this install, for the app `shop`.
    #[must_use]
    pub fn headers(&self, body: &str) -> [(&'static str, String); 2] {
        let signed = [b"flywheel-events-v1\0shop\0", body.as_bytes()].concat();
        [
            ("x-fleet-public-key", STANDARD.encode(self.key.verifying_key().as_bytes())),
            ("x-fleet-signature", STANDARD.encode(self.key.sign(&signed).to_bytes())),
        ]
    }
}

/// An answer of a model.
#[must_use]
pub fn answer(id: &str) -> Value {
    json!({
        "kind": "interaction", "interaction_id": id, "at": "2026-03-02T00:00:00Z", "template_id": "faq",
        "bundle": "0".repeat(64), "ttft_ms": 412.5, "output_tokens": 87,
    })
}
