//! The knowledge index on the device: chunks with versions and states, kept up to date from
//! `GET /v1/index/changes?since=N`. A frozen chunk stays in the index but is hidden on the devices whose bucket lies
//! under its share, so that the app can log what it would have used.

use crate::error::SdkError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flywheel_types::assign::bucket;
use flywheel_types::{ChunkId, ChunkState, Digest, InstallId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Answer of `GET /v1/index/changes?since=N`: everything that changed after version `N`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IndexChangesV1 {
    /// Version after these changes. Lower than asked for: the server began anew, fetch from 0.
    pub index_version: u64,
    pub changes: Vec<IndexChangeV1>,
}

/// One changed chunk. A retired chunk leaves the index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IndexChangeV1 {
    pub chunk_id: ChunkId,
    pub version: u32,
    pub state: ChunkState,
    #[serde(default)]
    pub text: String,
    /// Base64 of little-endian f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hide: Option<HideV1>,
}

/// On which devices a chunk is hidden: those with `bucket(salt, install) < share_ppm`, or with `shown` the others (a new
/// version that only a canary sees). The salt `hide\n<key>\n<chunk>@<version>\n<epoch>` gives exactly
/// [`flywheel_types::assign::in_canary`], so that server and device agree who was in a canary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HideV1 {
    pub salt: String,
    /// 1,000,000 is everybody.
    pub share_ppm: u32,
    /// The share shows the chunk and everybody else hides it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shown: bool,
}

impl HideV1 {
    /// Whether the chunk is hidden on this device.
    #[must_use]
    pub fn hides(&self, install: &InstallId) -> bool {
        (bucket(&self.salt, install) < self.share_ppm) != self.shown
    }
}

/// A chunk as the device holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Chunk {
    pub id: ChunkId,
    pub version: u32,
    pub state: ChunkState,
    pub text: String,
    pub embedding: Option<Vec<f32>>,
    pub hide: Option<HideV1>,
}

/// A ranked hit, with the decision for this device.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub chunk: Arc<Chunk>,
    pub score: f32,
    /// Must not reach the prompt, but belongs in the interaction's retrieval list.
    pub hidden: bool,
}

/// An immutable state of the index. Applying the same answers in the same order gives the same fingerprint, so that
/// devices of one process can share snapshots.
#[derive(Debug, Clone, PartialEq)]
pub struct IndexSnapshot {
    version: u64,
    fingerprint: Digest,
    chunks: BTreeMap<ChunkId, Arc<Chunk>>,
}

impl Default for IndexSnapshot {
    fn default() -> Self {
        Self { version: 0, fingerprint: Digest::of(b"flywheel-index-v1"), chunks: BTreeMap::new() }
    }
}

impl IndexSnapshot {
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }
    /// Identity of this state: digest over the chain of applied answers.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.len()
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }
    #[must_use]
    pub fn get(&self, id: &ChunkId) -> Option<&Arc<Chunk>> {
        self.chunks.get(id)
    }
    /// Every chunk, ordered by id.
    pub fn chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.chunks.values()
    }

    /// The state after `answer` (its exact bytes), from this one.
    ///
    /// # Errors
    /// [`SdkError::Malformed`] names the chunk that cannot be read; nothing is applied then.
    pub fn apply(&self, answer: &[u8]) -> Result<Self, SdkError> {
        let malformed = |why: String| SdkError::Malformed { what: "the index changes".into(), why };
        let parsed: IndexChangesV1 = serde_json::from_slice(answer).map_err(|e| malformed(e.to_string()))?;
        let mut next = self.clone();
        next.version = parsed.index_version;
        next.fingerprint = chain(self.fingerprint, Digest::of(answer));
        for change in parsed.changes {
            if change.state == ChunkState::Retired {
                next.chunks.remove(&change.chunk_id);
                continue;
            }
            let embedding = change
                .embedding
                .as_deref()
                .map(decode_f32)
                .transpose()
                .map_err(|why| malformed(format!("embedding of chunk {}: {why}", change.chunk_id)))?;
            let chunk = Chunk {
                id: change.chunk_id.clone(),
                version: change.version,
                state: change.state,
                text: change.text,
                embedding,
                hide: change.hide,
            };
            next.chunks.insert(change.chunk_id, Arc::new(chunk));
        }
        Ok(next)
    }

    /// This state as one answer that rebuilds it, for the file on the device.
    pub(crate) fn to_answer(&self) -> IndexChangesV1 {
        IndexChangesV1 {
            index_version: self.version,
            changes: self
                .chunks
                .values()
                .map(|c| IndexChangeV1 {
                    chunk_id: c.id.clone(),
                    version: c.version,
                    state: c.state,
                    text: c.text.clone(),
                    embedding: c.embedding.as_deref().map(encode_f32),
                    hide: c.hide.clone(),
                })
                .collect(),
        }
    }

    /// The `k` chunks nearest to `query` by cosine, best first, ties by id. Chunks without an embedding or with
    /// another dimension never match.
    #[must_use]
    pub fn nearest(&self, query: &[f32], k: usize) -> Vec<(ChunkId, f32)> {
        let mut hits: Vec<(ChunkId, f32)> = self
            .chunks
            .values()
            .filter_map(|c| Some((c.id.clone(), cosine(query, c.embedding.as_deref()?)?)))
            .collect();
        hits.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        hits.truncate(k);
        hits
    }

    /// Walks a ranking until `take` chunks may be shown on this device. Hidden hits on the way are returned as well,
    /// flagged; unknown ids are skipped.
    #[must_use]
    pub fn candidates(&self, ranked: &[(ChunkId, f32)], take: usize, install: &InstallId) -> Vec<Candidate> {
        let mut out = Vec::with_capacity(take + 1);
        let mut shown = 0;
        for (id, score) in ranked {
            if shown == take {
                break;
            }
            let Some(chunk) = self.chunks.get(id) else {
                continue;
            };
            let hidden = chunk.hide.as_ref().is_some_and(|h| h.hides(install));
            shown += usize::from(!hidden);
            out.push(Candidate { chunk: Arc::clone(chunk), score: *score, hidden });
        }
        out
    }
}

/// Fingerprint of a state after an answer.
pub(crate) fn chain(state: Digest, answer: Digest) -> Digest {
    let mut both = [0u8; 64];
    both[..32].copy_from_slice(&state.0);
    both[32..].copy_from_slice(&answer.0);
    Digest::of(&both)
}

fn decode_f32(text: &str) -> Result<Vec<f32>, String> {
    let bytes = STANDARD.decode(text).map_err(|e| e.to_string())?;
    let (values, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!("{} bytes are no whole number of f32", bytes.len()));
    }
    let values: Vec<f32> = values.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match values.iter().all(|v| v.is_finite()) {
        true => Ok(values),
        false => Err("a value is not finite".into()),
    }
}

fn encode_f32(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

fn cosine(a: &[f32], b: &[f32]) -> Option<f32> {
    if a.len() != b.len() {
        return None;
    }
    let (mut dot, mut aa, mut bb) = (0f64, 0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (f64::from(*x), f64::from(*y));
        dot += x * y;
        aa += x * x;
        bb += y * y;
    }
    (aa > 0.0 && bb > 0.0).then(|| (dot / (aa * bb).sqrt()) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(id: &str, state: ChunkState, v: &[f32], share_ppm: Option<u32>) -> IndexChangeV1 {
        IndexChangeV1 {
            chunk_id: ChunkId::new(id).unwrap(),
            version: 1,
            state,
            text: format!("text of {id}"),
            embedding: Some(encode_f32(v)),
            hide: share_ppm.map(|share_ppm| HideV1 { salt: "s".into(), share_ppm, shown: false }),
        }
    }

    fn answer(index_version: u64, changes: Vec<IndexChangeV1>) -> Vec<u8> {
        serde_json::to_vec(&IndexChangesV1 { index_version, changes }).unwrap()
    }

    #[test]
    fn changes_apply_in_order_and_retired_chunks_leave() {
        let a = answer(
            2,
            vec![
                change("a", ChunkState::Active, &[1.0, 0.0], None),
                change("b", ChunkState::Active, &[0.6, 0.8], None),
            ],
        );
        let one = IndexSnapshot::default().apply(&a).unwrap();
        assert_eq!((one.version(), one.len()), (2, 2));
        assert_eq!(one.fingerprint(), IndexSnapshot::default().apply(&a).unwrap().fingerprint());
        let b = answer(3, vec![change("a", ChunkState::Retired, &[], None)]);
        let two = one.apply(&b).unwrap();
        assert!(two.get(&ChunkId::new("a").unwrap()).is_none());
        assert_ne!(one.fingerprint(), two.fingerprint());
        let again = serde_json::to_vec(&two.to_answer()).unwrap();
        let rebuilt = IndexSnapshot::default().apply(&again).unwrap();
        assert_eq!(rebuilt.chunks, two.chunks);
    }

    #[test]
    fn nearest_is_cosine_with_ties_by_id() {
        let a = answer(
            1,
            vec![
                change("c", ChunkState::Active, &[3.0, 4.0], None),
                change("a", ChunkState::Active, &[0.6, 0.8], None),
                change("b", ChunkState::Active, &[1.0, 0.0], None),
                change("odd", ChunkState::Active, &[1.0], None),
            ],
        );
        let s = IndexSnapshot::default().apply(&a).unwrap();
        let hits = s.nearest(&[1.0, 0.0], 3);
        let ids: Vec<_> = hits.iter().map(|h| h.0.as_str()).collect();
        assert_eq!(ids, ["b", "a", "c"]);
        assert!((hits[1].1 - 0.6).abs() < 1e-6);
    }

    #[test]
    fn hidden_share_follows_the_bucket_and_hidden_hits_are_logged() {
        let a = answer(
            1,
            vec![
                change("a", ChunkState::CanaryFrozen, &[1.0], Some(500_000)),
                change("b", ChunkState::Frozen, &[1.0], Some(1_000_000)),
                change("c", ChunkState::Active, &[1.0], Some(0)),
                change("d", ChunkState::Active, &[1.0], None),
            ],
        );
        let s = IndexSnapshot::default().apply(&a).unwrap();
        let ranked: Vec<_> = ["a", "b", "x", "c", "d"].iter().map(|i| (ChunkId::new(*i).unwrap(), 0.5)).collect();
        let mut hidden_a = 0;
        for n in 0..200u8 {
            let install = InstallId::of_public_key(&[n; 32]);
            let got = s.candidates(&ranked, 2, &install);
            let b = got.iter().find(|c| c.chunk.id.as_str() == "b");
            let a_hidden = got[0].hidden;
            assert_eq!(a_hidden, bucket("s", &install) < 500_000);
            hidden_a += u32::from(a_hidden);
            assert!(b.is_some_and(|c| c.hidden));
            assert_eq!(got.iter().filter(|c| !c.hidden).count(), 2);
        }
        assert!((70..130).contains(&hidden_a), "{hidden_a}");
    }

    #[test]
    fn hiding_agrees_with_the_canary_rule_of_the_server() {
        use flywheel_types::assign::in_canary;
        for n in 0..100u8 {
            let install = InstallId::of_public_key(&[n; 32]);
            let canary = in_canary("key", &install, "kb/a@3", 7, 300_000);
            let salt = "hide\nkey\nkb/a@3\n7".to_owned();
            let freeze = HideV1 { salt, share_ppm: 300_000, shown: false };
            let trial = HideV1 { shown: true, ..freeze.clone() };
            assert_eq!((freeze.hides(&install), trial.hides(&install)), (canary, !canary));
        }
    }

    #[test]
    fn broken_embedding_names_the_chunk_and_changes_nothing() {
        let mut c = change("a", ChunkState::Active, &[1.0], None);
        c.embedding = Some("AAA=".into());
        let e = IndexSnapshot::default().apply(&answer(1, vec![c])).unwrap_err();
        assert!(e.to_string().contains("chunk a"), "{e}");
        let mut c = change("a", ChunkState::Active, &[f32::NAN], None);
        c.version = 2;
        assert!(IndexSnapshot::default().apply(&answer(1, vec![c])).is_err());
    }
}
