//! Answers in the form the OTLP/HTTP specification asks for: the export response with `partial_success`, and a
//! `google.rpc.Status` for errors, in the encoding of the request.

use super::Encoding;
use crate::decode::Endpoint;
use flywheel_types::wire::IngestAckV1;
use flywheel_types::{Error, ErrorKind};

/// Body of a 200. Quarantined records count as rejected; the client must not send them again.
#[must_use]
pub fn success(endpoint: Endpoint, encoding: Encoding, ack: &IngestAckV1) -> Vec<u8> {
    let message = ack.reasons.join("; ");
    match encoding {
        Encoding::Json => {
            let name = match endpoint {
                Endpoint::OtlpTraces => "rejectedSpans",
                Endpoint::OtlpMetrics => "rejectedDataPoints",
                Endpoint::OtlpLogs | Endpoint::Events | Endpoint::Feedback | Endpoint::Import => "rejectedLogRecords",
            };
            let body = if ack.quarantined == 0 {
                // OTLP 1.x, "Full Success": the server must leave the field unset
                serde_json::json!({})
            } else {
                // ProtoJSON writes 64-bit integers as strings.
                serde_json::json!({ "partialSuccess": { name: ack.quarantined.to_string(), "errorMessage": message } })
            };
            body.to_string().into_bytes()
        }
        Encoding::Protobuf => {
            if ack.quarantined == 0 {
                return Vec::new();
            }
            let mut partial = vec![0x08];
            varint(ack.quarantined, &mut partial);
            bytes_field(2, message.as_bytes(), &mut partial);
            let mut out = Vec::new();
            bytes_field(1, &partial, &mut out);
            out
        }
    }
}

/// Body of a 4xx or 5xx: `google.rpc.Status` with the gRPC code that fits.
#[must_use]
pub fn failure(encoding: Encoding, error: &Error) -> Vec<u8> {
    let code: u8 = match error.kind {
        ErrorKind::Invalid | ErrorKind::Unsupported => 3,
        ErrorKind::Unauthenticated => 16,
        ErrorKind::Forbidden => 7,
        ErrorKind::NotFound => 5,
        ErrorKind::Conflict => 10,
        ErrorKind::TooLarge => 11,
        ErrorKind::Quota => 8,
        ErrorKind::Unavailable => 14,
        ErrorKind::Internal => 13,
    };
    let message = format!("{}: {} {}", error.code, error.message, error.hint);
    match encoding {
        Encoding::Json => serde_json::json!({ "code": code, "message": message }).to_string().into_bytes(),
        Encoding::Protobuf => {
            let mut out = vec![0x08, code];
            bytes_field(2, message.as_bytes(), &mut out);
            out
        }
    }
}

fn varint(mut v: u64, out: &mut Vec<u8>) {
    while v >= 0x80 {
        out.push((v as u8 & 0x7f) | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn bytes_field(number: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceResponse;
    use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
    use prost::Message;

    #[test]
    fn the_official_types_read_our_protobuf() {
        let ack = IngestAckV1 { stored: 3, duplicate: 0, quarantined: 300, reasons: vec!["bad_time: é".into()] };
        let got = ExportLogsServiceResponse::decode(&*success(Endpoint::OtlpLogs, Encoding::Protobuf, &ack)).unwrap();
        let partial = got.partial_success.unwrap();
        assert_eq!((partial.rejected_log_records, partial.error_message.as_str()), (300, "bad_time: é"));
        let json: serde_json::Value =
            serde_json::from_slice(&success(Endpoint::OtlpLogs, Encoding::Json, &ack)).unwrap();
        assert_eq!(json["partialSuccess"]["rejectedLogRecords"], "300");
        let metrics = success(Endpoint::OtlpMetrics, Encoding::Protobuf, &ack);
        let partial = ExportMetricsServiceResponse::decode(&*metrics).unwrap().partial_success.unwrap();
        assert_eq!((partial.rejected_data_points, partial.error_message.as_str()), (300, "bad_time: é"));
        let json: serde_json::Value =
            serde_json::from_slice(&success(Endpoint::OtlpMetrics, Encoding::Json, &ack)).unwrap();
        assert_eq!(json["partialSuccess"]["rejectedDataPoints"], "300");
        assert_eq!(success(Endpoint::OtlpLogs, Encoding::Json, &IngestAckV1::default()), b"{}");
        assert!(success(Endpoint::OtlpLogs, Encoding::Protobuf, &IngestAckV1::default()).is_empty());
    }
}
