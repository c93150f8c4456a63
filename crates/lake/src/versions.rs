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
    /// The same.
    #[serde(default)]
    pub metrics: u64,
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
            Table::Metrics => self.metrics,
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
            Table::Metrics => &mut self.metrics,
        } = version;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cursors of earlier programs, which knew fewer tables.
    #[test]
    fn cursors_of_earlier_programs_are_read() {
        let first = r#"{"interactions":3,"feedback":4,"device_events":5,"dispositions":6,"outcomes":7}"#;
        let first: Versions = serde_json::from_str(first).unwrap();
        assert_eq!(Table::ALL.map(|t| first.get(t)), [3, 4, 5, 6, 7, 0, 0]);
        let second = r#"{"interactions":3,"feedback":4,"device_events":5,"dispositions":6,"outcomes":7,"rejects":8}"#;
        let mut second: Versions = serde_json::from_str(second).unwrap();
        assert_eq!(second.get(Table::Rejects), 8);
        second.set(Table::Metrics, 9);
        assert_eq!(Table::ALL.map(|t| second.get(t)), [3, 4, 5, 6, 7, 8, 9]);
    }
}
