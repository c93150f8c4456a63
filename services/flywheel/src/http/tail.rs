//! Live view of one table as server-sent events, for a person who watches a phone under test.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, Params};
use crate::server::Server;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use flywheel_lake::{Table, Tail, TailRows};
use flywheel_types::{Error, Role};
use futures::{Stream, StreamExt as _, stream};
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    /// `interactions`, `feedback`, `device_events`, `dispositions`, `rejects` or `metrics`.
    table: String,
    /// Condition of a WHERE, for example `device_model = 'Pixel 8' AND ttft_ms > 3000`.
    #[serde(rename = "where")]
    filter: Option<String>,
}

/// `GET /v1/tail`. Rows may hold text of people who agreed to send it, so this needs an operator.
pub async fn watch(
    State(server): State<Arc<Server>>,
    who: Principal,
    watch: Result<Params<Watch>, ApiError>,
) -> ApiResult<Response> {
    who.require(Role::Operator)?;
    let Params(watch) = watch?;
    let table = Table::from_name(&watch.table).filter(|t| Table::INGESTED.contains(t)).ok_or_else(|| {
        let known = Table::INGESTED.map(Table::name).join(", ");
        Error::invalid("no_such_table", format!("`{}` cannot be watched", watch.table), format!("watch one of {known}"))
    })?;
    let tail = server.lake.tail(&who.app, table, watch.filter.as_deref()).await?;
    Ok(Sse::new(events(tail)).keep_alive(KeepAlive::default()).into_response())
}

/// One `row` event per row; `skipped` where more came than are shown; `failed` before the end when rows cannot be read.
fn events(tail: Tail) -> impl Stream<Item = Result<Event, Infallible>> {
    let pieces = stream::unfold(Some(tail), |tail| async move {
        let mut tail = tail?;
        match tail.next().await {
            Ok(Some(found)) => Some((rows(found), Some(tail))),
            Ok(None) => None,
            Err(e) => Some((vec![Event::default().event("failed").data(e.message)], None)),
        }
    });
    pieces.flat_map(|events| stream::iter(events.into_iter().map(Ok)))
}

fn rows(found: TailRows) -> Vec<Event> {
    let mut out: Vec<Event> =
        found.rows.iter().map(|row| Event::default().event("row").data(row.to_string())).collect();
    if found.skipped {
        out.push(Event::default().event("skipped").data("more rows came than are shown"));
    }
    out
}
