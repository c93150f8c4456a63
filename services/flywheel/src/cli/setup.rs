//! Set-up commands that work on the control database directly: migrate, apps, tokens, ingest keys.

use crate::config::Config;
use anyhow::{Context, Result, bail};
use flywheel_store::Store;
use flywheel_store::apps::AppSettings;
use flywheel_store::secret::Secret;
use flywheel_store::tokens::NewToken;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock, Role};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Opens the control database of a configuration.
///
/// # Errors
/// When it cannot be reached; the message names the URL's kind, never a password.
pub async fn open(config: &Config) -> Result<Store> {
    std::fs::create_dir_all(&config.data_dir)
        .with_context(|| format!("cannot make the data folder {}", config.data_dir.display()))?;
    Ok(Store::connect(&config.database_url()).await?)
}

/// `flywheel migrate`.
///
/// # Errors
/// When the database cannot be reached or a migration fails.
pub async fn migrate(config: &Config) -> Result<()> {
    open(config).await?.migrate().await?;
    Ok(())
}

/// `flywheel app create`.
///
/// # Errors
/// When the app exists or its id is not valid.
pub async fn app_create(config: &Config, app: &str) -> Result<()> {
    let app = AppId::new(app)?;
    let store = open(config).await?;
    let mut tx = store.begin(SystemClock.now()).await?;
    if !tx.app_create(&app, &AppSettings::default()).await? {
        bail!("app `{app}` exists already");
    }
    tx.audit_append(&app, "cli", "app.create", app.as_str(), &serde_json::json!({})).await?;
    tx.commit().await?;
    Ok(())
}

/// A secret with 256 random bits from the operating system.
fn draw(prefix: &str) -> Result<Secret> {
    let mut seed = [0u8; 32];
    getrandom::fill(&mut seed).map_err(|e| anyhow::anyhow!("the system gave no randomness: {e}"))?;
    Ok(Secret::draw(prefix, &mut StdRng::from_seed(seed)))
}

async fn known(store: &Store, app: &str) -> Result<AppId> {
    let app = AppId::new(app)?;
    if store.app_get(&app).await?.is_none() {
        bail!("there is no app `{app}`: create it with `flywheel app create {app}`");
    }
    Ok(app)
}

/// `flywheel token create`; returns the token, which is stored as a hash only.
///
/// # Errors
/// When the app does not exist.
pub async fn token_create(config: &Config, app: Option<&str>, role: Role, name: &str) -> Result<String> {
    let store = open(config).await?;
    let app_id = match app {
        Some(a) => Some(known(&store, a).await?),
        None => None,
    };
    let secret = draw("fwt")?;
    let mut tx = store.begin(SystemClock.now()).await?;
    let new = NewToken { app_id: app_id.clone(), name: name.to_owned(), role, expires_at: None };
    let row = tx.token_create(&new, &secret).await?;
    if let Some(app) = &app_id {
        let detail = serde_json::json!({ "role": role, "name": name });
        tx.audit_append(app, "cli", "token.create", &row.token_id, &detail).await?;
    }
    tx.commit().await?;
    Ok(secret.reveal().to_owned())
}

/// `flywheel ingest-key create`; returns the key.
///
/// # Errors
/// When the app does not exist.
pub async fn ingest_key_create(config: &Config, app: &str, name: &str, quota: Option<u32>) -> Result<String> {
    let store = open(config).await?;
    let app = known(&store, app).await?;
    let secret = draw("fwi")?;
    let mut tx = store.begin(SystemClock.now()).await?;
    let row = tx.ingest_key_create(&app, name, &secret, quota.map(i64::from)).await?;
    let detail = serde_json::json!({ "name": name, "events_per_minute": quota });
    tx.audit_append(&app, "cli", "ingest_key.create", &row.key_id, &detail).await?;
    tx.commit().await?;
    Ok(secret.reveal().to_owned())
}
