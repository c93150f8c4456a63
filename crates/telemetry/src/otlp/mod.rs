//! OTLP/HTTP traces, logs and metrics, protobuf and JSON. Two walkers (one per encoding) visit the records of a request
//! without building its object tree and hand each to one mapper, [`map::Mapper`], which knows the `gen_ai.*`
//! names of the OpenTelemetry semantic conventions v1.41.1 and our own `fleet.*` names. An error inside one record
//! quarantines that record; only a broken envelope refuses the request.

mod draft;
pub mod json;
pub mod map;
mod metrics;
mod names;
pub mod proto;
pub mod respond;
pub mod scan;
pub mod value;
pub mod wire;

use crate::decode::{Context, Decoded, Endpoint};
use flywheel_types::Error;

/// Encoding of a request, and so of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Protobuf,
    Json,
}

impl Encoding {
    /// From a Content-Type; `None` for anything OTLP/HTTP does not name.
    #[must_use]
    pub fn of(content_type: Option<&str>) -> Option<Self> {
        match content_type?.split(';').next()?.trim().to_ascii_lowercase().as_str() {
            "application/x-protobuf" => Some(Self::Protobuf),
            "application/json" => Some(Self::Json),
            _ => None,
        }
    }
    /// Content-Type of an answer.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Protobuf => "application/x-protobuf",
            Self::Json => "application/json",
        }
    }
}

/// Decodes one OTLP request body.
///
/// # Errors
/// `undecodable_body` for a broken envelope, `too_many_records` past the limit.
pub fn decode<'a>(ctx: &Context<'a>, encoding: Encoding, body: &'a [u8]) -> Result<Decoded<'a>, Error> {
    if ctx.endpoint == Endpoint::OtlpMetrics {
        return metrics::decode(ctx, encoding, body);
    }
    let mut mapper = map::Mapper::new(ctx);
    let traces = ctx.endpoint == Endpoint::OtlpTraces;
    match encoding {
        Encoding::Protobuf => proto::walk(ctx, traces, body, &mut mapper)?,
        Encoding::Json => json::walk(ctx, traces, body, &mut mapper)?,
    }
    Ok(mapper.finish())
}

#[cfg(test)]
mod tests;
