//! The files of a case: stock's, ours step by step, ours under a budget.

use crate::cases::{Base, Case};
use crate::texts::{CALIBRATION, SCORED, Texts};
use crate::{Result, judge};
use flywheel_inference::calibrate::calibrate;
use flywheel_inference::eval::PositionScores;
use flywheel_inference::gguf::{Gguf, TensorType};
use flywheel_inference::quantize::{Goal, Imatrix, Progress, QuantizeOptions, TuneOptions, quantize, tune};
use flywheel_inference::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::{fs, time::Instant};

/// A file and how far it is from the base, text by text.
pub struct Scored {
    pub file: Made,
    /// In the order of [`SCORED`].
    pub scores: Vec<PositionScores>,
}

/// How a file was made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Made {
    pub label: String,
    pub bytes: u64,
    pub seconds: f64,
}

/// Stock with this calibration text is what ours is compared with.
pub const SAME_TEXT: &str = "stock, imatrix of both";
/// The whole pipeline with the types of the profile, and with types by expected loss at stock's size.
pub const ALL_STEPS: &str = "ours, all steps";
pub const BUDGET: &str = "ours, all steps, types by budget";
/// The same, the embedding allowed fewer bits.
pub const LOW_EMBEDDING: &str = "the same, embedding from Q5_1";

fn go(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Makes and scores all files of a case, or reads what an earlier run kept.
pub fn scores(case: &Case, base: &Path, texts: &Texts, folder: &Path) -> Result<Vec<Scored>> {
    let name: String = case.name.chars().filter(|c| c.is_alphanumeric()).collect();
    let own = folder.join(&name);
    fs::create_dir_all(&own)?;
    let list = folder.join(format!("{name}.files.json"));
    let path = |file: &Made| own.join(file.label.replace(' ', "_")).with_extension("gguf");
    let files: Vec<Made> = if list.exists() {
        serde_json::from_slice(&fs::read(&list)?)?
    } else {
        let files = Maker { case, base, texts, path: &path }.all()?;
        fs::write(&list, serde_json::to_vec(&files)?)?;
        files
    };
    let paths: Vec<PathBuf> = files.iter().map(&path).collect();
    let by_text =
        SCORED.map(|text| judge::score(base, &paths, &texts.scored(text), &folder.join(format!("{name}.{text}.json"))));
    let by_text: Vec<Vec<PositionScores>> = by_text.into_iter().collect::<Result<_>>()?;
    fs::remove_dir_all(&own)?;
    let scored =
        |(i, file): (usize, Made)| Scored { file, scores: by_text.iter().map(|text| text[i].clone()).collect() };
    Ok(files.into_iter().enumerate().map(scored).collect())
}

struct Maker<'a> {
    case: &'a Case,
    base: &'a Path,
    texts: &'a Texts,
    path: &'a dyn Fn(&Made) -> PathBuf,
}

impl Maker<'_> {
    fn all(&self) -> Result<Vec<Made>> {
        let base = Gguf::open(self.base)?;
        let tokenizer = Tokenizer::from_gguf(&base)?;
        let profile = self.case.profile;
        let mut files = vec![
            self.make("stock, no imatrix".into(), |out| judge::quantize(self.base, out, profile.file_type(), None))?,
        ];
        let mut last = None;
        for text in CALIBRATION {
            let windows = self.texts.calibration(text, &tokenizer);
            let found = calibrate(&base, &windows, &mut |_, _| ControlFlow::Continue(()))?;
            let imatrix = found.imatrix(vec![text.to_owned()])?;
            let label = format!("stock, imatrix of {text}");
            let file = (self.path)(&Made { label: label.clone(), bytes: 0, seconds: 0.0 }).with_extension("imatrix");
            imatrix.write(&file)?;
            files.push(self.make(label, |out| judge::quantize(self.base, out, profile.file_type(), Some(&file)))?);
            last = Some((imatrix, windows));
        }
        let (imatrix, windows) = last.ok_or("no calibration text")?;
        files.push(self.rounded(&base, "ours, rounded", None)?);
        files.push(self.rounded(&base, "ours, imatrix", Some(imatrix))?);
        let steps = |fold, compensate, refine| TuneOptions {
            fold,
            compensate,
            refine,
            ..TuneOptions::new(Goal::Profile(profile))
        };
        let budget = files.iter().find(|f| f.label == SAME_TEXT).map_or(0, |f| f.bytes);
        let mut tuned = vec![
            ("ours, imatrix + AWQ", steps(true, false, false)),
            ("ours, imatrix + GPTQ", steps(false, true, false)),
            ("ours, imatrix + AWQ + GPTQ", steps(true, true, false)),
            (ALL_STEPS, steps(true, true, true)),
            (BUDGET, TuneOptions::new(Goal::Budget(budget))),
        ];
        if let Base::OffGrid(_) = self.case.base {
            let floors = [("token_embd.weight".to_owned(), TensorType::Q5_1)].into();
            tuned.push((LOW_EMBEDDING, TuneOptions { floors, ..TuneOptions::new(Goal::Budget(budget)) }));
        }
        for (label, options) in tuned {
            files.push(self.make(label.into(), |out| {
                tune(&base, out, &windows, &options, &mut go)?;
                Ok(())
            })?);
        }
        Ok(files)
    }

    fn rounded(&self, base: &Gguf, label: &str, imatrix: Option<Imatrix>) -> Result<Made> {
        let options =
            QuantizeOptions { imatrix, fill_zero_importance: true, ..QuantizeOptions::new(self.case.profile) };
        self.make(label.into(), |out| {
            quantize(base, out, &options, &mut go)?;
            Ok(())
        })
    }

    /// Runs `make` unless an earlier run left the file.
    fn make(&self, label: String, make: impl FnOnce(&Path) -> Result<()>) -> Result<Made> {
        let mut file = Made { label, bytes: 0, seconds: 0.0 };
        let (path, start) = ((self.path)(&file), Instant::now());
        if !path.exists() {
            make(&path)?;
            file.seconds = start.elapsed().as_secs_f64();
        }
        file.bytes = fs::metadata(&path)?.len();
        Ok(file)
    }
}
