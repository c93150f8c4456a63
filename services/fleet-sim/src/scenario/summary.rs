//! What the story measured, as the JSON of the demo's `--summary`.

use super::stage::Stage;
use super::{Args, Part};
use anyhow::{Context, Result};
use flywheel_types::Digest;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Figures, filled part by part.
#[derive(Debug, Default)]
pub struct Summary {
    pub parts: Vec<Part>,
    pub error: Option<String>,
    pub base_bundle: Option<String>,
    pub full_downloads: u64,
    pub frozen: Vec<String>,
    pub planted_found: bool,
    pub innocent_frozen: u64,
    /// Innocent chunks that were hidden from a share of the phones to compare.
    pub innocent_tested: u64,
    pub unfrozen_verified: bool,
    pub dataset: Option<String>,
    pub candidate: Option<String>,
    /// The float model that the candidate was made of.
    pub merged: Option<String>,
    /// How its file was made.
    pub quantization: Value,
    /// Wall time of the jobs that made and judged it.
    pub job_seconds: BTreeMap<&'static str, f64>,
    pub accuracy_before: f64,
    pub accuracy_after: f64,
    pub mcnemar_p: f64,
    pub heldout_questions: u64,
    /// `state:step` of every plan of every rollout, in order.
    pub steps: Vec<String>,
    /// Those of the rollout that went to everybody.
    pub promotion_steps: Vec<String>,
    /// Offline verdict and the last online word of each gate, rollout by rollout.
    pub verdicts: Vec<String>,
    pub promotion_share: f64,
    /// Phones, by index, that ever ran the treatment of the rollout that is followed now.
    pub exposed: BTreeSet<usize>,
    pub forgery_tried: bool,
    pub forgery_moved_gate: bool,
    pub tamper_refused: bool,
    pub exposed_share: f64,
    pub rollback_seconds: f64,
    pub rollback_virtual_minutes: i64,
    pub devices_restored: u64,
    pub devices_total: u64,
}

impl Summary {
    /// Manifest of the last complete bundle.
    pub async fn good_bundle(&self, stage: &Stage) -> Result<String> {
        let releases = stage.operator.get("/v1/releases").await?;
        let newest = releases
            .as_array()
            .into_iter()
            .flatten()
            .filter(|r| !r["completed_at"].is_null())
            .max_by_key(|r| r["completed_at"].as_str().map(str::to_owned));
        let newest = newest.and_then(|r| r["manifest"].as_str());
        Ok(newest.context("no release is complete")?.to_owned())
    }

    /// What was decided; times and speeds are left out.
    fn decisions(&self) -> Value {
        json!({
            "frozen": self.frozen, "dataset": self.dataset, "candidate": self.candidate, "steps": self.steps,
            "verdicts": self.verdicts, "heldout": [self.accuracy_before, self.accuracy_after],
        })
    }

    pub fn to_json(&self, args: &Args, held: bool) -> Value {
        let parts: Vec<String> = self.parts.iter().map(|p| format!("{p:?}").to_lowercase()).collect();
        let mut out = json!({
            "ok": held,
            "parts": parts,
            "seed": args.seed,
            "phones": args.phones,
            "decisions": self.decisions(),
            "decisions_digest": Digest::of(self.decisions().to_string().as_bytes()),
            "full_downloads": self.full_downloads,
        });
        let Some(map) = out.as_object_mut() else { return out };
        if let Some(e) = &self.error {
            map.insert("error".into(), json!(e));
        }
        let mut add = |part: Part, key: &str, value: Value| {
            if self.parts.contains(&part) {
                map.insert(key.into(), value);
            }
        };
        add(
            Part::Chunk,
            "attribution",
            json!({
                "planted_found": self.planted_found, "innocent_frozen": self.innocent_frozen,
                "innocent_tested": self.innocent_tested,
                "unfrozen_verified": self.unfrozen_verified,
            }),
        );
        add(
            Part::Improve,
            "lora",
            json!({
                "accuracy_before": self.accuracy_before, "accuracy_after": self.accuracy_after, "mcnemar_p": self.mcnemar_p,
                "heldout_questions": self.heldout_questions,
            }),
        );
        add(Part::Improve, "promotion", json!({ "steps": self.promotion_steps, "final_share": self.promotion_share }));
        let object = |digest: &Option<String>| {
            json!(digest.as_ref().map(|d| args.dir.join("server/objects").join(&d[..2]).join(d)))
        };
        add(Part::Improve, "quantization", self.quantization.clone());
        add(Part::Improve, "job_seconds", json!(self.job_seconds));
        add(Part::Improve, "candidate_gguf", object(&self.candidate));
        add(Part::Improve, "merged_gguf", object(&self.merged));
        add(Part::Improve, "tamper", json!({ "refused": self.tamper_refused }));
        add(Part::Improve, "forgery", json!({ "moved_gate": self.forgery_moved_gate }));
        add(
            Part::Damage,
            "rollback",
            json!({
                "exposed_share": self.exposed_share, "seconds": self.rollback_seconds,
                "virtual_minutes": self.rollback_virtual_minutes, "devices_restored": self.devices_restored,
                "devices_total": self.devices_total,
            }),
        );
        out
    }
}
