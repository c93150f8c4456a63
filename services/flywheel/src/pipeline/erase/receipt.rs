//! What an erasure did, as its receipt: counts, digests, what a hold keeps, and what it cannot reach.

use chrono::{DateTime, Utc};
use flywheel_lake::Removed;
use flywheel_store::erasures::{ErasureRow, ErasureState};
use flywheel_types::{Digest, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What the attempts did so far; kept with the erasure, so that a crash does not forget it.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    pub attempts: u32,
    pub interactions: u64,
    /// Rows by table.
    pub rows: BTreeMap<String, u64>,
    /// Rows that a hold keeps, by table; of the last attempt.
    pub held: BTreeMap<String, u64>,
    pub files_rewritten: u64,
    pub files_deleted: u64,
    pub log_segments: u64,
    pub corrections: u64,
    pub datasets: Vec<Replaced>,
    /// Candidates that were trained on an erased sample.
    pub models: Vec<String>,
}

/// A dataset snapshot that was replaced.
#[derive(Debug, Serialize, Deserialize)]
pub struct Replaced {
    pub erased: Digest,
    pub successor: Option<Digest>,
    pub samples: u64,
}

impl Progress {
    /// Of the attempts before.
    ///
    /// # Errors
    /// Internal when it cannot be read.
    pub fn of(row: &ErasureRow) -> Result<Self, Error> {
        serde_json::from_value(row.progress.clone()).map_err(Error::internal)
    }

    /// As it is stored.
    ///
    /// # Errors
    /// Never in practice.
    pub fn to_json(&self) -> Result<Value, Error> {
        serde_json::to_value(self).map_err(Error::internal)
    }

    /// Adds what was removed from the tables.
    pub fn add(&mut self, removed: &BTreeMap<&str, Removed>) {
        self.held.clear();
        for (table, r) in removed {
            *self.rows.entry((*table).to_owned()).or_default() += r.rows;
            self.held.insert((*table).to_owned(), r.held);
            self.files_rewritten += r.files;
        }
    }

    /// Rows that a hold keeps.
    pub fn held_rows(&self) -> u64 {
        self.held.values().sum()
    }
}

/// What no erasure reaches, said in every receipt.
const SCOPE: &[&str] = &[
    "erased: tables, rejected records, write-ahead log, replaced files, corrections, datasets",
    "not reached: back-ups of the data folder, the bucket or the control database; rotate them out",
    "kept: the audit log, which is append-only; it names the subject by digest, and entries of \
     earlier versions about corrections name interactions",
    "kept until they are overwritten: free pages of the control database",
    "kept: sums of attribution per device under a truncated digest, without texts, ids or times of single answers",
    "kept: signed rollout plans that pin a device by name; they cannot be changed",
    "kept: texts of saved views, which people write",
    "models listed as trained on erased samples are not retrained: retire or retrain them",
    "what arrives after the erasure is new, also a late label of an erased answer, and history that is imported \
     again",
];

/// The receipt; its digest is that of the JSON text without the digest.
pub fn write(row: &ErasureRow, state: ErasureState, done: &Progress, holds: &[String], now: DateTime<Utc>) -> Value {
    let mut receipt = json!({
        "v": 1,
        "erasure_id": row.erasure_id,
        "app": row.app_id,
        "state": state,
        "subject": { "kind": row.subject_kind, "digest": row.subject_digest },
        "requested_at": row.requested_at,
        "requested_by": row.requested_by,
        "finished_at": now,
        "attempts": done.attempts,
        "interactions": done.interactions,
        "rows": done.rows,
        "corrections": done.corrections,
        "datasets": done.datasets,
        "models_trained_on_erased_samples": done.models,
        "files": { "rewritten": done.files_rewritten, "deleted": done.files_deleted },
        "log_segments_freed": done.log_segments,
        "held": { "rows": done.held, "holds": holds },
        "scope": SCOPE,
    });
    receipt["digest"] = json!(Digest::of(receipt.to_string().as_bytes()));
    receipt
}

#[cfg(test)]
mod tests {
    use super::*;
    use flywheel_store::erasures::SubjectKind;

    #[test]
    fn a_receipt_names_the_subject_by_digest_and_itself_by_its_content() {
        let row = ErasureRow {
            app_id: "shop".parse().unwrap(),
            erasure_id: "e-1".into(),
            subject_kind: SubjectKind::UserKey,
            subject: Some("0123abcd".into()),
            subject_digest: Digest::of(b"0123abcd"),
            reason: "asked".into(),
            requested_by: "ann".into(),
            state: ErasureState::Requested,
            progress: json!({ "attempts": 1, "rows": { "feedback": 2 } }),
            receipt: None,
            requested_at: DateTime::UNIX_EPOCH,
            updated_at: DateTime::UNIX_EPOCH,
        };
        let mut done = Progress::of(&row).unwrap();
        done.add(&[("feedback", Removed { rows: 3, held: 4, files: 1 })].into());
        assert_eq!((done.rows["feedback"], done.held_rows(), done.files_rewritten), (5, 4, 1));
        let mut receipt = write(&row, ErasureState::Held, &done, &["case".into()], DateTime::UNIX_EPOCH);
        assert!(!receipt.to_string().contains("0123abcd"));
        let digest = receipt.as_object_mut().unwrap().remove("digest").unwrap();
        assert_eq!(digest, json!(Digest::of(receipt.to_string().as_bytes())));
    }
}
