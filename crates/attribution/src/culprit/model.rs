//! The predictive model: an additive logistic baseline ("who would have failed anyway") under a sparse noisy-OR
//! of causes ("what made it fail"), `P = 1 − (1 − p0) · Π (1 − q_c w_c)` with rank weight `w = 1/log2(1 + rank)`.
//! Fitted by EM with a ridge on the baseline; see Cheng's power-PC theory for the reading of `q`.

use super::community::{NO_COMMUNITY, row_community};
use super::patterns::PatternTable;
use super::policy::AttributionPolicyV1;
use super::scope::Split;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Families of the baseline, in this order: template, bundle, device class, locale, user bucket, community.
pub(crate) const FAMILIES: usize = 6;
/// Index of the template family.
pub(crate) const TEMPLATE: usize = 0;
/// Index of the community family.
const COMMUNITY: usize = FAMILIES - 1;
/// Ridge per family.
const RIDGE: [f64; FAMILIES] = [2.0, 1.0, 1.0, 1.0, 1.0, 3.0];
/// Prior log-odds before any data.
const START_MU: f64 = -2.0;

/// Rank weight: 1 at rank 1, 0.63 at rank 2, 0.5 at rank 3.
pub(crate) fn rank_weight(rank0: usize) -> f64 {
    1.0 / (2.0 + rank0 as f64).log2()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Additive logistic baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baseline {
    pub mu: f64,
    pub effects: [Vec<f64>; FAMILIES],
}

impl Default for Baseline {
    fn default() -> Self {
        Self { mu: START_MU, effects: Default::default() }
    }
}

impl Baseline {
    /// Log-odds; a level never fitted has no effect.
    pub(crate) fn eta(&self, levels: &[u32; FAMILIES]) -> f64 {
        let mut e = self.mu;
        for (family, &l) in self.effects.iter().zip(levels) {
            e += family.get(l as usize).copied().unwrap_or(0.0);
        }
        e
    }

    fn grow(&mut self, sizes: &[usize; FAMILIES]) {
        for (family, &n) in self.effects.iter_mut().zip(sizes) {
            family.resize(n.max(family.len()), 0.0);
        }
    }

    /// One Newton sweep towards soft failure counts `target`: one evaluation of the curve, then the intercept and
    /// each family in turn on its quadratic approximation (iteratively reweighted least squares by backfitting).
    fn sweep(&mut self, d: &FitData, eta: &mut [f64], target: &[f64], skip: Option<usize>, work: &mut Work) {
        work.curvature.clear();
        work.residual.clear();
        let (mut g, mut h) = (0.0, 1e-9);
        for ((e, n), t) in eta.iter().zip(&d.n).zip(target) {
            let p = sigmoid(*e);
            let (c, r) = (n * p * (1.0 - p), t - n * p);
            work.curvature.push(c);
            work.residual.push(r);
            g += r;
            h += c;
        }
        let step = (g / h).clamp(-2.0, 2.0);
        self.mu += step;
        shift(eta, work, std::iter::repeat_n(step, d.len()));
        for family in (0..FAMILIES).filter(|f| Some(*f) != skip) {
            let levels = &d.levels[family];
            let effect = &mut self.effects[family];
            let mut sums: Vec<(f64, f64)> = effect.iter().map(|b| (-RIDGE[family] * b, RIDGE[family])).collect();
            for ((l, r), c) in levels.iter().zip(&work.residual).zip(&work.curvature) {
                let s = &mut sums[*l as usize];
                s.0 += r;
                s.1 += c;
            }
            let mut steps: Vec<f64> = sums.iter().map(|s| (s.0 / s.1).clamp(-1.0, 1.0)).collect();
            if family == COMMUNITY {
                // Rows without a topic share no difficulty: an effect here would explain away whatever has no topic.
                steps[NO_COMMUNITY as usize] = 0.0;
            }
            effect.iter_mut().zip(&steps).for_each(|(b, s)| *b += s);
            shift(eta, work, levels.iter().map(|l| steps[*l as usize]));
        }
    }
}

/// Residuals and curvatures of the rows, kept between sweeps to save allocations.
#[derive(Default)]
struct Work {
    curvature: Vec<f64>,
    residual: Vec<f64>,
}

/// Moves every row by its step and keeps the residuals of the quadratic approximation up to date.
fn shift(eta: &mut [f64], work: &mut Work, steps: impl Iterator<Item = f64>) {
    for (((e, r), c), s) in eta.iter_mut().zip(&mut work.residual).zip(&work.curvature).zip(steps) {
        *e += s;
        *r -= c * s;
    }
}

/// The pattern table laid out for the fit. `subject`/`weight` are indexed by `start[i]..start[i + 1]`.
pub(crate) struct FitData {
    pub n: Vec<f64>,
    pub failures: Vec<f64>,
    pub levels: [Vec<u32>; FAMILIES],
    pub start: Vec<u32>,
    pub subject: Vec<u32>,
    pub weight: Vec<f64>,
    /// Survival of the causes that this lens holds fixed.
    pub other: Vec<f64>,
    pub subjects: usize,
    sizes: [usize; FAMILIES],
}

impl FitData {
    pub(crate) fn len(&self) -> usize {
        self.n.len()
    }
    fn range(&self, i: usize) -> std::ops::Range<usize> {
        self.start[i] as usize..self.start[i + 1] as usize
    }

    /// Lays out the chunk lens.
    pub(crate) fn chunks(table: &PatternTable, labels: &[u32], communities: u32, chunks: usize) -> Self {
        let rows = table.len();
        let mut d = Self {
            n: Vec::with_capacity(rows),
            failures: Vec::with_capacity(rows),
            levels: Default::default(),
            start: vec![0],
            subject: Vec::new(),
            weight: Vec::new(),
            other: vec![1.0; rows],
            subjects: chunks,
            sizes: [0; FAMILIES],
        };
        for p in table.iter() {
            let c = &p.cell;
            let levels =
                [c.template, c.bundle, c.device_class, c.locale, u32::from(c.bucket), row_community(labels, p.chunks)];
            for (f, l) in levels.into_iter().enumerate() {
                d.levels[f].push(l);
                d.sizes[f] = d.sizes[f].max(l as usize + 1);
            }
            d.n.push(f64::from(p.n));
            d.failures.push(f64::from(p.failures));
            for (r, &chunk) in p.chunks.iter().enumerate() {
                d.subject.push(chunk);
                d.weight.push(rank_weight(r));
            }
            d.start.push(d.subject.len() as u32);
        }
        d.sizes[COMMUNITY] = d.sizes[COMMUNITY].max(communities as usize + 1);
        d
    }

    /// Turns the chunk lens into the template lens: the template is the only suspect of a row, and the chunk
    /// causes found so far are held fixed.
    pub(crate) fn into_templates(mut self, q_chunk: &[f64], templates: usize) -> Self {
        for i in 0..self.len() {
            self.other[i] = self.range(i).map(|k| 1.0 - q_of(q_chunk, self.subject[k]) * self.weight[k]).product();
        }
        self.subject = self.levels[TEMPLATE].clone();
        self.weight = vec![1.0; self.len()];
        self.start = (0..=self.len() as u32).collect();
        self.subjects = templates;
        self
    }
}

pub(crate) fn q_of(q: &[f64], id: u32) -> f64 {
    q.get(id as usize).copied().unwrap_or(0.0)
}

/// Scores of one subject over the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Score {
    pub exposures: f64,
    pub failures: f64,
    /// Score given the baseline only.
    pub z_offset: f64,
    /// Score given the baseline and all other causes.
    pub z: f64,
    /// Standard error of `q`.
    pub q_se: f64,
}

/// Baseline and causal powers of one lens (chunks or templates).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lens {
    pub baseline: Baseline,
    pub q: Vec<f64>,
    pub scores: Vec<Score>,
    fitted: bool,
}

impl Lens {
    /// Refits on the window. `skip` is the baseline family that the suspects replace.
    pub(crate) fn fit(&mut self, d: &FitData, policy: &AttributionPolicyV1, skip: Option<usize>) {
        self.baseline.grow(&d.sizes);
        self.q.resize(d.subjects.max(self.q.len()), 0.0);
        let mut eta: Vec<f64> = (0..d.len()).map(|i| self.eta_of(d, i)).collect();
        let mut work = Work::default();
        // The template lens starts from the causes found by the chunk lens and needs fewer rounds.
        let em = if skip.is_some() { 3 } else { 6 };
        let (raw, em) = if self.fitted { (1, em) } else { (6, 2 * em) };
        for _ in 0..raw {
            self.baseline.sweep(d, &mut eta, &d.failures, skip, &mut work);
        }
        let active = self.active_set(d, &eta, policy);
        for (q, on) in self.q.iter_mut().zip(&active) {
            *q = if *on { q.max(0.05) } else { 0.0 };
        }
        for _ in 0..em {
            let soft = self.em_round(d, &eta, policy, &active);
            self.baseline.sweep(d, &mut eta, &soft, skip, &mut work);
        }
        self.score(d, &eta);
        self.fitted = true;
    }

    fn eta_of(&self, d: &FitData, i: usize) -> f64 {
        let mut levels = [0; FAMILIES];
        for (l, family) in levels.iter_mut().zip(&d.levels) {
            *l = family[i];
        }
        self.baseline.eta(&levels)
    }

    /// Subjects with an excess over the baseline; the others keep q = 0, which keeps the model sparse.
    fn active_set(&mut self, d: &FitData, eta: &[f64], policy: &AttributionPolicyV1) -> Vec<bool> {
        let mut sums = vec![(0.0f64, 0.0f64, 0.0f64, 0.0f64); self.q.len()];
        for (i, e) in eta.iter().enumerate() {
            let p = (1.0 - (1.0 - sigmoid(*e)) * d.other[i]).clamp(1e-6, 1.0 - 1e-6);
            let excess = d.failures[i] - d.n[i] * p;
            let variance = d.n[i] * p * (1.0 - p);
            for k in d.range(i) {
                let (s, w) = (&mut sums[d.subject[k] as usize], d.weight[k]);
                s.0 += w * excess;
                s.1 += w * w * variance;
                s.2 += d.n[i];
                s.3 += d.failures[i];
            }
        }
        self.scores = vec![Score::default(); sums.len()];
        for (score, s) in self.scores.iter_mut().zip(&sums) {
            score.exposures = s.2;
            score.failures = s.3;
            score.z_offset = if s.1 > 0.0 { s.0 / s.1.sqrt() } else { 0.0 };
        }
        let min = policy.screen_min_exposures as f64;
        self.scores.iter().map(|s| s.z_offset > policy.active_z && s.exposures >= min).collect()
    }

    /// E and M step of the causal powers; returns the failures left to the baseline (soft labels).
    fn em_round(&mut self, d: &FitData, eta: &[f64], policy: &AttributionPolicyV1, active: &[bool]) -> Vec<f64> {
        let mut share = vec![0.0; self.q.len()];
        let mut exposure = vec![0.0; self.q.len()];
        let mut soft = vec![0.0; d.len()];
        for (i, e) in eta.iter().enumerate() {
            let p0 = sigmoid(*e);
            let mut survive = (1.0 - p0) * d.other[i];
            for k in d.range(i) {
                survive *= 1.0 - self.q[d.subject[k] as usize] * d.weight[k];
            }
            let scale = d.failures[i] / (1.0 - survive).clamp(1e-6, 1.0 - 1e-6);
            soft[i] = (p0 * scale).min(d.failures[i]);
            for k in d.range(i) {
                let s = d.subject[k] as usize;
                exposure[s] += d.n[i] * d.weight[k];
                share[s] += self.q[s] * d.weight[k] * scale;
            }
        }
        for (s, q) in self.q.iter_mut().enumerate() {
            *q = if active[s] {
                ((share[s] - policy.kappa) / (exposure[s] + policy.lambda)).clamp(0.0, 0.95)
            } else {
                0.0
            };
        }
        soft
    }

    /// The window of each of `subjects`, split by template, templates in id order. Every other cause is held fixed. The
    /// failure probability is linear in the subject's power, so score over information is an unbiased estimate of it.
    pub(crate) fn by_template(&self, d: &FitData, subjects: impl Iterator<Item = u32>) -> BTreeMap<u32, Vec<Split>> {
        let mut sums: BTreeMap<u32, BTreeMap<u32, Sums>> = subjects.map(|s| (s, BTreeMap::new())).collect();
        for i in 0..d.len() {
            if !d.range(i).any(|k| sums.contains_key(&d.subject[k])) {
                continue;
            }
            let mut survive = (1.0 - sigmoid(self.eta_of(d, i))) * d.other[i];
            for k in d.range(i) {
                survive *= 1.0 - q_of(&self.q, d.subject[k]) * d.weight[k];
            }
            for k in d.range(i) {
                let (s, w) = (d.subject[k], d.weight[k]);
                let Some(of_subject) = sums.get_mut(&s) else { continue };
                let p = (1.0 - survive / (1.0 - q_of(&self.q, s) * w)).clamp(1e-5, 0.999);
                of_subject.entry(d.levels[TEMPLATE][i]).or_default().add(d.n[i], d.failures[i], p, w);
            }
        }
        sums.into_iter().map(|(s, t)| (s, t.into_iter().map(|(t, x)| x.split(t)).collect())).collect()
    }

    /// Conditional score and Fisher information of every subject, all other causes fixed.
    fn score(&mut self, d: &FitData, eta: &[f64]) {
        let mut sums = vec![(0.0f64, 0.0f64, 0.0f64); self.q.len()];
        for (i, e) in eta.iter().enumerate() {
            let mut survive = (1.0 - sigmoid(*e)) * d.other[i];
            for k in d.range(i) {
                survive *= 1.0 - self.q[d.subject[k] as usize] * d.weight[k];
            }
            let full = (1.0 - survive).clamp(1e-5, 0.999);
            for k in d.range(i) {
                let (s, w) = (d.subject[k] as usize, d.weight[k]);
                let p = (1.0 - survive / (1.0 - self.q[s] * w)).clamp(1e-5, 0.999);
                let slope = w * (1.0 - p);
                let sum = &mut sums[s];
                sum.0 += slope * (d.failures[i] - d.n[i] * p) / (p * (1.0 - p));
                sum.1 += d.n[i] * slope * slope / (p * (1.0 - p));
                sum.2 += d.n[i] * slope * slope / (full * (1.0 - full));
            }
        }
        for (score, s) in self.scores.iter_mut().zip(&sums) {
            score.z = if s.1 > 0.0 { s.0 / s.1.sqrt() } else { 0.0 };
            score.q_se = if s.2 > 0.0 { 1.0 / s.2.sqrt() } else { f64::MAX };
        }
    }
}

/// Sums of one subject under one template.
#[derive(Default)]
struct Sums {
    exposures: f64,
    failures: f64,
    excess: f64,
    score: f64,
    information: f64,
}

impl Sums {
    /// `n` rows with `failures` failures, predicted rate `p` without the subject, at weight `w`.
    fn add(&mut self, n: f64, failures: f64, p: f64, w: f64) {
        let slope = w * (1.0 - p);
        self.exposures += n;
        self.failures += failures;
        self.excess += failures - n * p;
        self.score += slope * (failures - n * p) / (p * (1.0 - p));
        self.information += n * slope * slope / (p * (1.0 - p));
    }

    fn split(&self, template: u32) -> Split {
        let information = self.information.max(1e-9);
        Split {
            template,
            exposures: self.exposures as u64,
            failures: self.failures as u64,
            excess: self.excess,
            q: self.score / information,
            q_se: 1.0 / information.sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::patterns::Cell;
    use super::*;

    fn table(rows: &[(&[u32], u32, u32)]) -> PatternTable {
        let cell = Cell { epoch: 0, template: 0, bundle: 0, device_class: 0, locale: 0, bucket: 0 };
        let mut t = PatternTable::default();
        for (chunks, n, f) in rows {
            t.add(cell, chunks, *n, *f, 10_000);
        }
        t
    }

    #[test]
    fn an_innocent_buddy_is_explained_away() {
        // Chunk 0 fails with q = 0.8 on a base of 0.1; chunk 1 rides along in most of its rows.
        let t = table(&[
            (&[0, 1], 800, 656),
            (&[0, 2], 200, 164),
            (&[1, 2], 300, 30),
            (&[2, 3], 2000, 200),
            (&[3], 2000, 200),
        ]);
        let d = FitData::chunks(&t, &[0; 4], 0, 4);
        let mut lens = Lens::default();
        for _ in 0..4 {
            lens.fit(&d, &AttributionPolicyV1::default(), None);
        }
        assert!((lens.q[0] - 0.8).abs() < 0.05, "{:?}", lens.q);
        assert!(lens.q[1] < 0.05, "{:?}", lens.q);
        assert!(lens.scores[0].z > 20.0 && lens.scores[1].z < 1.5, "{:?}", lens.scores);
        assert!(lens.scores[1].z_offset > 5.0, "the offset score alone would blame the buddy");
        assert!((sigmoid(lens.baseline.eta(&[0; FAMILIES])) - 0.1).abs() < 0.02);
    }

    #[test]
    fn rank_weights_follow_the_discount() {
        assert!((rank_weight(0) - 1.0).abs() < 1e-12);
        assert!((rank_weight(1) - 0.630_929_753).abs() < 1e-9);
        assert!((rank_weight(2) - 0.5).abs() < 1e-12);
    }
}
