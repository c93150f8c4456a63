//! The parts of the story, in order. Each checks what it shows; a part that does not hold ends the run.

use super::stage::Stage;
use super::{Summary, say};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::Instant;

/// Sets up the app: knowledge, settings, and the base model as the first signed bundle.
pub async fn set_up(stage: &mut Stage, out: &mut Summary) -> Result<()> {
    let policies = json!({
        // two people do all corrections of this story, and values are corrected to the bare value
        "dataset_policy": { "max_person_share": 1.0, "max_edit_ratio": 1.0 },
        "dataset_trigger": { "min_corrections": super::repair::CORRECTIONS },
        "lora": { "steps": 60 },
    });
    say(&format!("settings that differ from the shipped ones: {policies}"));
    stage.configure(policies).await?;
    let chunks: Vec<Value> = stage
        .facts
        .iter()
        .map(|f| json!({ "chunk_id": f.chunk_id, "text": f.text, "collection": f.collection, "source": "handbook" }))
        .collect();
    let put = stage.operator.put("/v1/chunks", &json!({ "chunks": chunks })).await?;
    say(&format!("knowledge base: {} chunks registered, 3 prompt templates", put["created"]));
    let base = stage.args.models.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let uploaded = stage.operator.upload("/v1/models", &base).await?;
    let body = json!({ "kind": "weights", "artefact": uploaded["artefact"], "note": "SmolLM2-135M-Instruct, Q4_1" });
    let candidate = stage.operator.post("/v1/candidates", &body).await?;
    say(&format!("base model uploaded: candidate {}", candidate["candidate_id"]));
    let release = approved(stage, &candidate).await?;
    say(&format!("base bundle {} signed by the release key of the signer process", &release[..12]));
    default_bundle(stage).await?;
    out.base_bundle = Some(release);
    Ok(())
}

/// Waits until the first bundle is the default: its rollout follows the signature.
async fn default_bundle(stage: &Stage) -> Result<()> {
    for _ in 0..120 {
        let rollouts = stage.operator.get("/v1/rollouts").await?;
        if rollouts.as_array().is_some_and(|r| r.iter().any(|r| r["state"] == "complete")) {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    bail!("the first bundle is not the default after 30 s")
}

/// Waits until the signer has signed the release of a candidate; answers its manifest digest.
async fn approved(stage: &Stage, candidate: &Value) -> Result<String> {
    let id = candidate["candidate_id"].as_str().context("the server gave the candidate no id")?;
    for _ in 0..600 {
        stage.admin.post("/v1/clock", &json!({ "now": stage.now })).await?;
        let releases = stage.operator.get("/v1/releases").await?;
        let found = releases.as_array().and_then(|r| r.iter().find(|r| r["candidate_id"] == id).cloned());
        if let Some(release) = found
            && release["state"] == "approved"
        {
            return Ok(release["manifest"].as_str().unwrap_or_default().to_owned());
        }
        let state = stage.operator.get(&format!("/v1/candidates/{id}")).await?;
        if state["state"] == "gate_failed" || state["state"] == "refused" {
            bail!("candidate {id} is {}: {}", state["state"], state["reason"]);
        }
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    bail!("candidate {id} was not signed within 150 s")
}

/// Phones that must have fetched and verified every byte over HTTP themselves.
const FULL_DOWNLOADS: u64 = 16;

/// All phones download, verify, install and confirm the base bundle.
pub async fn boot(stage: &mut Stage, out: &mut Summary) -> Result<()> {
    let started = Instant::now();
    let base = out.base_bundle.clone().context("there is no base bundle")?;
    let phones = stage.args.phones as u64;
    let share = |s: &Stage| s.running().iter().find(|(b, _)| *b == base).map_or(0, |(_, n)| *n);
    let downloads = |s: &Stage| s.fleet.own_slot_bytes().iter().filter(|(_, bytes)| *bytes > 0).count() as u64;
    stage
        .until("95 % of the phones run the base bundle and 16 downloaded all of it", 8, async |s| {
            Ok((share(s) * 100 >= phones * 95 && downloads(s) >= FULL_DOWNLOADS).then_some(()))
        })
        .await?;
    out.full_downloads = downloads(stage);
    say(&format!(
        "day {}: {} of {phones} phones run the base bundle; {} downloaded and verified every byte ({:.0} s)",
        stage.day(),
        share(stage),
        out.full_downloads,
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// The fleet lives until attribution has frozen the stale chunk; no innocent chunk may be frozen.
pub async fn stale_chunk(stage: &mut Stage, out: &mut Summary) -> Result<()> {
    let stale = stage.facts.iter().find(|f| f.is("stale")).cloned().context("no stale chunk")?;
    stage
        .until("the stale chunk is frozen", 30, async |s| Ok(s.frozen.contains(&stale.chunk_id).then_some(())))
        .await?;
    out.planted_found = true;
    let findings = stage.operator.get("/v1/findings").await?;
    let finding = findings.as_array().and_then(|f| f.iter().find(|f| f["subject"] == json!(stale.chunk_id)).cloned());
    let evidence = finding.map(|f| f["evidence"]["suspect"].clone()).unwrap_or_default();
    say(&format!(
        "day {}: likely cause found and frozen: {} ({} of {} answers rejected by {} people, log e {:.1})",
        stage.day(),
        stale.chunk_id,
        evidence["failures"],
        evidence["exposures"],
        evidence["users"],
        evidence["log_e_decision"].as_f64().unwrap_or(f64::NAN)
    ));
    repair(stage, &stale, out).await?;
    no_innocent(stage, out)
}

/// An editor corrects the text; it is embedded again, verified, tried on a canary share and put back.
async fn repair(stage: &mut Stage, stale: &super::kb::Fact, out: &mut Summary) -> Result<()> {
    let text = stale.corrected_text.clone().context("no corrected text")?;
    let chunk =
        json!({ "chunk_id": stale.chunk_id, "text": text, "collection": stale.collection, "source": "handbook" });
    stage.operator.put("/v1/chunks", &json!({ "chunks": [chunk] })).await?;
    for f in &mut stage.facts {
        if f.chunk_id == stale.chunk_id {
            f.text.clone_from(&text);
        }
    }
    let id = stale.chunk_id.clone();
    stage
        .until("the corrected chunk is in service", 24, async |s| {
            Ok((s.chunk_state(&id).await? == "active").then_some(()))
        })
        .await?;
    out.unfrozen_verified = true;
    say(&format!(
        "day {}: {} re-embedded from the corrected text, verified, back in service",
        stage.day(),
        stale.chunk_id
    ));
    Ok(())
}

/// No chunk may ever be frozen that gives right answers: that is every chunk but the stale one. Hiding a suspect from a
/// tenth of the phones for a while is no freeze but the experiment that clears it.
pub fn no_innocent(stage: &Stage, out: &mut Summary) -> Result<()> {
    let stale = |id: &&String| stage.facts.iter().any(|f| f.is("stale") && f.chunk_id == **id);
    let innocent: Vec<&String> = stage.frozen.iter().filter(|id| !stale(id)).collect();
    out.frozen = stage.frozen.iter().cloned().collect();
    out.innocent_frozen = innocent.len() as u64;
    ensure!(innocent.is_empty(), "innocent chunks were frozen until day {}: {innocent:?}", stage.day());
    let tested: Vec<&str> = stage.tested.iter().filter(|id| !stale(id)).map(String::as_str).collect();
    out.innocent_tested = tested.len() as u64;
    if !tested.is_empty() {
        say(&format!("         suspects hidden from a tenth of the phones so far, none frozen: {}", tested.join(", ")));
    }
    Ok(())
}

impl Stage {
    /// Notes which chunks the server has frozen, or tests on a share of the phones, at this moment.
    pub async fn look_at_chunks(&mut self) -> Result<()> {
        let rows = self.operator.get("/v1/chunks?limit=1000").await?;
        for row in rows.as_array().into_iter().flatten() {
            let id = row["chunk_id"].as_str().unwrap_or_default().to_owned();
            match row["state"].as_str() {
                Some("active" | "suspect") => {}
                Some("canary_frozen") => drop(self.tested.insert(id)),
                _ => drop(self.frozen.insert(id)),
            }
        }
        Ok(())
    }

    pub async fn chunk_state(&self, chunk: &str) -> Result<String> {
        let rows = self.operator.get("/v1/chunks?limit=1000").await?;
        let row = rows.as_array().and_then(|a| a.iter().find(|r| r["chunk_id"] == chunk).cloned());
        Ok(row.and_then(|r| r["state"].as_str().map(str::to_owned)).unwrap_or_default())
    }
}
