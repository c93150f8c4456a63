//! API tokens: hashed at rest, with a role, for one app or for all, with an optional end.

use crate::query::{FromRow, Row, q};
use crate::secret::Secret;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Role};
use serde::Serialize;

/// A token as listed; the secret itself is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenRow {
    pub token_id: String,
    /// `None`: valid for every app.
    pub app_id: Option<AppId>,
    /// Who or what holds it; stands in audit entries.
    pub name: String,
    pub role: Role,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
}

impl TokenRow {
    /// Whether the token is valid at `now` for `app`.
    #[must_use]
    pub fn allows(&self, app: &AppId, now: DateTime<Utc>) -> bool {
        self.is_live(now) && self.app_id.as_ref().is_none_or(|own| own == app)
    }
    /// Neither revoked nor expired at `now`.
    #[must_use]
    pub fn is_live(&self, now: DateTime<Utc>) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|end| now < end)
    }
}

impl FromRow for TokenRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            token_id: row.text("token_id")?,
            app_id: row.opt_parsed("app_id")?,
            name: row.text("name")?,
            role: row.parsed("role")?,
            created_at: row.time("created_at")?,
            expires_at: row.opt_time("expires_at")?,
            revoked_at: row.opt_time("revoked_at")?,
        })
    }
}

/// What a new token is for.
#[derive(Debug, Clone)]
pub struct NewToken {
    pub app_id: Option<AppId>,
    pub name: String,
    pub role: Role,
    pub expires_at: Option<DateTime<Utc>>,
}

const SELECT: &str = "SELECT token_id, app_id, name, role, created_at, expires_at, revoked_at FROM tokens";

impl Store {
    /// The token that a caller presented, whatever its state: ask [`TokenRow::allows`]. This is the one finder
    /// without an app, because the token says which app it is for.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn token_find(&self, secret: &Secret) -> Result<Option<TokenRow>> {
        self.fetch_opt(q(format!("{SELECT} WHERE secret = $1")).bind(secret.digest())).await
    }

    /// Tokens of one app (`Some`) or those valid for all (`None`), newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn token_list(&self, app: Option<&AppId>) -> Result<Vec<TokenRow>> {
        let query = match app {
            Some(app) => q(format!("{SELECT} WHERE app_id = $1 ORDER BY created_at DESC, token_id")).bind(app),
            None => q(format!("{SELECT} WHERE app_id IS NULL ORDER BY created_at DESC, token_id")),
        };
        self.fetch(query).await
    }
}

impl Tx {
    /// Stores the digest of `secret` under a fresh id.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the app does not exist.
    pub async fn token_create(&mut self, new: &NewToken, secret: &Secret) -> Result<TokenRow> {
        let row = TokenRow {
            token_id: crate::ids::fresh("token"),
            app_id: new.app_id.clone(),
            name: new.name.clone(),
            role: new.role,
            created_at: self.at(),
            expires_at: new.expires_at,
            revoked_at: None,
        };
        let sql = "INSERT INTO tokens (token_id, app_id, name, role, secret, created_at, expires_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let query = q(sql)
            .bind(&row.token_id)
            .bind(&row.app_id)
            .bind(&row.name)
            .bind(row.role)
            .bind(secret.digest())
            .bind(row.created_at)
            .bind(row.expires_at);
        self.execute(query).await?;
        Ok(row)
    }

    /// Revokes a token for ever. Scoped: `Some(app)` revokes only tokens of that app.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such live token in that scope.
    pub async fn token_revoke(&mut self, app: Option<&AppId>, token_id: &str) -> Result<()> {
        let at = self.at();
        let scope = if app.is_some() { "app_id = $3" } else { "$3 IS NULL" };
        let sql = format!("UPDATE tokens SET revoked_at = $2 WHERE token_id = $1 AND revoked_at IS NULL AND {scope}");
        match self.execute(q(sql).bind(token_id).bind(at).bind(app)).await? {
            0 => Err(Error::not_found("token", token_id)),
            _ => Ok(()),
        }
    }
}
