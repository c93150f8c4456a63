//! Everything about a request that needs no shared state: inflate, verify, decode, identity, Arrow.

use super::{IngestRequest, Settings};
use crate::column::Micros;
use crate::decode::{Context, Decoded, Endpoint, Quarantined};
use crate::dedup::BatchKey;
use crate::disposition::Kind;
use crate::events;
use crate::inflate::inflate;
use crate::otlp::{self, Encoding};
use crate::rows::{RejectRow, Table, TableRows};
use crate::trust::verify;
use flywheel_types::{AppId, Error, ErrorKind, TrustClass};
use std::time::Instant;

/// A decoded batch on its way to the writer.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) app: AppId,
    pub(crate) endpoint: Endpoint,
    pub(crate) trust: TrustClass,
    pub(crate) at: Micros,
    pub(crate) key: BatchKey,
    pub(crate) rows: TableRows,
    /// Items that will be stored, by kind.
    pub(crate) stored: [(Kind, u64); 4],
    /// Items that will not, by kind and reason.
    pub(crate) quarantined: Vec<(Kind, &'static str)>,
    /// Up to 10 reasons for people.
    pub(crate) reasons: Vec<String>,
    /// What it adds to a record of the log, about. Not the memory of its rows: that of a small batch is mostly the columns'
    /// own, and a group would be full after fifty of them.
    pub(crate) bytes: usize,
    pub(crate) enqueued: Instant,
}

/// Decodes one request.
///
/// # Errors
/// See [`super::Ingestor::ingest`].
pub fn prepare(settings: &Settings, request: &IngestRequest) -> Result<Prepared, Error> {
    let h = &request.headers;
    let body = inflate(h.content_encoding.as_deref(), &request.body, settings.limits.decoded_bytes)?;
    let sender = verify(&request.app, h.signature.as_deref(), h.public_key.as_deref(), &body)?;
    let ctx = Context {
        app: &request.app,
        endpoint: request.endpoint,
        sender,
        now: request.now,
        limits: &settings.limits,
        masks: settings.masks,
        users: &settings.users,
        otlp_content: settings.otlp_content,
        classify: settings.classifier.as_deref(),
    };
    let decoded = decode(&ctx, h.content_type.as_deref(), &body)?;
    let at = Micros::from(request.now);
    let key = match (sender.install, decoded.seq) {
        // Only a proven install may use its sequence: otherwise anybody could burn the numbers of a real device.
        (Some(install), Some(seq)) => BatchKey::seq(&request.app, &install, seq),
        (install, _) => {
            let named = h.idempotency_key.as_deref().or(decoded.batch_id.as_deref());
            let sender = install.map_or_else(|| request.ingest_key.as_bytes().to_vec(), |i| i.0.0.to_vec());
            BatchKey::opaque(&request.app, &sender, named, &body, at.day().0)
        }
    };
    let mut rows = decoded.encode().map_err(Error::internal)?;
    rows.set(
        Table::Rejects,
        RejectRow::encode(&rejects(&ctx, &decoded.quarantined, REJECTS)).map_err(Error::internal)?,
    );
    Ok(Prepared {
        app: request.app.clone(),
        endpoint: request.endpoint,
        trust: sender.trust,
        at,
        key,
        stored: decoded.stored(),
        quarantined: decoded.quarantined.iter().map(|q| (q.kind, q.reason)).collect(),
        reasons: decoded.quarantined.iter().take(10).map(|q| format!("{}: {}", q.reason, q.detail)).collect(),
        bytes: rows.memory_bytes().min(body.len()),
        rows,
        enqueued: Instant::now(),
    })
}

/// Records of a request that are shown in `rejects`.
pub(crate) const REJECTS: usize = 100;
/// Bytes of a detail.
const DETAIL: usize = 512;

/// What was wrong with up to `limit` of the records that are not stored.
pub(crate) fn rejects<'a>(ctx: &Context<'a>, quarantined: &'a [Quarantined], limit: usize) -> Vec<RejectRow<'a>> {
    let at = Micros::from(ctx.now);
    let install = ctx.sender.install.map(|i| i.to_string());
    let row = |q: &'a Quarantined| {
        let cut = (0..=DETAIL.min(q.detail.len())).rev().find(|i| q.detail.is_char_boundary(*i)).unwrap_or(0);
        RejectRow {
            app: ctx.app.as_str().into(),
            received_date: at.day(),
            received_at: at,
            source: ctx.endpoint.source().into(),
            kind: q.kind.as_str().into(),
            trust: ctx.sender.trust.as_str().into(),
            install_id: install.clone().map(Into::into),
            reason: q.reason.into(),
            detail: ctx.masks.apply(q.detail[..cut].into()),
        }
    };
    quarantined.iter().take(limit).map(row).collect()
}

fn decode<'a>(ctx: &Context<'a>, content_type: Option<&str>, body: &'a [u8]) -> Result<Decoded<'a>, Error> {
    let unsupported = |expected: &str| {
        Error::new(
            ErrorKind::Unsupported,
            "unsupported_content_type",
            format!("Content-Type `{}` is not supported here", content_type.unwrap_or("(none)")),
            format!("send {expected}"),
        )
    };
    if ctx.endpoint.is_otlp() {
        let encoding =
            Encoding::of(content_type).ok_or_else(|| unsupported("application/x-protobuf or application/json"))?;
        return otlp::decode(ctx, encoding, body);
    }
    let mime = content_type.unwrap_or("application/json").split(';').next().unwrap_or_default().trim();
    match mime.to_ascii_lowercase().as_str() {
        "application/json" => events::decode(ctx, false, body),
        "application/x-ndjson" | "application/jsonl" => events::decode(ctx, true, body),
        _ => Err(unsupported("application/json or application/x-ndjson")),
    }
}
