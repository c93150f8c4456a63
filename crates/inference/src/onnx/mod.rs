//! ONNX graphs: read, rewritten into fewer and cheaper operators with the same results, measured, written back.
//!
//! The reader takes files of IR version 3 and later with operator sets 7 to 26, all data in the one file. Fields of the
//! format that it does not know are refused (they would be lost on writing); operators that it does not know are carried
//! along untouched, and so are functions, metadata and graphs inside nodes (their names count as used).
//!
//! Operators and their versions: <https://github.com/onnx/onnx/blob/main/docs/Operators.md>.

mod error;
mod fold;
mod graph;
pub mod proto;
mod report;
mod rewrite;
mod shape;
mod tensor;
mod wire;

pub use error::OnnxError;
pub use report::{GraphReport, NodeReport};
pub use rewrite::{OptimizeOptions, OptimizeReport, Rewrites};

use crate::files;
use prost::Message;
use proto::{GraphProto, ModelProto};
use std::{collections::BTreeMap, fs, path::Path};

/// A checked model: one origin for every value, nodes in topological order, constants as long as their shapes.
#[derive(Debug, Clone, PartialEq)]
pub struct OnnxModel {
    proto: ModelProto,
    /// The graph, which is taken out of the message.
    graph: GraphProto,
}

impl OnnxModel {
    /// # Errors
    /// [`OnnxError::Malformed`] for bytes that are no ONNX message or have unknown fields, [`OnnxError::Graph`] for a
    /// graph that cannot run, [`OnnxError::Unsupported`] for other versions, external data and training graphs.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, OnnxError> {
        wire::check(bytes)?;
        let proto = ModelProto::decode(bytes).map_err(|e| OnnxError::Malformed {
            at: 0,
            place: "ModelProto",
            what: e.to_string(),
        })?;
        Self::from_proto(proto)
    }

    /// # Errors
    /// As [`OnnxModel::from_bytes`], and [`OnnxError::Io`].
    pub fn open(path: &Path) -> Result<Self, OnnxError> {
        Self::from_bytes(&fs::read(path).map_err(|e| OnnxError::io(path, e))?)
    }

    /// # Errors
    /// [`OnnxError::Graph`], [`OnnxError::Unsupported`].
    pub fn from_proto(mut proto: ModelProto) -> Result<Self, OnnxError> {
        graph::check(&proto)?;
        let graph = proto.graph.take().map(|g| *g).unwrap_or_default();
        Ok(Self { proto, graph })
    }

    #[must_use]
    pub fn graph(&self) -> &GraphProto {
        &self.graph
    }
    /// Version of the standard operator set.
    #[must_use]
    pub fn opset(&self) -> i64 {
        graph::opset(&self.proto).unwrap_or_default()
    }
    /// The file's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // Field 7 of the message; the order of fields means nothing.
        let mut bytes = self.proto.encode_to_vec();
        prost::encoding::message::encode(7, &self.graph, &mut bytes);
        bytes
    }

    /// Writes the file: under its name only when complete and durable. Returns its size in bytes.
    ///
    /// # Errors
    /// [`OnnxError::Io`].
    pub fn write(&self, path: &Path) -> Result<u64, OnnxError> {
        let (bytes, io) = (self.to_bytes(), |e| OnnxError::io(path, e));
        files::replace(path, &io, |out| out.write_all(&bytes).map_err(io))?;
        Ok(bytes.len() as u64)
    }

    /// Operators, memory traffic and multiply-adds of one run; `sizes` gives values to free dimensions by their names
    /// (`{"batch": 1}`).
    #[must_use]
    pub fn report(&self, sizes: &BTreeMap<String, u64>) -> GraphReport {
        report::of(self, sizes)
    }

    /// Rewrites the graph; the results stay the same. Doing it again changes nothing.
    pub fn optimize(&mut self, options: &OptimizeOptions) -> OptimizeReport {
        rewrite::run(self, options)
    }
}

#[cfg(test)]
mod tests;
