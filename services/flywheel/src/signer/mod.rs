//! `flywheel signer`: holds the release key in its own process. It pulls what waits, checks the manifest, the lineage
//! and the gate report against its own policy, signs the next catalog and sends it back. It never listens.

pub mod policy;

use crate::http::signer::{Decision, WaitingRelease, Work};
use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_bundle::manifest::ManifestV1;
use flywheel_bundle::publish::{CatalogEdit, Expiries, Profile, RepositoryState, SecretKey, catalog_next};
use flywheel_bundle::tuf::Role;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock, Digest};
use policy::{Ruling, SigningPolicy};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Configuration of the signer.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignerConfig {
    pub server: String,
    pub app: AppId,
    /// File with a token of the role `signer`.
    pub token_file: PathBuf,
    pub release_key: PathBuf,
    /// The trust anchor, so that the signer believes the repository and not the server.
    pub trusted_root: PathBuf,
    /// Approvals and the list of what was signed.
    pub state_dir: PathBuf,
    #[serde(default = "poll")]
    pub poll_s: u64,
    /// For simulations with a virtual business clock only.
    #[serde(default)]
    pub use_server_clock: bool,
    #[serde(default)]
    pub policy: SigningPolicy,
}

fn poll() -> u64 {
    15
}

/// What was signed when.
#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    signed: Vec<(Digest, DateTime<Utc>)>,
}

/// A person's yes.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Approval {
    manifest: Digest,
    by: String,
    reason: String,
}

/// Reads the configuration.
///
/// # Errors
/// When it cannot be read or has unknown keys.
pub fn load(path: &Path) -> Result<SignerConfig> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a signer configuration", path.display()))
}

/// `flywheel signer approve`: stores a person's yes for the running signer.
///
/// # Errors
/// When the state folder cannot be written.
pub fn approve(config: &SignerConfig, manifest: &str, reason: &str) -> Result<()> {
    let manifest: Digest = manifest.parse().context("the release is named by its manifest digest")?;
    if reason.trim().is_empty() {
        bail!("an approval needs a reason");
    }
    let by = std::env::var("SUDO_USER").or_else(|_| std::env::var("USER")).unwrap_or_else(|_| "operator".into());
    std::fs::create_dir_all(&config.state_dir)?;
    // one file per approval: a running signer may write its own state at the same time
    let approval = Approval { manifest, by, reason: reason.to_owned() };
    write_atomically(&config.state_dir.join(format!("approve-{manifest}.json")), &serde_json::to_vec(&approval)?)
}

/// `flywheel signer run`: polls until the process is stopped.
///
/// # Errors
/// Only for a configuration that cannot work; everything that may pass is logged and tried again.
pub async fn run(config: SignerConfig) -> Result<()> {
    let key = std::fs::read_to_string(&config.release_key)
        .with_context(|| format!("cannot read the release key {}", config.release_key.display()))?;
    let key = SecretKey::from_file(Role::Catalog, &key)?;
    let signer = Signer { client: reqwest::Client::builder().timeout(Duration::from_secs(60)).build()?, key, config };
    let mut pause = tokio::time::interval(Duration::from_secs(signer.config.poll_s.max(1)));
    loop {
        pause.tick().await;
        if let Err(e) = signer.once().await {
            tracing::warn!(error = format!("{e:#}"), "signing round failed; trying again");
        }
    }
}

struct Signer {
    client: reqwest::Client,
    key: SecretKey,
    config: SignerConfig,
}

impl Signer {
    async fn once(&self) -> Result<()> {
        let token = std::fs::read_to_string(&self.config.token_file).context("cannot read the token file")?;
        let url = |path: &str| format!("{}{path}", self.config.server.trim_end_matches('/'));
        let response = self.client.get(url("/v1/signer/work")).bearer_auth(token.trim()).send().await?;
        let work: Work = response.error_for_status()?.json().await?;
        let now = if self.config.use_server_clock { work.business_time } else { SystemClock.now() };
        for waiting in &work.releases {
            let Some(decision) = self.judge(waiting, now).await? else { continue };
            let response =
                self.client.post(url("/v1/signer/decisions")).bearer_auth(token.trim()).json(&decision).send().await?;
            if !response.status().is_success() {
                bail!("the server did not take the decision: {}", response.text().await?);
            }
            if decision.catalog.is_some() {
                self.remember(waiting.manifest, now)?;
            }
        }
        Ok(())
    }

    /// `None`: waits for a person.
    async fn judge(&self, waiting: &WaitingRelease, now: DateTime<Utc>) -> Result<Option<Decision>> {
        let refuse = |reason: String| {
            Ok(Some(Decision {
                manifest: waiting.manifest,
                by: "signing policy".into(),
                reason,
                catalog: None,
                catalog_version: 0,
            }))
        };
        let manifest = match ManifestV1::from_bytes(waiting.manifest_text.as_bytes()) {
            Ok(m) => m,
            Err(e) => return refuse(format!("the manifest is not valid: {e}")),
        };
        let state = self.state()?;
        let day = now - TimeDelta::days(1);
        let today = state.signed.iter().filter(|(_, at)| *at > day).count();
        let (by, reason) = match self.config.policy.rule(&self.config.app, waiting, &manifest, today) {
            Ruling::Refuse(why) => return refuse(why),
            Ruling::Sign => ("signing policy".to_owned(), "the signing policy allows it".to_owned()),
            Ruling::AskPerson(why) => match self.approval(waiting.manifest)? {
                Some(a) => (a.by, format!("approved by a person: {} (policy: {why})", a.reason)),
                None => {
                    tracing::info!(manifest = %waiting.manifest, why, "waits for a person: flywheel signer approve");
                    return Ok(None);
                }
            },
        };
        let repository = self.repository().await?;
        let edit = CatalogEdit { add: vec![manifest], ..CatalogEdit::default() };
        let catalog = catalog_next(&repository, &edit, &Expiries::of(Profile::Starter), now)?.sign(&[&self.key])?;
        Ok(Some(Decision {
            manifest: waiting.manifest,
            by,
            reason,
            catalog: Some(STANDARD.encode(&catalog.bytes)),
            catalog_version: catalog.version,
        }))
    }

    /// The repository as devices see it, verified from our own trust anchor.
    async fn repository(&self) -> Result<RepositoryState> {
        let anchor = std::fs::read(&self.config.trusted_root).context("cannot read the trust anchor")?;
        let mut files: std::collections::HashMap<String, Option<Vec<u8>>> = std::collections::HashMap::new();
        // the loader asks synchronously: fetch what it misses and start over until it has everything
        loop {
            let mut missing = None;
            let loaded = RepositoryState::load(&anchor, &self.config.app, &mut |path| match files.get(path) {
                Some(bytes) => Ok(bytes.clone()),
                None => {
                    missing = Some(path.to_owned());
                    Err("not fetched yet".into())
                }
            });
            match (loaded, missing) {
                (_, Some(path)) => {
                    let bytes = self.fetch(&path).await?;
                    files.insert(path, bytes);
                }
                (Ok(Some(state)), None) => return Ok(state),
                (Ok(None), None) => bail!("the server has no published repository for app `{}`", self.config.app),
                (Err(e), None) => return Err(e.into()),
            }
        }
    }

    async fn fetch(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let url = format!("{}/tuf/{}/{path}", self.config.server.trim_end_matches('/'), self.config.app);
        let response = self.client.get(url).send().await?;
        if response.status() == reqwest::StatusCode::NOT_FOUND {
            return Ok(None);
        }
        Ok(Some(response.error_for_status()?.bytes().await?.to_vec()))
    }

    fn state_file(&self) -> PathBuf {
        self.config.state_dir.join("state.json")
    }

    fn state(&self) -> Result<State> {
        match std::fs::read(self.state_file()) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).context("the signer's state file is damaged")?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(State::default()),
            Err(e) => Err(e.into()),
        }
    }

    fn approval(&self, manifest: Digest) -> Result<Option<Approval>> {
        match std::fs::read(self.config.state_dir.join(format!("approve-{manifest}.json"))) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).context("the approval file is damaged")?)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn remember(&self, manifest: Digest, now: DateTime<Utc>) -> Result<()> {
        let mut state = self.state()?;
        state.signed.push((manifest, now));
        std::fs::create_dir_all(&self.config.state_dir)?;
        write_atomically(&self.state_file(), &serde_json::to_vec(&state)?)
    }
}

fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().context("a state file lies in a folder")?;
    let mut temp = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut temp, bytes)?;
    temp.as_file().sync_all()?;
    temp.persist(path)?;
    std::fs::File::open(folder)?.sync_all()?;
    Ok(())
}
