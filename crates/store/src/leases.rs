//! Named leases with a fencing token: who may publish into a folder, who runs a singleton. Lease time, not business
//! time.

use crate::query::{FromRow, Row, q};
use crate::{Error, Result, Tx};
use std::time::Duration;

/// A lease that was taken. The token rises with each change of owner; a side effect must carry it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub token: i64,
    /// Lease time of its end, microseconds since the epoch.
    pub expires_at_us: i64,
}

impl FromRow for Lease {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { token: row.int("token")?, expires_at_us: row.int("expires_at")? })
    }
}

impl Tx {
    /// Takes or renews the lease `name` for `owner`; `None` while another owner holds it. `owner` must be unique per
    /// process start, or a restarted process would inherit the lease of its frozen predecessor.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn lease_acquire(&mut self, name: &str, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        let now = self.lease_now_us();
        let ttl_us =
            i64::try_from(ttl.as_micros()).map_err(|_| Error::invalid("lease", "its length is beyond 2^63 µs"))?;
        let sql = "INSERT INTO leases (name, owner, token, expires_at) VALUES ($1, $2, 1, $3) \
                   ON CONFLICT (name) DO UPDATE SET \
                   token = leases.token + CASE WHEN leases.owner = excluded.owner THEN 0 ELSE 1 END, \
                   owner = excluded.owner, expires_at = excluded.expires_at \
                   WHERE leases.owner = excluded.owner OR leases.expires_at <= $4 \
                   RETURNING token, expires_at";
        let query = q(sql).bind(name).bind(owner).bind(now.saturating_add(ttl_us)).bind(now);
        self.fetch_opt(query).await
    }

    /// Checks inside the committing transaction that `owner` still holds `name` with `token`.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it does not.
    pub async fn lease_fence(&mut self, name: &str, owner: &str, token: i64) -> Result<()> {
        let sql = "UPDATE leases SET expires_at = expires_at \
                   WHERE name = $1 AND owner = $2 AND token = $3 AND expires_at > $4";
        let now = self.lease_now_us();
        match self.execute(q(sql).bind(name).bind(owner).bind(token).bind(now)).await? {
            0 => Err(Error::conflict("lease", name, "it is lost; stop")),
            _ => Ok(()),
        }
    }

    /// Gives a lease back; nothing happens when it is lost already.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn lease_release(&mut self, name: &str, owner: &str, token: i64) -> Result<()> {
        let sql = "UPDATE leases SET expires_at = 0 WHERE name = $1 AND owner = $2 AND token = $3";
        self.execute(q(sql).bind(name).bind(owner).bind(token)).await.map(|_| ())
    }
}
