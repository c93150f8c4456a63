//! What a bundle did in the fleet: who ever held it, where it failed, how often people rejected it.

use super::columns::Columns;
use super::time;
use crate::lake::Lake;
use crate::versions::Versions;
use chrono::{DateTime, Utc};
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Digest, Error, TrustClass};
use std::collections::HashMap;

/// What one device reported about one bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBundle {
    pub trust: TrustClass,
    /// It was downloaded, installed or confirmed at least once.
    pub held: bool,
    /// Load failure, crash, memory kill or local fallback.
    pub failed: bool,
}

impl Lake {
    /// Devices (install id, hex) that reported anything about `bundle`. Only senders that proved their identity.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn bundle_devices(
        &self,
        app: &AppId,
        bundle: &Digest,
        as_of: Option<&Versions>,
    ) -> Result<HashMap<String, HeldBundle>, Error> {
        let query = format!(
            "SELECT install_id AS install, trust, \
             sum(CASE WHEN event IN ('downloaded', 'installed', 'confirmed') THEN 1 ELSE 0 END) AS held, \
             sum(CASE WHEN event IN ('load_failed', 'crashed', 'out_of_memory', 'fell_back') THEN 1 ELSE 0 END) AS failed \
             FROM device_events WHERE bundle = '{bundle}' AND install_id IS NOT NULL AND trust <> 'anonymous' \
             GROUP BY install_id, trust ORDER BY install"
        );
        let mut out = HashMap::new();
        for batch in self.rows(app, as_of, &[Table::DeviceEvents], &query).await? {
            let c = Columns::new(&batch);
            let (installs, trust) = (c.text("install")?, c.words("trust")?);
            let (held, failed) = (c.ints("held")?, c.ints("failed")?);
            for i in 0..batch.num_rows() {
                let Some(trust) = trust[i] else { continue };
                let row = HeldBundle { trust, held: held[i].unwrap_or(0) > 0, failed: failed[i].unwrap_or(0) > 0 };
                out.insert(installs.get(i).to_owned(), row);
            }
        }
        Ok(out)
    }

    /// First receipt of anything from each identity that proved itself.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn first_seen(
        &self,
        app: &AppId,
        as_of: Option<&Versions>,
    ) -> Result<HashMap<String, DateTime<Utc>>, Error> {
        let part = |t: &str| {
            format!(
                "SELECT install_id, min(received_at) AS at FROM {t} \
                 WHERE install_id IS NOT NULL AND trust <> 'anonymous' GROUP BY install_id"
            )
        };
        let query = format!(
            "SELECT install_id AS install, min(at) AS at FROM ({} UNION ALL {}) GROUP BY install_id",
            part("interactions"),
            part("device_events")
        );
        let mut out = HashMap::new();
        for batch in self.rows(app, as_of, &[Table::Interactions, Table::DeviceEvents], &query).await? {
            let c = Columns::new(&batch);
            let (installs, at) = (c.text("install")?, c.micros("at")?);
            for (i, at) in at.into_iter().enumerate() {
                if let Some(at) = at {
                    out.insert(installs.get(i).to_owned(), time(at));
                }
            }
        }
        Ok(out)
    }

    /// Share of a bundle's answers that people rejected; `None` without an answer. A frozen baseline, not a gate.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn rejection_rate(
        &self,
        app: &AppId,
        bundle: &Digest,
        as_of: Option<&Versions>,
    ) -> Result<Option<f64>, Error> {
        let query = format!(
            "SELECT count(DISTINCT i.interaction_id) AS answers, count(DISTINCT f.interaction_id) AS rejected \
             FROM interactions i LEFT JOIN (SELECT interaction_id, install_id FROM feedback \
               WHERE label IN ('rejected', 'edited', 'corrected', 'reported') AND trust <> 'anonymous') f \
             ON i.interaction_id = f.interaction_id AND i.install_id = f.install_id \
             WHERE i.bundle = '{bundle}' AND i.trust <> 'anonymous'"
        );
        let tables = [Table::Interactions, Table::Feedback];
        for batch in self.rows(app, as_of, &tables, &query).await? {
            let c = Columns::new(&batch);
            let (answers, rejected) = (c.ints("answers")?, c.ints("rejected")?);
            if let (Some(Some(n)), Some(Some(r))) = (answers.first(), rejected.first())
                && *n > 0
            {
                return Ok(Some(*r as f64 / *n as f64));
            }
        }
        Ok(None)
    }
}
