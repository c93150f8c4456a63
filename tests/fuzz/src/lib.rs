//! Bodies of the fuzz targets: one function per decoder of bytes from outside. Each feeds the real public entry point
//! and asserts what must hold for every input, not only that nothing panics. The libFuzzer drivers (`fuzz_targets/`)
//! and the replay of the committed corpus (`tests/replay.rs`) call the same functions.

pub mod alloc;
pub mod bundle;
pub mod dataset;
pub mod gguf;
pub mod hf;
pub mod imatrix;
pub mod import;
pub mod onnx;
pub mod otlp;
pub mod sdk;
pub mod telemetry;
pub mod text;
pub mod wal;

mod scratch;

/// A fuzz target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of the driver and of the corpus folder.
    pub name: &'static str,
    pub body: fn(&[u8]),
}

macro_rules! targets {
    ($($name:ident => $body:path),+ $(,)?) => {
        /// Every target, in the order in which `cargo xtask fuzz` runs them.
        pub const TARGETS: &[Target] = &[$(Target { name: stringify!($name), body: $body }),+];
    };
}

targets! {
    manifest => bundle::manifest::run,
    tuf_metadata => bundle::metadata::run,
    tuf_client => bundle::client::run,
    events => telemetry::events,
    feedback => telemetry::feedback,
    inflate => telemetry::inflate_body,
    otlp_traces_proto => otlp::traces_proto,
    otlp_traces_json => otlp::traces_json,
    otlp_logs => otlp::logs,
    otlp_metrics_proto => otlp::metrics_proto,
    otlp_metrics_json => otlp::metrics_json,
    import_lines => import::lines,
    wal => wal::run,
    gguf => gguf::run,
    imatrix => imatrix::run,
    onnx => onnx::run,
    tokenizer => text::tokenizer,
    safetensors => hf::safetensors,
    tokenizer_json => hf::tokenizer_json,
    chat_template => text::chat_template,
    dataset => dataset::run,
    sdk_queue => sdk::queue,
    sdk_index => sdk::index,
}

/// Splits off the first byte, which chooses a variant of a target; 0 for empty input.
pub(crate) fn choice(data: &[u8]) -> (u8, &[u8]) {
    data.split_first().map_or((0, data), |(first, rest)| (*first, rest))
}

/// Cuts `data` into pieces: a length (u16, little endian), then that many bytes, the last one possibly shorter.
pub(crate) fn pieces(mut data: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (len, rest) = data.split_first_chunk::<2>()?;
        let (piece, rest) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
        data = rest;
        Some(piece)
    })
}

/// The opposite of [`pieces`], for seeds.
#[must_use]
pub fn join_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in pieces {
        out.extend_from_slice(&u16::try_from(piece.len()).unwrap_or(u16::MAX).to_le_bytes());
        out.extend_from_slice(piece);
    }
    out
}
