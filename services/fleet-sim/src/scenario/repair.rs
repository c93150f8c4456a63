//! The parts about models: corrections become a better model that is ramped to everybody; a damaging one is forced
//! through and taken back by itself.

use super::forgery;
use super::heldout::{HELD_OUT, HeldOut, Ranker};
use super::stage::{Stage, TICK_HOURS, spinner};
use super::world::SPAMMERS;
use super::{Summary, mail, say, story};
use anyhow::{Context, Result, bail, ensure};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use flywheel_inference::encoder::Encoder;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Instant;

/// Corrections that the two annotators make.
pub const CORRECTIONS: usize = 60;
/// The team that corrects works on this collection; the held-out questions are about another one.
pub const CORRECTED: &str = "kitchen";

/// File of the held-out questions with their answers, as conversations.
const HELD_OUT_TEXTS: &str = "heldout.jsonl";

/// Uploads the evaluation sets.
async fn evaluation_sets(stage: &Stage) -> Result<()> {
    let encoder = Encoder::open(&stage.args.models.join("all-minilm-l6-v2"))?;
    let HeldOut { hard, easy } = HeldOut::new(&Ranker::new(&stage.facts, &encoder));
    stage.operator.put("/v1/eval-sets/heldout", &json!({ "items": hard })).await?;
    stage.operator.put("/v1/eval-sets/forgetting", &json!({ "items": easy })).await?;
    let talk = |i: &super::heldout::Item| {
        let messages = json!([{ "role": "user", "content": i.prompt }, { "role": "assistant", "content": i.expect }]);
        format!("{}\n", json!({ "messages": messages }))
    };
    // what the sizes of the tuned model are compared on, at the end
    std::fs::write(stage.args.dir.join(HELD_OUT_TEXTS), hard.iter().map(talk).collect::<String>())?;
    say(&format!("evaluation sets: {} held-out questions at k = 3, {} at k = 1 (forgetting)", hard.len(), easy.len()));
    Ok(())
}

/// A third template with three notes is launched; its wrong answers become corrections, the corrections a model.
pub async fn improve(stage: &mut Stage, out: &mut Summary) -> Result<()> {
    evaluation_sets(stage).await?;
    stage.launch_template();
    say(&format!("day {}: the app launches a template with three notes", stage.day()));
    let mut corrected = BTreeSet::new();
    stage
        .until("enough corrections", 12, async |s| {
            correct(s, &mut corrected).await?;
            Ok((corrected.len() >= CORRECTIONS).then_some(()))
        })
        .await?;
    say(&format!("day {}: two annotators agreed on {} corrections", stage.day(), corrected.len()));
    let started = Instant::now();
    let rollout = stage
        .until("the tuned model starts its rollout", 2, async |s| {
            settle(s).await?;
            open_rollout(s).await
        })
        .await?;
    trained(stage, out).await?;
    for kind in ["lora", "requantize", "evaluate"] {
        out.job_seconds.insert(kind, job_seconds(stage, kind).await?);
    }
    say(&format!(
        "       training took {:.0} s, quantisation {:.0} s, evaluation {:.0} s; with signing {:.0} s",
        out.job_seconds["lora"],
        out.job_seconds["requantize"],
        out.job_seconds["evaluate"],
        started.elapsed().as_secs_f64()
    ));
    let (state, share) = follow(stage, &rollout, 80, out).await?;
    ensure!(state == "complete", "the improvement ended as {state}");
    out.promotion_share = share;
    out.promotion_steps.clone_from(&out.steps);
    story::no_innocent(stage, out)
}

/// How long the newest job of a kind ran.
async fn job_seconds(stage: &Stage, kind: &str) -> Result<f64> {
    let jobs = stage.operator.get(&format!("/v1/jobs?kind={kind}&limit=1")).await?;
    let at = |field: &str| -> Result<DateTime<Utc>> {
        Ok(jobs[0][field].as_str().with_context(|| format!("the job `{kind}` has no {field}"))?.parse()?)
    };
    Ok((at("finished_at")? - at("started_at")?).num_milliseconds() as f64 / 1e3)
}

/// Both annotators correct what customers rejected about their collection.
async fn correct(stage: &Stage, done: &mut BTreeSet<String>) -> Result<()> {
    // what came in since the last look; the list begins with the oldest
    let since = (stage.now - TimeDelta::hours(TICK_HOURS + 1)).to_rfc3339_opts(SecondsFormat::Secs, true);
    let rejected = stage.ann.get(&format!("/v1/interactions/rejected?limit=1000&since={since}")).await?;
    let spam: BTreeSet<String> = stage.install_ids(0..SPAMMERS).into_iter().collect();
    for r in rejected.as_array().into_iter().flatten() {
        let (Some(id), Some(question), Some(answer)) =
            (r["interaction_id"].as_str(), r["question"].as_str(), r["answer"].as_str())
        else {
            continue;
        };
        let known = stage.facts.iter().find(|f| f.collection == CORRECTED && f.questions.iter().any(|q| q == question));
        let Some(fact) = known else { continue };
        // also a right answer is corrected if it is not the bare value that the prompt asks for: a model that is trained
        // on its mistakes alone learns what they have in common, such as the place of the note
        if answer == fact.value
            || r["template_id"] != super::prompt::NOTES.id
            || done.contains(question)
            || spam.contains(r["install_id"].as_str().unwrap_or_default())
        {
            continue;
        }
        let chunks: Vec<String> =
            r["chunks"].as_array().into_iter().flatten().filter_map(|c| c.as_str().map(str::to_owned)).collect();
        let ids: Vec<&str> = chunks.iter().map(|c| c.split('@').next().unwrap_or_default()).collect();
        // what the model is measured on must not be trained on: the server would leave the correction out
        if stage.facts.iter().any(|f| f.collection == HELD_OUT && ids.contains(&f.chunk_id.as_str())) {
            continue;
        }
        let prompt = stage.prompt(r["template_id"].as_str().unwrap_or_default(), &chunks, question);
        let body = json!({
            "interaction_id": id, "template_id": r["template_id"], "prompt": prompt,
            "chunk_ids": ids, "wrong_answer": answer, "corrected_answer": fact.value,
        });
        stage.ann.post("/v1/corrections", &body).await?;
        stage.ben.post("/v1/corrections", &body).await?;
        done.insert(question.to_owned());
    }
    Ok(())
}

/// Lets the server finish its jobs without moving the clock.
async fn settle(stage: &Stage) -> Result<()> {
    let bar = spinner(format!("day {}: the server's jobs and the signer run", stage.day()));
    stage.admin.post("/v1/clock", &json!({ "now": stage.now })).await?;
    tokio::time::sleep(std::time::Duration::from_secs(2)).await; // the signer polls once a second
    stage.admin.post("/v1/clock", &json!({ "now": stage.now })).await?;
    bar.finish_and_clear();
    Ok(())
}

async fn open_rollout(stage: &Stage) -> Result<Option<String>> {
    let rollouts = stage.operator.get("/v1/rollouts?open=true").await?;
    Ok(rollouts.as_array().and_then(|r| r.first()).and_then(|r| r["rollout_id"].as_str()).map(str::to_owned))
}

/// Reads what the offline gate said about the tuned candidate.
async fn trained(stage: &Stage, out: &mut Summary) -> Result<()> {
    let candidates = stage.operator.get("/v1/candidates").await?;
    let tuned = candidates.as_array().and_then(|c| c.iter().find(|c| !c["dataset"].is_null()).cloned());
    let tuned = tuned.context("no tuned candidate")?;
    let id = tuned["candidate_id"].as_str().unwrap_or_default();
    let whole = stage.operator.get(&format!("/v1/candidates/{id}")).await?;
    let report = whole["evaluations"].as_array().and_then(|e| e.last().cloned()).context("no evaluation")?;
    let accuracy = &report["report"]["gate"]["accuracy"];
    out.candidate = Some(tuned["artefact"].as_str().unwrap_or_default().to_owned());
    out.dataset = Some(tuned["dataset"].as_str().unwrap_or_default().to_owned());
    out.heldout_questions = accuracy["items"].as_u64().unwrap_or(0);
    let share = |n: &Value| n.as_f64().unwrap_or(0.0) / out.heldout_questions.max(1) as f64;
    (out.accuracy_before, out.accuracy_after) =
        (share(&accuracy["incumbent_correct"]), share(&accuracy["candidate_correct"]));
    out.mcnemar_p = accuracy["mcnemar_p"].as_f64().unwrap_or(1.0);
    let easy = &report["report"]["sets"]["forgetting"];
    say(&format!(
        "day {}: LoRA candidate {id}: held-out k = 3 {:.0} % → {:.0} % of {} (McNemar p = {:.2e}); k = 1 {} → {} of {}",
        stage.day(),
        out.accuracy_before * 100.0,
        out.accuracy_after * 100.0,
        out.heldout_questions,
        out.mcnemar_p,
        easy["incumbent_correct"],
        easy["candidate_correct"],
        easy["items"]
    ));
    quantized(stage, &tuned["report"], out)?;
    ensure!(out.mcnemar_p <= 0.05 && out.accuracy_after > out.accuracy_before, "the LoRA candidate is not better");
    Ok(())
}

/// Reads how the candidate's file was made.
fn quantized(stage: &Stage, report: &Value, out: &mut Summary) -> Result<()> {
    let made = &report["quantization"];
    out.merged = Some(report["merged"].as_str().context("the candidate does not name its float model")?.to_owned());
    out.quantization = made.clone();
    if let Value::Object(map) = &mut out.quantization {
        map.remove("tensor_types");
    }
    let step = |name: &str| made["steps"][name].as_f64().unwrap_or(f64::NAN);
    let types = made["tensor_types"].as_object();
    let types = types.into_iter().flatten().map(|(ty, of)| format!("{} {ty}", of.as_array().map_or(0, Vec::len)));
    say(&format!(
        "day {}: its file has {:.1} MB, {:.2} bits a weight ({} matrices), calibrated on {} tokens of the corrections; \
         relative squared error of the outputs: nearest levels {:.2e} → importance {:.2e} → channel scales {:.2e} → compensated {:.2e}",
        stage.day(),
        made["size_bytes"].as_f64().unwrap_or(f64::NAN) / 1e6,
        made["bits_per_weight"].as_f64().unwrap_or(f64::NAN),
        types.collect::<Vec<_>>().join(", "),
        made["calibration"]["tokens"],
        step("rounded"),
        step("weighted"),
        step("folded"),
        step("stored"),
    ));
    ensure!(step("stored") <= step("rounded"), "calibration made the file worse than nearest levels");
    Ok(())
}

/// Ticks until the rollout is over; prints each step with its intervals. Answers the final state and the share of the
/// fleet in the treatment of the last plan.
async fn follow(stage: &mut Stage, rollout: &str, most: u64, out: &mut Summary) -> Result<(String, f64)> {
    let (mut seen, mut forged) = (0, None);
    let path = format!("/v1/rollouts/{rollout}");
    for _ in 0..=most {
        let view = stage.operator.get(&path).await?;
        let plans = view["plans"].as_array().cloned().unwrap_or_default();
        for plan in plans.iter().skip(seen) {
            print_plan(stage, plan, &view);
            if plan["state"] == "canary" && out.candidate.is_some() && !out.forgery_tried {
                out.forgery_tried = true;
                forged = Some(forgery::send(stage, rollout).await?);
            }
            out.steps.push(format!("{}:{}", plan["state"].as_str().unwrap_or_default(), plan["step"]));
        }
        seen = plans.len();
        let state = view["rollout"]["state"].as_str().unwrap_or_default().to_owned();
        if let Some(moved) = forged.as_ref().map(|f| forgery::moved_gate(&view, f)).transpose()?.flatten() {
            out.forgery_moved_gate = moved;
            forged = None;
        }
        if matches!(state.as_str(), "complete" | "rolled_back" | "superseded") {
            ensure!(forged.is_none(), "the forged reports reached no gate report of {rollout}");
            out.verdicts.extend(words(&view));
            return Ok((state, plans.last().map_or(0.0, |p| percent(&p["treatment"]) / 100.0)));
        }
        stage.tick().await?;
        let treatment = plans.last().and_then(|p| p["candidate_bundle"].as_str()).unwrap_or_default();
        out.exposed.extend(stage.running_on(treatment));
    }
    let view = stage.operator.get(&path).await?;
    let last = view["verdicts"].as_array().and_then(|v| v.last().cloned()).unwrap_or_default();
    bail!("rollout {rollout} did not end: {} ({})", view["rollout"]["state"], last["numbers"]["reason"]);
}

/// `gate:word` of the newest report.
fn words(view: &Value) -> Vec<String> {
    let gates = view["verdicts"].as_array().and_then(|v| v.last()).map(|v| v["numbers"]["gates"].clone());
    let word = |g: &Value| format!("{}:{}", g["name"].as_str().unwrap_or("?"), g["word"].as_str().unwrap_or("?"));
    gates.as_ref().and_then(Value::as_array).map(|g| g.iter().map(word).collect()).unwrap_or_default()
}

/// Width of a range of buckets, per cent of the fleet.
fn percent(range: &Value) -> f64 {
    (range["to"].as_f64().unwrap_or(0.0) - range["from"].as_f64().unwrap_or(0.0)) / 10_000.0
}

fn print_plan(stage: &Stage, plan: &Value, view: &Value) {
    say(&format!(
        "day {}: rollout {} → {:12} treatment {:5.1} %, control {:5.1} %: {}",
        stage.day(),
        plan["rollout_id"].as_str().unwrap_or_default(),
        plan["state"].as_str().unwrap_or_default(),
        percent(&plan["treatment"]),
        percent(&plan["control"]),
        plan["reason"].as_str().unwrap_or_default()
    ));
    let Some(verdict) = view["verdicts"].as_array().and_then(|v| v.last()) else { return };
    for gate in verdict["numbers"]["gates"].as_array().into_iter().flatten() {
        if let (Some(d), Some(l), Some(u)) =
            (gate["difference"].as_f64(), gate["lower"].as_f64(), gate["upper"].as_f64())
        {
            say(&format!(
                "         {:16} {:12} {:+6.2} pp [{:+6.2}, {:+6.2}], {} + {} devices",
                gate["name"].as_str().unwrap_or_default(),
                gate["word"].as_str().unwrap_or_default(),
                d * 100.0,
                l * 100.0,
                u * 100.0,
                gate["control_devices"],
                gate["treatment_devices"]
            ));
        }
    }
}

/// A damaging candidate from outside is forced past the offline gate; the fleet takes it back.
pub async fn damage(stage: &mut Stage, out: &mut Summary) -> Result<()> {
    out.exposed.clear();
    let file = wrong_model(stage)?;
    let uploaded = stage.operator.upload("/v1/models", &file).await?;
    let body = json!({ "kind": "weights", "artefact": uploaded["artefact"], "note": "tuned elsewhere" });
    let candidate = stage.operator.post("/v1/candidates", &body).await?;
    let id = candidate["candidate_id"].as_str().unwrap_or_default().to_owned();
    settle(stage).await?;
    let view = stage.operator.get(&format!("/v1/candidates/{id}")).await?;
    say(&format!(
        "day {}: candidate {id} from outside: offline gate says {} ({})",
        stage.day(),
        view["state"],
        view["reason"]
    ));
    ensure!(view["state"] == "gate_failed", "the damaging candidate passed the offline gate");
    out.verdicts.push("damage:gate_failed".into());
    stage
        .approver
        .post(&format!("/v1/candidates/{id}/override"), &json!({ "reason": "demo: show that the fleet says no" }))
        .await?;
    settle(stage).await?;
    let releases = stage.operator.get("/v1/releases").await?;
    let waiting = releases.as_array().and_then(|r| r.iter().find(|r| r["candidate_id"] == json!(id)).cloned());
    let waiting = waiting.context("the overridden candidate asked for no signature")?;
    ensure!(waiting["state"] == "signing_requested", "the signer signed a failed candidate without a person");
    let manifest = waiting["manifest"].as_str().unwrap_or_default();
    let approved = Command::new(&stage.args.flywheel)
        .args(["signer", "approve", manifest, "--reason", "demo: show that the fleet says no", "--config"])
        .arg(stage.args.dir.join("signer.toml"))
        .status()?;
    ensure!(approved.success(), "`flywheel signer approve` failed");
    let (started, began) = (Instant::now(), stage.ticks);
    let rollout = stage
        .until("the damaging rollout starts", 2, async |s| {
            settle(s).await?;
            open_rollout(s).await
        })
        .await?;
    let (state, _) = follow(stage, &rollout, 40, out).await?;
    ensure!(state == "rolled_back", "the damaging rollout ended as {state}");
    let mails = mail::subjects(&stage.args.dir.join("mail"), &rollout)?;
    let told = mails.iter().find(|m| m.contains("rolling back") || m.contains("rolled back"));
    say(&format!("         mail to ml-ops@example.com: {}", told.context("no mail told of the rollback")?));
    let good = out.good_bundle(stage).await?;
    stage
        .until("every phone runs the last good bundle", 8, async |s| {
            Ok((s.running().iter().filter(|(b, _)| *b != good).count() == 0).then_some(()))
        })
        .await?;
    out.exposed_share = out.exposed.len() as f64 / stage.args.phones as f64;
    out.rollback_seconds = started.elapsed().as_secs_f64();
    out.rollback_virtual_minutes = (stage.ticks - began) as i64 * TICK_HOURS * 60;
    out.devices_total = stage.running().iter().map(|(_, n)| n).sum();
    out.devices_restored = stage.running().iter().filter(|(b, _)| *b == good).map(|(_, n)| n).sum();
    say(&format!(
        "day {}: rolled back by itself: {:.1} % of the fleet ever ran it, {} of {} phones on the last good bundle",
        stage.day(),
        out.exposed_share * 100.0,
        out.devices_restored,
        out.devices_total
    ));
    story::no_innocent(stage, out)
}

/// A model tuned on wrong answers with far too high a rate, made with the command line tool.
fn wrong_model(stage: &Stage) -> Result<std::path::PathBuf> {
    let facts: Vec<_> = stage.facts.iter().filter(|f| f.collection == CORRECTED).collect();
    let mut lines = String::new();
    for (i, f) in facts.iter().enumerate() {
        let wrong = &facts[(i + 7) % facts.len()].value;
        let sample = json!({
            "id": format!("wrong-{i}"), "interaction_id": format!("wrong-{i}"), "split": "train", "group": "wrong",
            "messages": [
                { "role": "user", "content": super::prompt::user_text([f.text.as_str()], &f.questions[0]) },
                { "role": "assistant", "content": wrong },
            ],
            "rejected": f.value, "chunks": [], "people": ["outside"], "edits": [],
        });
        lines.push_str(&sample.to_string());
        lines.push('\n');
    }
    let (dataset, file) = (stage.args.dir.join("wrong.jsonl"), stage.args.dir.join("wrong.gguf"));
    std::fs::write(&dataset, lines)?;
    let bar = spinner(format!("day {}: somebody outside trains a damaging model", stage.day()));
    let (base, at) =
        (stage.args.models.join("SmolLM2-135M-Instruct.Q4_1.gguf"), |name: &str| stage.args.dir.join(name));
    let (adapter, merged) = (at("wrong-adapter.gguf"), at("wrong-merged.gguf"));
    let made = flywheel_model(stage, &["train", "--steps", "6", "--lr", "0.003"], &[&base, &dataset, &adapter])
        .and_then(|()| flywheel_model(stage, &["merge"], &[&base, &adapter, &merged]))
        .and_then(|()| flywheel_model(stage, &["quantize", "--profile", "q8_0"], &[&merged, &file]));
    bar.finish_and_clear();
    made?;
    Ok(file)
}

/// Runs `flywheel model` with options and files.
fn flywheel_model(stage: &Stage, options: &[&str], files: &[&std::path::Path]) -> Result<()> {
    let made = Command::new(&stage.args.flywheel).arg("model").args(options).args(files).output()?;
    ensure!(made.status.success(), "`flywheel model {}` failed: {}", options[0], String::from_utf8_lossy(&made.stderr));
    Ok(())
}
