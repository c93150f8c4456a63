//! The blocks of a run, one after the other, and the file made of them.

use super::inputs::{fold_block, inputs, output_input};
use super::matrix::{Aids, Work};
use super::parts::Parts;
use super::profile::is_matrix;
use super::tune::{Choices, Goal, TuneOptions};
use super::tuned::TunedTensor;
use super::{Profile, Progress, Provenance, QuantizeError, fold, metadata};
use crate::calibrate::{Stream, output_tensor, readers};
use crate::gguf::{Gguf, TensorInfo, TensorSpec, TensorType, Writer};
use crate::model::{Decoder, ModelConfig, Values};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

pub(super) struct Run<'a> {
    pub base: &'a Gguf,
    pub config: &'a ModelConfig,
    pub options: &'a TuneOptions,
    pub choices: &'a Choices,
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
            let aids = if self.options.compensate && quantized { Aids::of(input) } else { Aids::default() };
            for tensor in tensors {
                let work = Work {
                    tensor,
                    original: &originals[&tensor.name],
                    unfolded: &unfolded[site],
                    values: &values[&tensor.name],
                    input,
                    aids: &aids,
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
            specs.push((TensorSpec { ty: report.row.to, ..tensor.spec() }, bytes));
            reports.push(report);
        }
        parts.keep(layer, &reports, specs)
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
        let tied = name == "token_embd.weight";
        let compensate = self.options.compensate && !tied && self.choices[name].actual.is_quantized();
        let aids = if compensate { Aids::of(&input) } else { Aids::default() };
        let (mut specs, mut own) = (Vec::new(), Vec::new());
        for tensor in self.base.tensors().iter().filter(|t| !t.name.starts_with("blk.")) {
            let values = self.base.dequantize(tensor)?;
            let (bytes, report) = if tensor.name == name {
                let (original, unfolded) = (values.as_slice(), &input);
                let work = Work { tensor, original, unfolded, values: original, input: unfolded, aids: &aids };
                let (bytes, report) = self.matrix(&work)?;
                (bytes, TunedTensor { not_compensated: report.not_compensated && !tied, ..report })
            } else {
                self.plain(tensor, &values, None)?
            };
            specs.push((TensorSpec { ty: report.row.to, ..tensor.spec() }, bytes));
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
        reports.sort_by_key(|r| place.get(r.row.name.as_str()).copied());
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
