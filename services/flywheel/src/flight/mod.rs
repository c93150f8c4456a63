//! Arrow Flight SQL (docs/adr/009): what ADBC and JDBC drivers and Grafana speak. Read-only, the same tokens and the same rows as
//! `POST /v1/sql`, streamed as they come and with caps of its own.

mod auth;
mod catalogue;
mod service;
mod status;
mod ticket;

use crate::config::FlightConfig;
use crate::server::Server;
use arrow_flight::flight_service_server::FlightServiceServer;
use axum::Router;
use service::FlightSql;
use std::sync::Arc;
use tonic::service::Routes;

/// Largest message that a client may send, bytes: queries are short, and nothing else is taken.
const MAX_MESSAGE: usize = 1 << 20;

/// The gRPC service, for the accept loop of the HTTP server.
pub fn router(server: Arc<Server>, config: FlightConfig) -> Router {
    let service = FlightServiceServer::new(FlightSql::new(server, config)).max_decoding_message_size(MAX_MESSAGE);
    Routes::new(service).into_axum_router()
}
