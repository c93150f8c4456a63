//! The blocks of a run, one after the other, and the file made of them.

use super::error::{Damage, round_trip};
use super::gptq::{Compensation, Order};
use super::inputs::{Input, fold_block, inputs, output_input};
use super::parts::Parts;
use super::profile::is_matrix;
use super::tune::{Choices, Goal, TuneOptions};
use super::tuned::{Method, StepErrors, TunedTensor};
use super::{Profile, Progress, Provenance, QuantizeError, fold, metadata};
use crate::calibrate::{Stream, output_tensor, readers};
use crate::codec;
use crate::gguf::{Gguf, TensorInfo, TensorSpec, TensorType, Writer};
use crate::model::{Decoder, ModelConfig, Values};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

pub(super) struct Run<'a> {
    pub base: &'a Gguf,
    pub config: &'a ModelConfig,
    pub options: &'a TuneOptions,
    pub choices: &'a Choices,
}

/// A matrix with what enters it.
struct Work<'a> {
    tensor: &'a TensorInfo,
    /// As in the base, and what entered it there.
    original: &'a [f32],
    unfolded: &'a Input,
    /// After folding.
    values: &'a [f32],
    input: &'a Input,
    compensations: &'a [(Order, Compensation)],
}

impl Run<'_> {
    /// All blocks (finished ones from before as they are), and the reports of their tensors and of the output matrix.
    pub fn blocks(
        &self,
        texts: &[Vec<u32>],
        parts: &Parts,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<(Vec<Gguf>, Vec<TunedTensor>), QuantizeError> {
        let total = self.config.layers;
        let mut stream = Stream::new(self.base, self.config, texts)?;
        let (mut files, mut tensors) = (Vec::with_capacity(total), Vec::new());
        for layer in 0..total {
            if progress(Progress { done: layer, total, tensor: &format!("blk.{layer}") }).is_break() {
                return Err(QuantizeError::Cancelled);
            }
            let (file, report) = match parts.find(layer) {
                Some(finished) => finished,
                None => self.block(layer, &stream, parts)?,
            };
            let values = file.tensors().iter().map(|t| Ok((t.name.clone(), file.dequantize(t)?)));
            let values: Values = values.collect::<Result<_, QuantizeError>>()?;
            let block = Decoder::one_block(self.base, &values, self.config, layer)?;
            stream.advance(&block, &mut |_, _, _| Ok(()))?;
            tensors.extend(report);
            files.push(file);
        }
        files.push(self.output(&stream, parts, &mut tensors)?);
        if progress(Progress { done: total, total, tensor: "" }).is_break() {
            return Err(QuantizeError::Cancelled);
        }
        Ok((files, tensors))
    }

    fn block(
        &self,
        layer: usize,
        stream: &Stream<'_>,
        parts: &Parts,
    ) -> Result<(Gguf, Vec<TunedTensor>), QuantizeError> {
        let originals = fold::block_values(self.base, layer)?;
        let mut values = originals.clone();
        let block = Decoder::one_block(self.base, &values, self.config, layer)?;
        let unfolded = inputs(stream, &block, self.config, layer)?;
        drop(block);
        let mut folded = unfolded.clone();
        if self.options.fold {
            let ty = |name: &str| self.choices.get(name).map_or(TensorType::F32, |c| c.actual);
            fold_block(&mut values, &mut folded, self.config, layer, &ty)?;
        }
        let mut done: BTreeMap<&str, (Vec<u8>, TunedTensor)> = BTreeMap::new();
        for (site, input) in &folded {
            let tensors: Vec<&TensorInfo> =
                readers(*site).iter().map(|t| self.base.tensor(&t.tensor(layer))).collect::<Result<_, _>>()?;
            let quantized = tensors.iter().any(|t| self.choices[&t.name].actual.is_quantized());
            let compensations = if self.options.compensate && quantized { compensations(input) } else { Vec::new() };
            for tensor in tensors {
                let work = Work {
                    tensor,
                    original: &originals[&tensor.name],
                    unfolded: &unfolded[site],
                    values: &values[&tensor.name],
                    input,
                    compensations: &compensations,
                };
                done.insert(&tensor.name, self.matrix(&work)?);
            }
        }
        let prefix = format!("blk.{layer}.");
        let (mut specs, mut reports) = (Vec::new(), Vec::new());
        for tensor in self.base.tensors().iter().filter(|t| t.name.starts_with(&prefix)) {
            let (bytes, report) = match done.remove(tensor.name.as_str()) {
                Some(done) => done,
                None => self.plain(tensor, &values[&tensor.name], None)?,
            };
            specs.push((TensorSpec { ty: report.to, ..tensor.spec() }, bytes));
            reports.push(report);
        }
        parts.keep(layer, &reports, specs)
    }

    /// The best of the ways to store a matrix.
    fn matrix(&self, work: &Work<'_>) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let (bytes, mut report) = self.plain(work.tensor, work.values, Some(&work.input.importance))?;
        let (ty, n) = (report.to, work.tensor.row_len());
        if !ty.is_quantized() {
            return Ok((bytes, report));
        }
        let fail = |source| QuantizeError::Codec { tensor: work.tensor.name.clone(), source };
        let power = |values: &[f32], input: &Input| {
            Damage::between(values, &vec![0.0; values.len()], &input.h, n).error().max(f64::MIN_POSITIVE)
        };
        let (before, after) = (power(work.original, work.unfolded), power(work.values, work.input));
        let unfolded = |importance: Option<&[f32]>| -> Result<f64, QuantizeError> {
            let back = round_trip(ty, work.original, n, importance).map_err(fail)?;
            Ok(Damage::between(work.original, &back, &work.unfolded.h, n).error() / before)
        };
        let stored = |bytes: &[u8]| -> Result<f64, QuantizeError> {
            let back = codec::dequantize(ty, bytes, work.values.len()).map_err(fail)?;
            Ok(Damage::between(work.values, &back, &work.input.h, n).error() / after)
        };
        let mut best = (stored(&bytes)?, bytes, Method::Rounded);
        let mut errors = StepErrors {
            rounded: unfolded(None)?,
            weighted: unfolded(Some(&work.unfolded.importance))?,
            folded: best.0,
            stored: best.0,
        };
        for (order, compensation) in work.compensations {
            let bytes = compensation.quantize(ty, work.values, &work.input.importance);
            let error = stored(&bytes)?;
            if error < best.0 {
                let damping = compensation.damping;
                let method = match order {
                    Order::Stored => Method::Compensated { damping },
                    Order::Diagonal => Method::CompensatedByDiagonal { damping },
                };
                best = (error, bytes, method);
            }
        }
        (errors.stored, report.method) = (best.0, best.2);
        report.errors = Some(errors);
        report.dead_channels = work.unfolded.stats.dead_channels().len();
        report.not_compensated = self.options.compensate && work.compensations.is_empty();
        Ok((best.1, report))
    }

    /// Nearest levels on scales weighted by `importance`.
    fn plain(
        &self,
        tensor: &TensorInfo,
        values: &[f32],
        importance: Option<&[f32]>,
    ) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let choice = self.choices[&tensor.name];
        let importance = importance.filter(|_| is_matrix(tensor));
        let bytes = codec::quantize(choice.actual, values, tensor.row_len(), importance)
            .map_err(|source| QuantizeError::Codec { tensor: tensor.name.clone(), source })?;
        let report = TunedTensor {
            name: tensor.name.clone(),
            from: tensor.ty,
            to: choice.actual,
            fallback_from: (choice.wanted != choice.actual).then_some(choice.wanted),
            method: if choice.actual.is_quantized() { Method::Rounded } else { Method::Stored },
            weights: tensor.n_elements() as u64,
            size_bytes: bytes.len() as u64,
            errors: None,
            dead_channels: 0,
            not_compensated: false,
        };
        Ok((bytes, report))
    }

    /// The tensors outside of blocks, as the last part. A tied embedding is rounded, never compensated: its rows are
    /// also looked up.
    fn output(
        &self,
        stream: &Stream<'_>,
        parts: &Parts,
        reports: &mut Vec<TunedTensor>,
    ) -> Result<Gguf, QuantizeError> {
        let name = output_tensor(self.base);
        let input = output_input(self.base, self.config, stream)?;
        let (mut specs, mut own) = (Vec::new(), Vec::new());
        for tensor in self.base.tensors().iter().filter(|t| !t.name.starts_with("blk.")) {
            let values = self.base.dequantize(tensor)?;
            let (bytes, report) = if tensor.name == name {
                let (original, unfolded) = (values.as_slice(), &input);
                let work = Work { tensor, original, unfolded, values: original, input: unfolded, compensations: &[] };
                let (bytes, report) = self.matrix(&work)?;
                (bytes, TunedTensor { not_compensated: false, ..report })
            } else {
                self.plain(tensor, &values, None)?
            };
            specs.push((TensorSpec { ty: report.to, ..tensor.spec() }, bytes));
            own.push(report);
        }
        let (file, own) = parts.keep(self.config.layers, &own, specs)?;
        reports.extend(own);
        Ok(file)
    }

    /// Writes the parts as one file in the base's order; reports get that order, too.
    pub fn assemble(
        &self,
        out: &Path,
        from: &Provenance,
        files: &[Gguf],
        reports: &mut [TunedTensor],
    ) -> Result<u64, QuantizeError> {
        let place: BTreeMap<&str, usize> =
            self.base.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        reports.sort_by_key(|r| place.get(r.name.as_str()).copied());
        let specs: Vec<TensorSpec> =
            self.base.tensors().iter().map(|t| TensorSpec { ty: self.choices[&t.name].actual, ..t.spec() }).collect();
        let mut writer = Writer::create(out, &metadata(self.base, self.file_type(), Some(from)), &specs)?;
        for spec in &specs {
            let found = files.iter().find_map(|f| f.find(&spec.name).map(|t| f.bytes(t)));
            let missing = || crate::gguf::GgufError::MissingTensor { name: spec.name.clone() };
            writer.push(found.ok_or_else(missing)?)?;
        }
        Ok(writer.finish()?)
    }

    /// `general.file_type` of the profile, or of the most common type by weights.
    fn file_type(&self) -> u32 {
        file_type(self.base, self.options.goal, self.choices)
    }
}

/// `general.file_type`: of the profile, or of the type that most weights have.
pub(super) fn file_type(base: &Gguf, goal: Goal, choices: &Choices) -> u32 {
    if let Goal::Profile(profile) = goal {
        return profile.file_type();
    }
    let mut weights: BTreeMap<TensorType, usize> = BTreeMap::new();
    for tensor in base.tensors().iter().filter(|t| is_matrix(t)) {
        *weights.entry(choices[&tensor.name].actual).or_default() += tensor.n_elements();
    }
    match weights.into_iter().max_by_key(|(_, n)| *n).map(|(ty, _)| ty) {
        Some(TensorType::Iq4Nl) => IQ4_NL_FILE,
        Some(ty) => Profile::ALL.into_iter().rev().find(|p| p.base() == ty).map_or(0, Profile::file_type),
        None => 0,
    }
}

/// `llama_ftype` of files that are mostly IQ4_NL.
const IQ4_NL_FILE: u32 = 25;

/// Both orders, as far as the inputs allow.
fn compensations(input: &Input) -> Vec<(Order, Compensation)> {
    let n = input.importance.len();
    let both = [Order::Stored, Order::Diagonal];
    both.into_iter().filter_map(|order| Some((order, Compensation::new(&input.h, n, order)?))).collect()
}
