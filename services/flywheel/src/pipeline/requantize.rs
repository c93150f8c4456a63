//! Quantises a merged model into the format that phones run and registers the result as a candidate. The dataset that the
//! model was trained on calibrates the quantisation; finished blocks are kept, so that another attempt goes on.

use super::blocking::watched;
use super::{app, build_dataset::setting, evaluate, lora};
use crate::http::candidates::candidate_id;
use crate::models::quantized::{Made, Wanted, calibrated, plain};
use crate::models::texts::{Conversation, spread};
use crate::models::training::Recipe;
use crate::models::{open, refused};
use crate::server::Server;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::quantize::{Goal, Progress, QuantizeOptions, TuneOptions};
use flywheel_inference::tokenizer::{ChatTemplate, Tokenizer};
use flywheel_jobs::{JobContext, JobError};
use flywheel_store::Tx;
use flywheel_store::candidates::{CandidateSource, NewCandidate};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, BundleKind, Digest, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub const KIND: &str = "requantize";

/// What to quantise, and where it came from.
#[derive(Debug, Serialize, Deserialize)]
pub struct Payload {
    /// The F16 file.
    pub merged: Digest,
    /// The model that training started from.
    pub base: Digest,
    pub dataset: Option<Digest>,
    pub profile: Wanted,
    /// Limit of the profile `auto`; the size of the base's file when left out.
    #[serde(default)]
    pub budget_bytes: Option<u64>,
    #[serde(default)]
    pub training: Value,
}

/// Queues a quantisation.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, payload: &Payload) -> Result<(), Error> {
    let budget = payload.budget_bytes.map(|b| format!(":{b}")).unwrap_or_default();
    let key = format!("{app}:{}:{}{budget}", payload.merged, payload.profile.name());
    let value = serde_json::to_value(payload).map_err(Error::internal)?;
    tx.job_enqueue(app, &NewJob::new(KIND, value).dedup(key).concurrency(format!("train:{app}"), 1)).await?;
    Ok(())
}

/// The step.
///
/// # Errors
/// `Invalid` for a profile that makes no bundle or a model that cannot be quantised; database errors.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, payload) = (ctx.app(), super::payload::<Payload>(ctx)?);
    // load
    let recipe: Recipe = setting(&app(server, id).await?.settings, "lora")?;
    let samples = match payload.dataset {
        Some(dataset) => lora::samples(server, id, dataset).await?,
        None => Vec::new(),
    };
    let budget = match payload.budget_bytes {
        Some(bytes) => bytes,
        None => fs::metadata(server.objects.file(payload.base)).map_err(Error::internal)?.len(),
    };
    // do
    let job = ctx.job();
    let output = inherit(&server.objects.scratch()?, job.job_id.as_str(), job.attempt)?;
    let work = Work {
        input: server.objects.file(payload.merged),
        output: output.clone(),
        samples,
        dataset: payload.dataset.map(|d| format!("dataset {d}")).unwrap_or_default(),
        wanted: payload.profile,
        budget,
        calibration_tokens: recipe.calibration_tokens,
    };
    let made = watched(ctx, move |watch| {
        work.make(&mut |p| watch.report(json!({ "done": p.done, "of": p.total, "tensor": p.tensor })))
    })
    .await;
    if matches!(ctx.check(), Err(JobError::Cancelled)) {
        let _ = fs::remove_dir_all(parts(&output)); // nobody goes on
    }
    let summary = made?.summary();
    let (artefact, size_bytes) = server.objects.adopt_file(&output)?;
    // commit
    let candidate = candidate_id(artefact)?;
    let new = NewCandidate {
        candidate_id: candidate.clone(),
        kind: BundleKind::Weights,
        base: Some(payload.base),
        artefact,
        object_path: artefact.to_hex(),
        size_bytes,
        dataset: payload.dataset,
        source: CandidateSource::Job,
        job: Some((job.job_id.clone(), job.attempt)),
        report: json!({
            // `auto` says nothing about the file: its most common type does (`publish::describe`)
            "precision": (payload.profile != Wanted::Auto).then_some(payload.profile), "merged": payload.merged, "training": payload.training, "quantization": summary,
        }),
        created_by: "controller".into(),
    };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    if tx.candidate_register(id, &new).await? {
        evaluate::enqueue(&mut tx, id, &candidate).await?;
    }
    let detail =
        json!({ "candidate": candidate, "artefact": artefact, "size_bytes": size_bytes, "quantization": summary });
    tx.audit_append(id, "controller", "candidate.register", candidate.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}

/// One quantisation. Blocking.
struct Work {
    input: PathBuf,
    output: PathBuf,
    /// What calibrates; nothing does when empty.
    samples: Vec<Conversation>,
    /// Their name, for the file.
    dataset: String,
    wanted: Wanted,
    budget: u64,
    calibration_tokens: usize,
}

impl Work {
    fn make(&self, watch: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>) -> Result<Made, Error> {
        let base = open(&self.input)?;
        let goal = match self.wanted {
            Wanted::Auto => Goal::Budget(self.budget),
            // at 16 bits there is nothing to calibrate
            Wanted::Named(profile) if self.samples.is_empty() || !profile.base().is_quantized() => {
                return plain(&base, &self.output, &QuantizeOptions::new(profile), watch);
            }
            Wanted::Named(profile) => Goal::Profile(profile),
            Wanted::Npu(_) => {
                let message = format!("`{}` makes a tensor pack, which is no bundle", self.wanted.name());
                return Err(Error::invalid("bad_profile", message, "export it with `flywheel model quantize`"));
            }
        };
        let texts = self.texts(&base)?;
        let options = TuneOptions { datasets: vec![self.dataset.clone()], ..TuneOptions::new(goal) };
        calibrated(&base, &self.output, &texts, &options, watch)
    }

    fn texts(&self, base: &Gguf) -> Result<Vec<Vec<u32>>, Error> {
        if self.samples.is_empty() {
            let message = format!("the profile `{}` is chosen on texts, and there is no dataset", self.wanted.name());
            return Err(Error::invalid("nothing_to_calibrate_on", message, "name a dataset, or another profile"));
        }
        let tokenizer = Tokenizer::from_gguf(base).map_err(refused)?;
        let template = ChatTemplate::from_gguf(base).map_err(refused)?;
        let texts = self.samples.iter().map(|s| Ok(s.sample(&tokenizer, &template)?.tokens));
        Ok(spread(texts.collect::<Result<Vec<_>, Error>>()?, self.calibration_tokens))
    }
}

/// Where the blocks of an unfinished file are (see `flywheel_inference::quantize::tune`).
fn parts(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".parts");
    output.with_file_name(name)
}

/// The file of this attempt; the finished blocks of an earlier attempt become its own. An attempt that lost its lease and
/// still runs finds its folder gone, and ends, instead of writing into that of its successor.
fn inherit(scratch: &Path, job: &str, attempt: impl std::fmt::Display) -> Result<PathBuf, Error> {
    let prefix = format!("quantized-{job}-");
    let output = scratch.join(format!("{prefix}{attempt}.gguf"));
    let own = parts(&output);
    for entry in fs::read_dir(scratch).map_err(Error::internal)?.flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let of_job = name.to_str().is_some_and(|n| n.starts_with(&prefix) && n.ends_with(".parts"));
        if of_job && path != own && !own.exists() {
            fs::rename(&path, &own).map_err(Error::internal)?;
        }
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::testing::write_model;
    use crate::models::texts::read_conversations;

    /// Quantises a small model in `folder`, to a file of at most 150 kB unless it is told otherwise.
    fn work(folder: &Path, attempt: i64, wanted: &str) -> Work {
        let input = folder.join("float.gguf");
        if !input.exists() {
            write_model(&input, 6);
        }
        let talk = |i: u32| {
            let messages = json!([{ "role": "user", "content": format!("What is {i}?") },
                { "role": "assistant", "content": format!("A number, {i}.") }]);
            format!("{}\n", json!({ "messages": messages }))
        };
        Work {
            input,
            output: inherit(folder, "j-1", attempt).unwrap(),
            samples: read_conversations(&(0..20).map(talk).collect::<String>()).unwrap(),
            dataset: "dataset".into(),
            wanted: wanted.parse().unwrap(),
            budget: 150_000,
            calibration_tokens: 400,
        }
    }

    #[test]
    fn a_stopped_attempt_is_gone_on_with_to_the_same_bytes_within_the_budget() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = work(other.path(), 1, "auto");
        let made = whole.make(&mut |_| ControlFlow::Continue(())).unwrap();
        assert!(made.size_bytes <= 150_000 && made.size_bytes > 120_000, "{}", made.size_bytes);
        let summary = made.summary();
        assert_eq!((&summary["profile"], &summary["calibration"]["texts"]), (&json!("auto"), &json!(7)), "{summary}");
        assert!(summary["steps"]["stored"].as_f64() < summary["steps"]["rounded"].as_f64(), "{summary}");

        let first = work(folder.path(), 1, "auto");
        let mut seen = Vec::new();
        let stopped = first.make(&mut |p| {
            seen.push((p.done, p.total, p.tensor.to_owned()));
            if p.tensor == "blk.3" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(stopped.err().unwrap().code, "stopped");
        assert_eq!(
            seen.last().unwrap(),
            &(3, 6, "blk.3".to_owned()),
            "progress of measuring, then of blocks: {seen:?}"
        );
        assert!(!first.output.exists());
        let second = work(folder.path(), 2, "auto");
        let mut measured = false;
        second
            .make(&mut |p| {
                measured |= p.tensor.contains("measuring");
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(!measured, "the chosen types are kept too");
        assert_eq!(fs::read(&second.output).unwrap(), fs::read(&whole.output).unwrap());
        assert!(!parts(&second.output).exists() && !parts(&first.output).exists());
    }

    #[test]
    fn what_makes_no_bundle_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let code = |work: &Work| work.make(&mut |_| ControlFlow::Continue(())).err().unwrap().code;
        assert_eq!(code(&work(folder.path(), 1, "npu-int4")), "bad_profile");
        assert_eq!(code(&Work { samples: Vec::new(), ..work(folder.path(), 1, "auto") }), "nothing_to_calibrate_on");
        assert_eq!(code(&Work { budget: 10_000, ..work(folder.path(), 1, "auto") }), "budget_too_small");
        let named = Work { samples: Vec::new(), ..work(folder.path(), 1, "q8_0") };
        let made = named.make(&mut |_| ControlFlow::Continue(())).unwrap();
        assert!(made.summary().get("calibration").is_none(), "without texts the tensors are rounded one by one");
    }

    #[test]
    fn an_attempt_goes_on_with_the_blocks_of_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let first = inherit(folder.path(), "j-1", 1).unwrap();
        fs::create_dir(parts(&first)).unwrap();
        fs::write(parts(&first).join("block-00000.gguf"), b"block").unwrap();
        assert_eq!(inherit(folder.path(), "j-1", 1).unwrap(), first, "the same attempt again keeps its own");
        let other = inherit(folder.path(), "j-10", 1).unwrap();
        assert!(!parts(&other).exists(), "another job's blocks are not taken");
        let second = inherit(folder.path(), "j-1", 2).unwrap();
        assert_eq!(fs::read(parts(&second).join("block-00000.gguf")).unwrap(), b"block");
        assert!(!parts(&first).exists(), "the first attempt can write no more");
    }

    #[test]
    fn payloads_of_before_are_read() {
        let digest = "0".repeat(64);
        let old = json!({ "merged": digest, "base": digest, "dataset": null, "profile": "q8_0", "training": {} });
        let read: Payload = serde_json::from_value(old).unwrap();
        assert_eq!((read.profile.name().as_str(), read.budget_bytes), ("q8_0", None));
    }
}
