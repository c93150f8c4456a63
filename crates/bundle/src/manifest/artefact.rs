//! One content-addressed file of a bundle, with a hash per 8 MiB chunk so that a resumed download can be
//! trusted without reading it again from the start.

use flywheel_types::Digest;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Chunk length at format 1, bytes. The last chunk may be shorter.
pub const CHUNK_SIZE: u64 = 8 << 20;
/// Largest file, bytes (exclusive): content networks and app stores cut off above 200 MB.
pub const MAX_ARTEFACT_BYTES: u64 = 200_000_000;
/// Most files in one build.
pub const MAX_ARTEFACTS: usize = 4096;

/// A file of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArtefactV1 {
    /// TUF target path, `blobs/<sha256>.<extension>`.
    pub path: String,
    /// Bytes.
    pub length: u64,
    pub sha256: Digest,
    /// Always [`CHUNK_SIZE`] at format 1.
    pub chunk_size: u64,
    /// SHA-256 of each chunk, in order.
    pub chunks: Vec<Digest>,
}

impl ArtefactV1 {
    /// Describes bytes that are in memory.
    #[must_use]
    pub fn of_bytes(extension: &str, bytes: &[u8]) -> Self {
        let mut hasher = ArtefactHasher::new();
        hasher.update(bytes);
        hasher.finish(extension)
    }

    /// Byte range `[from, to)` of chunk `index`; `None` past the end.
    #[must_use]
    pub fn chunk_range(&self, index: usize) -> Option<(u64, u64)> {
        let from = (index as u64).checked_mul(self.chunk_size)?;
        (from < self.length).then(|| (from, self.length.min(from.saturating_add(self.chunk_size))))
    }
}

/// Makes an [`ArtefactV1`] from bytes that arrive piece by piece.
#[derive(Debug, Clone, Default)]
pub struct ArtefactHasher {
    whole: Sha256,
    chunk: Sha256,
    in_chunk: u64,
    length: u64,
    chunks: Vec<Digest>,
}

impl ArtefactHasher {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.whole.update(bytes);
        self.length += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = (CHUNK_SIZE - self.in_chunk) as usize;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.chunk.update(now);
            self.in_chunk += now.len() as u64;
            if self.in_chunk == CHUNK_SIZE {
                self.close_chunk();
            }
            bytes = later;
        }
    }

    /// Ends the file. `extension` is 1 to 16 characters of `[a-z0-9]`, checked by the manifest.
    #[must_use]
    pub fn finish(mut self, extension: &str) -> ArtefactV1 {
        if self.in_chunk > 0 {
            self.close_chunk();
        }
        let sha256 = Digest(self.whole.finalize().into());
        ArtefactV1 {
            path: format!("blobs/{sha256}.{extension}"),
            length: self.length,
            sha256,
            chunk_size: CHUNK_SIZE,
            chunks: self.chunks,
        }
    }

    fn close_chunk(&mut self) {
        self.chunks.push(Digest(self.chunk.finalize_reset().into()));
        self.in_chunk = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_matter_and_chunks_are_cut_at_8_mib() {
        let data: Vec<u8> = (0..(CHUNK_SIZE as usize * 2 + 5)).map(|i| (i % 251) as u8).collect();
        let whole = ArtefactV1::of_bytes("gguf", &data);
        let mut h = ArtefactHasher::new();
        for piece in data.chunks(1_000_003) {
            h.update(piece);
        }
        assert_eq!(h.finish("gguf"), whole);
        assert_eq!(whole.chunks.len(), 3);
        assert_eq!(whole.sha256, Digest::of(&data));
        assert_eq!(whole.chunks[2], Digest::of(&data[CHUNK_SIZE as usize * 2..]));
        assert_eq!(whole.chunk_range(2), Some((CHUNK_SIZE * 2, CHUNK_SIZE * 2 + 5)));
        assert_eq!(whole.chunk_range(3), None);
    }
}
