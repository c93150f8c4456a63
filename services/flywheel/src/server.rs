//! Everything a request, a step or a controller needs, made once at start.

use crate::config::{ClockConfig, Config};
use crate::delivery::{Delivery, Publication};
use crate::http::auth::IngestApp;
use crate::http::quota::Quotas;
use crate::http::senders::SenderQuotas;
use crate::ingest::Ingest;
use crate::mail::Mailer;
use crate::metrics::Metrics;
use crate::objects::Objects;
use anyhow::{Context, Result};
use chrono::{DateTime, Utc};
use flywheel_lake::{Lake, QueryScope, SavedView};
use flywheel_store::secret::Secret;
use flywheel_store::{Store, Tx};
use flywheel_telemetry::UserKeys;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock, Error, ErrorKind, VirtualClock};
use object_store::local::LocalFileSystem;
use std::collections::HashMap;
use std::sync::{Arc, RwLock};

/// The running control plane.
pub struct Server {
    pub config: Config,
    pub store: Store,
    pub objects: Objects,
    pub ingest: Ingest,
    pub lake: Lake,
    /// Makes the keys under which users are known.
    pub users: UserKeys,
    pub delivery: Delivery,
    pub metrics: Metrics,
    pub quotas: Quotas,
    pub senders: SenderQuotas,
    pub mailer: Option<Mailer>,
    /// Set when the business clock is virtual.
    pub virtual_clock: Option<VirtualClock>,
    clock: Arc<dyn BusinessClock>,
    /// Ingest keys seen before; a key lives as long as its app's release, and this is asked on every upload.
    keys: RwLock<HashMap<String, (IngestApp, i64)>>,
}

/// Seconds for which a known ingest key is not looked up again; a revoked key works at most this long.
const KEY_CACHE_S: i64 = 30;

impl Server {
    /// Opens stores and tables and replays the write-ahead log.
    ///
    /// # Errors
    /// When any of them cannot be opened; the message says which and where.
    pub async fn open(config: Config) -> Result<Arc<Self>> {
        let store = crate::cli::setup::open(&config).await?;
        store.migrate().await.context("the control database cannot be migrated")?;
        let virtual_clock = match config.clock {
            ClockConfig::System { .. } => None,
            ClockConfig::Virtual { start } => Some(VirtualClock::new(start)),
        };
        let clock: Arc<dyn BusinessClock> = match &virtual_clock {
            Some(v) => Arc::new(v.clone()),
            None => Arc::new(SystemClock),
        };
        let dir = config.objects_dir();
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let objects = Objects::new(Arc::new(LocalFileSystem::new_with_prefix(&dir)?), dir);
        let users = users(&store).await?;
        let lake = Lake::open(crate::ingest::lake_config(&config, users.clone())?)
            .await
            .context("the telemetry tables cannot be opened")?;
        let ingest = Ingest::new(lake.ingestor(), config.ingest.masks);
        let delivery = Delivery::new(config.tuf_dir(), config.keys_dir());
        let mailer = config.mail.as_ref().map(Mailer::new).transpose()?;
        Ok(Arc::new(Self {
            store,
            objects,
            ingest,
            lake,
            users,
            delivery,
            metrics: Metrics::default(),
            quotas: Quotas::default(),
            senders: SenderQuotas::new(
                config.ingest.install_events_per_minute,
                config.ingest.network_events_per_minute,
            ),
            mailer,
            virtual_clock,
            clock,
            keys: RwLock::default(),
            config,
        }))
    }

    /// Business time.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.clock.now()
    }

    /// The business clock, for schedules.
    #[must_use]
    pub fn clock(&self) -> Arc<dyn BusinessClock> {
        self.clock.clone()
    }

    /// A write transaction at the business time.
    ///
    /// # Errors
    /// `Unavailable` when the database is busy or gone.
    pub async fn begin(&self) -> Result<Tx, Error> {
        Ok(self.store.begin(self.now()).await?)
    }

    /// What a query of somebody of `app` sees: its rows, its saved views, and the business time.
    ///
    /// # Errors
    /// `Unavailable` when the database is busy or gone.
    pub async fn query_scope(&self, app: &AppId) -> Result<QueryScope, Error> {
        let rows = self.store.view_list(app).await?;
        let views = rows.into_iter().map(|v| SavedView { name: v.name, query: v.query }).collect();
        Ok(QueryScope { app: app.clone(), now: Some(self.now()), views })
    }

    /// The app behind an ingest key.
    ///
    /// # Errors
    /// `Unauthenticated` for an unknown or revoked key.
    pub async fn ingest_app(&self, key: &str) -> Result<IngestApp, Error> {
        let now_s = self.store.lease_now_us() / 1_000_000;
        if let Ok(keys) = self.keys.read()
            && let Some((app, until)) = keys.get(key)
            && now_s < *until
        {
            return Ok(app.clone());
        }
        let row = self.store.ingest_key_find(&Secret::presented(key)).await?.filter(|r| r.revoked_at.is_none());
        let Some(row) = row else {
            return Err(Error::new(
                ErrorKind::Unauthenticated,
                "unknown_ingest_key",
                "the ingest key is unknown or revoked",
                "ship a current key; `flywheel ingest-key create` makes one",
            ));
        };
        let events_per_minute = row.events_per_minute.and_then(|n| u32::try_from(n).ok());
        let app = IngestApp { app: row.app_id, key_id: row.key_id, events_per_minute };
        if let Ok(mut keys) = self.keys.write() {
            if keys.len() > 10_000 {
                keys.clear(); // keys are few; this bounds what wrong guesses could fill
            }
            keys.insert(key.to_owned(), (app.clone(), now_s + KEY_CACHE_S));
        }
        Ok(app)
    }

    /// Publishes for an app, off the async threads (it waits for the disk).
    ///
    /// # Errors
    /// Those of [`Delivery::publish`].
    pub async fn publish(&self, app: &AppId, what: Publication) -> Result<(), Error> {
        let now = self.now();
        tokio::task::block_in_place(|| self.delivery.publish(app, what, &|d| self.objects.file(d), now)).map(|_| ())
    }
}

/// The salt of user keys is made by whoever starts first on this database.
async fn users(store: &Store) -> Result<UserKeys> {
    let mut fresh = [0u8; 32];
    getrandom::fill(&mut fresh).map_err(|e| anyhow::anyhow!("the system gave no randomness: {e}"))?;
    let mut tx = store.begin(store.lease_now()).await?;
    let salt = tx.salt("user", &hex::encode(fresh)).await?;
    tx.commit().await?;
    let mut bytes = [0u8; 32];
    hex::decode_to_slice(&salt, &mut bytes).context("the salt of user keys in the control database is damaged")?;
    Ok(UserKeys::new(&bytes))
}

#[cfg(test)]
pub mod testing;
