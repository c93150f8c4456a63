//! Delta versions of all tables at one moment: the watermark a pipeline step reads up to and keeps as its cursor.

use flywheel_telemetry::Table;
use serde::{Deserialize, Serialize};

/// One Delta version per table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Versions {
    pub interactions: u64,
    pub feedback: u64,
    pub device_events: u64,
    pub dispositions: u64,
    pub outcomes: u64,
    /// Not in cursors of an earlier version.
    #[serde(default)]
    pub rejects: u64,
}

impl Versions {
    /// Version of `table`.
    #[must_use]
    pub fn get(&self, table: Table) -> u64 {
        match table {
            Table::Interactions => self.interactions,
            Table::Feedback => self.feedback,
            Table::DeviceEvents => self.device_events,
            Table::Dispositions => self.dispositions,
            Table::Outcomes => self.outcomes,
            Table::Rejects => self.rejects,
        }
    }
    pub(crate) fn set(&mut self, table: Table, version: u64) {
        *match table {
            Table::Interactions => &mut self.interactions,
            Table::Feedback => &mut self.feedback,
            Table::DeviceEvents => &mut self.device_events,
            Table::Dispositions => &mut self.dispositions,
            Table::Outcomes => &mut self.outcomes,
            Table::Rejects => &mut self.rejects,
        } = version;
    }
}
