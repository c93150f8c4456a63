//! Schema versions: applied in order, once, all or nothing, by one process at a time.

use crate::connect::Store;
use crate::error::{Error, Result};
use crate::query::{Count, FromRow, Row, q};
use chrono::DateTime;
use flywheel_types::Digest;

/// Arbitrary fixed number that serialises migrating processes on PostgreSQL.
const LOCK: i64 = 0x666c_7977;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS schema_migrations (
    version BIGINT PRIMARY KEY, name TEXT NOT NULL, digest TEXT NOT NULL)";

struct Applied {
    version: i64,
    digest: String,
}

impl FromRow for Applied {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { version: row.int("version")?, digest: row.text("digest")? })
    }
}

/// State of one migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migration {
    pub version: i64,
    pub name: &'static str,
    pub applied: bool,
}

impl Store {
    /// Brings the schema to the version of this program; does nothing when it is there already.
    ///
    /// # Errors
    /// [`Error::Conflict`] when an applied migration differs from the one this program carries or when the
    /// database is newer than this program.
    pub async fn migrate(&self) -> Result<()> {
        let mut tx = self.begin(DateTime::default()).await?;
        if let Some(lock) = tx.backend().wait_lock() {
            let _: Vec<Locked> = tx.fetch(q(lock).bind(LOCK)).await?;
        }
        tx.script(TABLE).await?;
        let applied: Vec<Applied> =
            tx.fetch(q("SELECT version, digest FROM schema_migrations ORDER BY version")).await?;
        let known = tx.backend().migrations();
        for row in &applied {
            check_known(row, known)?;
        }
        for (version, name, text) in known {
            if applied.iter().any(|a| a.version == *version) {
                continue;
            }
            tx.script(text).await?;
            tx.execute(
                q("INSERT INTO schema_migrations (version, name, digest) VALUES ($1, $2, $3)")
                    .bind(*version)
                    .bind(*name)
                    .bind(Digest::of(text.as_bytes())),
            )
            .await?;
            tracing::info!(version, name, "schema migration applied");
        }
        tx.commit().await
    }

    /// What [`Store::migrate`] would do, without doing it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn migration_list(&self) -> Result<Vec<Migration>> {
        let table = match self.backend() {
            crate::Backend::Sqlite => "SELECT COUNT(*) AS n FROM sqlite_master WHERE name = 'schema_migrations'",
            crate::Backend::Postgres => {
                "SELECT COUNT(*) AS n FROM pg_tables WHERE tablename = 'schema_migrations' \
                 AND schemaname = current_schema()"
            }
        };
        let exists = self.fetch_opt::<Count>(q(table)).await?.is_some_and(|c| c.0 > 0);
        let applied: Vec<Applied> = if exists {
            self.fetch(q("SELECT version, digest FROM schema_migrations ORDER BY version")).await?
        } else {
            Vec::new()
        };
        Ok(self
            .backend()
            .migrations()
            .iter()
            .map(|(version, name, _)| Migration {
                version: *version,
                name,
                applied: applied.iter().any(|a| a.version == *version),
            })
            .collect())
    }
}

struct Locked;

impl FromRow for Locked {
    fn from_row(_: &Row) -> Result<Self> {
        Ok(Self)
    }
}

fn check_known(row: &Applied, known: &[(i64, &str, &str)]) -> Result<()> {
    let Some((_, _, text)) = known.iter().find(|(v, _, _)| *v == row.version) else {
        return Err(Error::conflict(
            "schema version",
            row.version,
            "the database is newer than this program; run the newer program",
        ));
    };
    if Digest::of(text.as_bytes()).to_hex() != row.digest {
        return Err(Error::conflict(
            "schema version",
            row.version,
            "it was applied from a different text; migrations are never edited, add a new one",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    async fn after(sql: &'static str) -> Result<()> {
        let scratch = Scratch::sqlite(None).await?;
        let mut tx = scratch.store.begin(DateTime::default()).await?;
        tx.script(sql).await?;
        tx.commit().await?;
        scratch.store.migrate().await
    }

    #[tokio::test]
    async fn edited_and_unknown_migrations_are_refused() {
        after("SELECT 1").await.unwrap();
        let edited = after("UPDATE schema_migrations SET digest = 'x'").await.unwrap_err();
        assert!(edited.to_string().contains("never edited"), "{edited}");
        let newer = "INSERT INTO schema_migrations VALUES (99, 'later', 'x')";
        let newer = after(newer).await.unwrap_err();
        assert!(newer.to_string().contains("newer than this program"), "{newer}");
    }

    #[test]
    fn both_back_ends_have_the_same_tables() {
        use crate::Backend;
        let (lite, pg) = (Backend::Sqlite.migrations(), Backend::Postgres.migrations());
        assert_eq!(lite.len(), pg.len());
        for ((v, name, lite), (w, other, pg)) in lite.iter().zip(pg) {
            assert_eq!((v, name), (w, other));
            let plain = |text: &str| {
                let body = text.split_once("CREATE TABLE").map_or(text, |(_, rest)| rest);
                body.replace("BIGINT", "INTEGER").replace(" STRICT;", ";")
            };
            assert_eq!(plain(lite), plain(pg), "migration {v}");
        }
    }
}
