//! A private, migrated database for one test, on SQLite and on PostgreSQL (feature `scratch`, for tests only).
//!
//! PostgreSQL is used when `FLYWHEEL_TEST_POSTGRES_URL` names a server on which a schema may be created; every scratch
//! database is a schema of its own there.

use crate::error::Result;
use crate::{Error, Store, StoreOptions};
use flywheel_types::LeaseClock;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};
use std::sync::Arc;

/// Names the server for tests.
pub const POSTGRES_URL: &str = "FLYWHEEL_TEST_POSTGRES_URL";

/// A store with a database of its own.
pub struct Scratch {
    pub store: Store,
    /// For further processes and connections to the same database.
    pub url: String,
    dir: Option<tempfile::TempDir>,
    schema: Option<(String, String)>,
}

fn options(clock: Option<Arc<dyn LeaseClock>>) -> StoreOptions {
    StoreOptions { lease_clock: clock, connections: 6, ..StoreOptions::default() }
}

async fn admin(url: &str, sql: String) -> Result<()> {
    sqlx::any::install_default_drivers();
    let mut conn = sqlx::AnyConnection::connect(url).await?;
    conn.execute(AssertSqlSafe(sql)).await?;
    Ok(conn.close().await?)
}

impl Scratch {
    /// A SQLite file in a temporary folder.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn sqlite(clock: Option<Arc<dyn LeaseClock>>) -> Result<Self> {
        let dir = tempfile::tempdir().map_err(|e| Error::invalid("temporary folder", e.to_string()))?;
        let url = format!("sqlite:{}", dir.path().join("control.db").display());
        let store = Store::connect_with(&url, options(clock)).await?;
        store.migrate().await?;
        Ok(Self { store, url, dir: Some(dir), schema: None })
    }

    /// A schema on the PostgreSQL server; `None` when no server is named.
    ///
    /// # Errors
    /// Those of the server.
    pub async fn postgres(clock: Option<Arc<dyn LeaseClock>>) -> Result<Option<Self>> {
        let Ok(server) = std::env::var(POSTGRES_URL) else {
            return Ok(None);
        };
        let schema = crate::ids::fresh("t").replace('-', "_");
        admin(&server, format!("CREATE SCHEMA {schema}")).await?;
        let joint = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{joint}options=-csearch_path%3D{schema}");
        let store = Store::connect_with(&url, options(clock)).await?;
        store.migrate().await?;
        Ok(Some(Self { store, url, dir: None, schema: Some((server, schema)) }))
    }

    /// Closes the store and removes the database.
    ///
    /// # Errors
    /// Those of the server.
    pub async fn remove(self) -> Result<()> {
        self.store.close().await;
        if let Some((server, schema)) = self.schema {
            admin(&server, format!("DROP SCHEMA {schema} CASCADE")).await?;
        }
        drop(self.dir);
        Ok(())
    }
}
