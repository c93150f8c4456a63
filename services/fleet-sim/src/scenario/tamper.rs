//! One phone behind a proxy that changes bytes on the way: it refuses changed metadata and changed artefacts and keeps
//! running what it has.

use super::say;
use super::stage::Stage;
use anyhow::{Context, Result, bail, ensure};
use chrono::{DateTime, Utc};
use fleet_sim::profile::stream;
use fleet_sim::{Link, LinkFault};
use flywheel_sdk::{
    Conditions, Device, DeviceConfig, Durability, Env, Host, HttpBlobs, HttpTransport, IndexStorage, LoadPlan,
    ReqwestTransport, SdkError, SharedCaches, UpdateOutcome,
};
use flywheel_types::wire::DeviceFactsV1;
use flywheel_types::{AppId, Digest, VirtualClock};
use std::sync::Arc;

/// Answers that the proxy changes; more than one update needs.
const ANSWERS: usize = 4096;

/// A large phone that is always charging on Wi-Fi.
struct Desk;

impl Host for Desk {
    fn facts(&self) -> DeviceFactsV1 {
        DeviceFactsV1 {
            class: Some("flagship-12gb".into()),
            ram_bytes: Some(12 << 30),
            locale: Some("en-US".into()),
            runtime: Some("llama.cpp".into()),
            ..DeviceFactsV1::default()
        }
    }
    fn conditions(&self) -> Conditions {
        Conditions::default()
    }
}

/// The phone. It uploads nothing, so the server does not count it.
pub struct Victim {
    device: Device,
    clock: VirtualClock,
    metadata: Arc<Link>,
    blobs: Arc<Link>,
}

impl Victim {
    /// A new installation whose link is honest so far.
    pub fn open(stage: &Stage) -> Result<Self> {
        let transport: Arc<dyn HttpTransport> = Arc::new(ReqwestTransport::new()?);
        let metadata = Arc::new(Link::new(transport.clone(), "/metadata/", Vec::new()));
        let blobs = Arc::new(Link::new(transport, "/targets/blobs/", Vec::new()));
        let server = stage.args.server.trim_end_matches('/');
        let read = |name: &str| std::fs::read(stage.args.dir.join(name)).with_context(|| format!("cannot read {name}"));
        let key = String::from_utf8(read("ingest-key")?)?.trim().to_owned();
        let root: Arc<[u8]> = read("offline-keys/trusted-root.json")?.into();
        let folder = stage.args.phones_dir.join("tampered");
        let mut config = DeviceConfig::new(AppId::new("support")?, server, key, root, folder);
        config.durability = Durability::Relaxed;
        config.index = IndexStorage::Memory;
        let clock = VirtualClock::new(stage.now);
        let targets = format!("{server}/tuf/support/targets");
        let env = Env {
            clock: Arc::new(clock.clone()),
            rng: Box::new(stream(stage.args.seed, 0, "tampered")),
            transport: metadata.clone(),
            blobs: Arc::new(HttpBlobs::new(blobs.clone(), targets, Durability::Relaxed, 4)),
            host: Arc::new(Desk),
            shared: SharedCaches::new(),
        };
        Ok(Self { device: Device::open(config, env)?, clock, metadata, blobs })
    }

    /// Updates over the honest link, loads and confirms what is assigned; answers what runs then.
    pub async fn follow(&mut self, now: DateTime<Utc>) -> Result<Digest> {
        self.clock.advance_to(now);
        self.device.update(true).await?;
        if let LoadPlan::Run(_) = self.device.load_begin()? {
            self.device.load_succeeded(100.0)?;
        }
        self.device.active_bundle().context("nothing is installed")
    }

    /// The proxy changes one bit of every answer while another bundle is assigned: first in the metadata, then in the
    /// artefacts. Answers whether both were refused and the active slot stayed as it was; afterwards, over the honest
    /// link, the same update must work.
    pub async fn attacked(&mut self, now: DateTime<Utc>) -> Result<bool> {
        self.clock.advance_to(now);
        let before = self.device.active_bundle().context("nothing is installed")?;
        self.metadata.add(LinkFault::FlipByte(120), ANSWERS);
        let metadata = refusal("changed metadata", self.device.update(true).await)?;
        self.metadata.clear();
        self.blobs.add(LinkFault::FlipByte(700), ANSWERS);
        let artefact = refusal("a changed artefact", self.device.update(true).await)?;
        self.blobs.clear();
        let kept = self.device.active_bundle() == Some(before);
        let after = self.follow(now).await?;
        ensure!(after != before, "no other bundle was assigned: the attack had nothing to change");
        say(&format!(
            "         tampered link: metadata refused ({metadata}), artefact refused ({artefact}), active slot {}; the same update over an honest link is installed",
            if kept { "unchanged" } else { "CHANGED" }
        ));
        Ok(kept)
    }
}

/// The machine word of a refusal; anything else than a refusal is an error of the demo.
fn refusal(what: &str, update: Result<UpdateOutcome, SdkError>) -> Result<&'static str> {
    match update {
        Err(SdkError::Refused { code, .. }) => Ok(code),
        Err(SdkError::Malformed { .. }) => Ok("malformed"),
        Err(e) => bail!("{what} led to another error than a refusal: {e}"),
        Ok(outcome) => bail!("{what} was accepted: {outcome:?}"),
    }
}
