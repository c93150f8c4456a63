//! Checks a file chunk by chunk while it arrives. Every length is 64 bits: a verifier that covers only the
//! first part of a large file is a known vulnerability (CVE-2026-34155).

use super::artefact::ArtefactV1;
use flywheel_types::Digest;
use sha2::{Digest as _, Sha256};

/// Why bytes are not the promised file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    #[error("chunk {index} of {path} has the wrong digest: fetch it again")]
    Mismatch { path: String, index: usize },
    #[error("{path} is longer than the promised {length} bytes")]
    TooLong { path: String, length: u64 },
    #[error("{path} ended after {got} of {length} bytes")]
    TooShort { path: String, got: u64, length: u64 },
    #[error("{path} has no chunk {index}")]
    NoSuchChunk { path: String, index: usize },
}

/// Streaming verifier for one artefact. Feed bytes in order; [`Self::verified_bytes`] is what may be kept when
/// the link breaks, and where [`ChunkVerifier::resume`] goes on.
#[derive(Debug, Clone)]
pub struct ChunkVerifier<'a> {
    artefact: &'a ArtefactV1,
    hash: Sha256,
    in_chunk: u64,
    done: usize,
}

impl<'a> ChunkVerifier<'a> {
    #[must_use]
    pub fn new(artefact: &'a ArtefactV1) -> Self {
        Self { artefact, hash: Sha256::new(), in_chunk: 0, done: 0 }
    }

    /// Goes on after `verified_chunks` chunks that an earlier verifier accepted and that are safely stored.
    #[must_use]
    pub fn resume(artefact: &'a ArtefactV1, verified_chunks: usize) -> Self {
        Self { done: verified_chunks.min(artefact.chunks.len()), ..Self::new(artefact) }
    }

    /// Chunks accepted so far.
    #[must_use]
    pub fn verified_chunks(&self) -> usize {
        self.done
    }

    /// Bytes accepted so far; always a chunk boundary or the end of the file.
    #[must_use]
    pub fn verified_bytes(&self) -> u64 {
        self.artefact.length.min(self.done as u64 * self.artefact.chunk_size)
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// [`ChunkError::Mismatch`] names the bad chunk; the verifier is then back at that chunk's start.
    /// [`ChunkError::TooLong`] when the sender does not stop.
    pub fn update(&mut self, mut bytes: &[u8]) -> Result<(), ChunkError> {
        while !bytes.is_empty() {
            let Some((from, to)) = self.artefact.chunk_range(self.done) else {
                return Err(ChunkError::TooLong { path: self.artefact.path.clone(), length: self.artefact.length });
            };
            let room = usize::try_from(to - from - self.in_chunk).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.hash.update(now);
            self.in_chunk += now.len() as u64;
            bytes = later;
            if self.in_chunk == to - from {
                let got = Digest(self.hash.finalize_reset().into());
                self.in_chunk = 0;
                if self.artefact.chunks.get(self.done) != Some(&got) {
                    return Err(ChunkError::Mismatch { path: self.artefact.path.clone(), index: self.done });
                }
                self.done += 1;
            }
        }
        Ok(())
    }

    /// Ends the file. All chunks accepted means the whole file is the promised one: the signed manifest lists
    /// every chunk.
    ///
    /// # Errors
    /// [`ChunkError::TooShort`] when bytes are missing.
    pub fn finish(self) -> Result<(), ChunkError> {
        let got = self.verified_bytes().saturating_add(self.in_chunk);
        if got != self.artefact.length || self.done != self.artefact.chunks.len() {
            return Err(ChunkError::TooShort { path: self.artefact.path.clone(), got, length: self.artefact.length });
        }
        Ok(())
    }

    /// Checks one whole chunk on its own, in any order.
    ///
    /// # Errors
    /// [`ChunkError::Mismatch`] or [`ChunkError::NoSuchChunk`].
    pub fn check_chunk(artefact: &ArtefactV1, index: usize, bytes: &[u8]) -> Result<(), ChunkError> {
        match artefact.chunks.get(index) {
            None => Err(ChunkError::NoSuchChunk { path: artefact.path.clone(), index }),
            Some(want) if *want == Digest::of(bytes) => Ok(()),
            Some(_) => Err(ChunkError::Mismatch { path: artefact.path.clone(), index }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::artefact::CHUNK_SIZE;
    use super::*;

    fn data() -> Vec<u8> {
        (0..(CHUNK_SIZE as usize + 77)).map(|i| (i % 253) as u8).collect()
    }

    #[test]
    fn accepts_the_file_and_resumes_at_a_chunk() {
        let (d, cut) = (data(), CHUNK_SIZE as usize + 10);
        let a = ArtefactV1::of_bytes("gguf", &d);
        let mut v = ChunkVerifier::new(&a);
        v.update(&d[..cut]).unwrap();
        assert_eq!((v.verified_chunks(), v.verified_bytes()), (1, CHUNK_SIZE));
        let mut v = ChunkVerifier::resume(&a, v.verified_chunks());
        v.update(&d[CHUNK_SIZE as usize..]).unwrap();
        assert_eq!(v.verified_bytes(), a.length);
        v.finish().unwrap();
    }

    #[test]
    fn finds_the_bad_chunk_in_the_last_byte() {
        let mut d = data();
        let a = ArtefactV1::of_bytes("gguf", &d);
        *d.last_mut().unwrap() ^= 1;
        let mut v = ChunkVerifier::new(&a);
        assert_eq!(v.update(&d), Err(ChunkError::Mismatch { path: a.path.clone(), index: 1 }));
        *d.last_mut().unwrap() ^= 1;
        v.update(&d[CHUNK_SIZE as usize..]).unwrap();
        v.finish().unwrap();
    }

    #[test]
    fn refuses_more_and_fewer_bytes() {
        let d = data();
        let a = ArtefactV1::of_bytes("gguf", &d);
        let mut v = ChunkVerifier::new(&a);
        v.update(&d).unwrap();
        assert!(matches!(v.update(b"x"), Err(ChunkError::TooLong { .. })));
        let mut v = ChunkVerifier::new(&a);
        v.update(&d[..d.len() - 1]).unwrap();
        assert!(matches!(v.finish(), Err(ChunkError::TooShort { got, .. }) if got == a.length - 1));
    }

    #[test]
    fn lengths_beyond_32_bits_are_exact() {
        let a =
            ArtefactV1 { length: 5 << 32, chunks: vec![Digest::of(b""); 2560], ..ArtefactV1::of_bytes("gguf", b"") };
        assert_eq!(a.chunk_range(2559), Some((2559 * CHUNK_SIZE, 5 << 32)));
        assert_eq!(ChunkVerifier::resume(&a, 2559).verified_bytes(), 2559 * CHUNK_SIZE);
        assert!(matches!(ChunkVerifier::resume(&a, 2559).finish(), Err(ChunkError::TooShort { .. })));
    }
}
