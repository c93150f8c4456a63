//! The refit at a period border: communities, both lenses, the screen for new suspects, and what surrounds them.

use super::community::{NO_COMMUNITY, co_retrieval, communities, row_community};
use super::model::{FitData, TEMPLATE};
use super::policy::AttributionPolicyV1;
use super::state::{AttributionState, Bench, Surroundings};
use super::suspect::{Suspect, log_adjusted};
use crate::hash::IdMap;

const ROUNDS: usize = 12;
/// Chunks a community needs to speak for a topic.
const MIN_COMMUNITY: usize = 3;
/// A chunk in more than this share of a community's rows is the topic, as far as anybody can tell.
const DOMINANT: f64 = 0.9;
/// Rows of the topic without the chunk that separate the two.
const SEPARATING_ROWS: u64 = 30;
/// Twins: fewer rows than this with exactly one of them, absolute and relative.
const TWIN_ROWS: u64 = 8;
const TWIN_SHARE: f64 = 0.02;

/// Refits everything on the rows before `hour`.
pub(crate) fn refit(state: &mut AttributionState, policy: &AttributionPolicyV1, hour: u32) {
    state.patterns.drop_before(hour, policy.window_days);
    let chunks = state.names.chunk.len();
    let co = co_retrieval(&state.patterns, chunks);
    let (mut labels, n) = communities(&co, ROUNDS, MIN_COMMUNITY);
    let topics = topic_rows(state, &labels, n);
    for l in &mut labels {
        if topics.dominated[*l as usize] {
            *l = NO_COMMUNITY;
        }
    }
    let data = FitData::chunks(&state.patterns, &labels, n, chunks);
    state.chunks.lens.fit(&data, policy, None);
    let twins = twins(&co);
    screen(&mut state.chunks, policy, hour, &twins);
    let mut by_template = state.chunks.lens.by_template(&data, state.chunks.suspects.keys().copied());
    let data = data.into_templates(&state.chunks.lens.q, state.names.template.len());
    state.templates.lens.fit(&data, policy, Some(TEMPLATE));
    (state.labels, state.communities) = (labels, n);

    screen(&mut state.templates, policy, hour, &IdMap::default());
    state.surroundings = state
        .chunks
        .suspects
        .keys()
        .map(|&c| {
            let of_rows = co.rows[c as usize].max(1) as f64;
            let mut buddies: Vec<(u32, f64)> = co
                .pairs
                .iter()
                .filter(|p| p.0.0 == c || p.0.1 == c)
                .map(|p| (if p.0.0 == c { p.0.1 } else { p.0.0 }, p.1 as f64 / of_rows))
                .collect();
            buddies.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            buddies.truncate(5);
            let label = state.labels[c as usize];
            let with = topics.with_chunk.get(&(u64::from(label) << 32 | u64::from(c))).copied().unwrap_or(0);
            let without = topics.rows[label as usize] - with;
            let confounded = label == NO_COMMUNITY || without < SEPARATING_ROWS;
            let twins = twins.get(&c).cloned().unwrap_or_default();
            let by_template = by_template.remove(&c).unwrap_or_default();
            (c, Surroundings { buddies, twins, confounded, by_template })
        })
        .collect();
}

struct Topics {
    /// Rows per community.
    rows: Vec<u64>,
    /// Rows per (community, chunk).
    with_chunk: IdMap<u64, u64>,
    dominated: Vec<bool>,
}

fn topic_rows(state: &AttributionState, labels: &[u32], n: u32) -> Topics {
    let mut t =
        Topics { rows: vec![0; n as usize + 1], with_chunk: IdMap::default(), dominated: vec![false; n as usize + 1] };
    for p in state.patterns.iter() {
        let l = row_community(labels, p.chunks);
        t.rows[l as usize] += u64::from(p.n);
        for c in p.chunks {
            *t.with_chunk.entry(u64::from(l) << 32 | u64::from(*c)).or_default() += u64::from(p.n);
        }
    }
    for (key, with) in &t.with_chunk {
        let l = (key >> 32) as usize;
        if *with as f64 > DOMINANT * t.rows[l] as f64 {
            t.dominated[l] = true;
        }
    }
    t.dominated[NO_COMMUNITY as usize] = false;
    t
}

/// Chunks that are (almost) never apart, both ways.
fn twins(co: &super::community::CoRetrieval) -> IdMap<u32, Vec<u32>> {
    let mut out: IdMap<u32, Vec<u32>> = IdMap::default();
    for &((a, b), n) in &co.pairs {
        let (ra, rb) = (co.rows[a as usize], co.rows[b as usize]);
        let apart = (ra + rb).saturating_sub(2 * n);
        if apart < TWIN_ROWS.max((TWIN_SHARE * ra.max(rb) as f64) as u64) && 2 * n > ra.max(rb) {
            out.entry(a).or_default().push(b);
            out.entry(b).or_default().push(a);
        }
    }
    out
}

/// Opens evidence for subjects that pass the screen and lets go of suspects whose window ended undecided.
fn screen(bench: &mut Bench, policy: &AttributionPolicyV1, hour: u32, twins: &IdMap<u32, Vec<u32>>) {
    let window = policy.evidence_days.saturating_mul(24);
    let decided = (1.0 / policy.freeze.alpha_canary).ln();
    bench.suspects.retain(|_, s| hour.saturating_sub(s.since_hour) < window || log_adjusted(s.max_log_e) >= decided);
    let mut passed: Vec<u32> = Vec::new();
    for (id, score) in bench.lens.scores.iter().enumerate() {
        let people = bench.first_users.get(id).map_or(0, Vec::len);
        if score.z > policy.screen_z
            && score.exposures >= policy.screen_min_exposures as f64
            && people >= policy.screen_min_users as usize
        {
            passed.push(id as u32);
            passed.extend(twins.get(&(id as u32)).into_iter().flatten());
        }
    }
    let grid = policy.lambda_grid.len();
    for id in passed {
        bench.suspects.entry(id).or_insert_with(|| Suspect::new(hour, grid));
    }
}
