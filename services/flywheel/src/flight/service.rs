//! The calls of Flight SQL. Each is checked by itself; between two calls the server keeps nothing but what the client carries.

use super::status::{broken, refusal};
use super::ticket;
use super::{auth, catalogue};
use crate::config::FlightConfig;
use crate::http::auth::Principal;
use crate::server::Server;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    ActionClosePreparedStatementRequest, ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult,
    CommandGetCatalogs, CommandGetCrossReference, CommandGetDbSchemas, CommandGetExportedKeys, CommandGetImportedKeys,
    CommandGetPrimaryKeys, CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables, CommandGetXdbcTypeInfo,
    CommandPreparedStatementQuery, CommandPreparedStatementUpdate, CommandStatementIngest, CommandStatementQuery,
    CommandStatementUpdate, DoPutPreparedStatementResult, ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{
    Action, FlightData, FlightDescriptor, FlightEndpoint, FlightInfo, HandshakeRequest, HandshakeResponse, Ticket,
};
use flywheel_lake::catalogue::{no_foreign_keys, no_primary_keys};
use flywheel_lake::{RecordBatch, SchemaRef, SqlLimits, SqlStream};
use flywheel_types::{Error, ErrorKind};
use futures::{Stream, StreamExt as _, stream};
use prost::Message as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status, Streaming};

type Rows = Pin<Box<dyn Stream<Item = Result<FlightData, Status>> + Send>>;
type Handshakes = Pin<Box<dyn Stream<Item = Result<HandshakeResponse, Status>> + Send>>;

/// The service.
pub struct FlightSql {
    server: Arc<Server>,
    config: FlightConfig,
}

impl FlightSql {
    pub fn new(server: Arc<Server>, config: FlightConfig) -> Self {
        Self { server, config }
    }

    fn limits(&self) -> SqlLimits {
        SqlLimits {
            timeout: Duration::from_secs(self.config.timeout_s),
            max_rows: self.config.max_rows,
            max_bytes: self.config.max_bytes,
            ..SqlLimits::default()
        }
    }

    /// Columns of a query, and what the client has to bring back for its rows.
    async fn prepare(&self, who: &Principal, query: &str) -> Result<(SchemaRef, Vec<u8>), Error> {
        let scope = self.server.query_scope(&who.app).await?;
        let schema = self.server.lake.sql_schema(scope, query, &self.limits()).await?;
        Ok((schema, ticket::Ticket::encode(who, query)?))
    }

    /// Rows of the query that a ticket or a handle names.
    async fn rows(&self, metadata: &MetadataMap, handle: &[u8]) -> Result<Response<Rows>, Status> {
        let who = auth::caller(&self.server, metadata).await?;
        let query = ticket::Ticket::query(&who, handle).map_err(|e| refusal(&e))?;
        let limits = self.limits();
        let scope = self.server.query_scope(&who.app).await.map_err(|e| refusal(&e))?;
        let rows = self.server.lake.sql_stream(scope, &query, &limits).await.map_err(|e| refusal(&e))?;
        Ok(streamed(rows.schema(), batches(rows, limits)))
    }

    /// How to fetch the answer to a question about what there is.
    async fn described(
        &self,
        request: Request<FlightDescriptor>,
        command: &impl ProstMessageExt,
        answer: Result<RecordBatch, FlightError>,
    ) -> Result<Response<FlightInfo>, Status> {
        auth::caller(&self.server, request.metadata()).await?;
        let schema = answer.map_err(outside)?.schema();
        info(request.into_inner(), &schema, command.as_any().encode_to_vec())
    }

    /// The answer to a question about what there is.
    async fn answered(
        &self,
        request: Request<Ticket>,
        answer: Result<RecordBatch, FlightError>,
    ) -> Result<Response<Rows>, Status> {
        auth::caller(&self.server, request.metadata()).await?;
        let answer = answer.map_err(outside)?;
        Ok(streamed(answer.schema(), stream::iter([Ok(answer)])))
    }

    /// Everything that would write.
    async fn refused<T>(&self, metadata: &MetadataMap, what: &str) -> Result<T, Status> {
        auth::caller(&self.server, metadata).await?;
        Err(refusal(&Error::new(
            ErrorKind::Unsupported,
            "read_only",
            format!("{what} is not taken: Flight SQL only reads here"),
            "send one SELECT; telemetry comes in through the intake",
        )))
    }
}

fn info(asked: FlightDescriptor, schema: &SchemaRef, ticket: Vec<u8>) -> Result<Response<FlightInfo>, Status> {
    let endpoint = FlightEndpoint::new().with_ticket(Ticket::new(ticket));
    let info = FlightInfo::new().try_with_schema(schema).map_err(|e| outside(e.into()))?;
    Ok(Response::new(info.with_endpoint(endpoint).with_descriptor(asked)))
}

/// Rows as they come; past the caps an error in their place, never a silent end.
fn batches(rows: SqlStream, limits: SqlLimits) -> impl Stream<Item = Result<RecordBatch, FlightError>> + Send {
    stream::unfold(Some(rows), move |rows| async move {
        let mut rows = rows?;
        match rows.next().await {
            Some(Ok(batch)) => Some((Ok(batch), Some(rows))),
            Some(Err(e)) => Some((Err(broken(&e)), None)),
            None if rows.truncated() => Some((Err(broken(&too_large(&limits))), None)),
            None => None,
        }
    })
}

fn streamed(
    schema: SchemaRef,
    batches: impl Stream<Item = Result<RecordBatch, FlightError>> + Send + 'static,
) -> Response<Rows> {
    let data = FlightDataEncoderBuilder::new().with_schema(schema).build(batches);
    Response::new(Box::pin(data.map(|piece| piece.map_err(outside))))
}

/// What a client may read of an error: ours as it is, others not at all.
fn outside(e: FlightError) -> Status {
    match e {
        FlightError::Tonic(status) => *status,
        other => refusal(&Error::internal(other)),
    }
}

fn too_large(limits: &SqlLimits) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        "result_too_large",
        format!(
            "the result has more than {} rows or {} bytes; what came is cut off",
            limits.max_rows, limits.max_bytes
        ),
        "add LIMIT, select fewer columns or aggregate; `max_rows` and `max_bytes` of [flight] are the operator's",
    )
}

fn keys(answer: Result<RecordBatch, flywheel_lake::LakeError>) -> Result<RecordBatch, FlightError> {
    answer.map_err(|e| broken(&e.into()))
}

#[tonic::async_trait]
impl FlightSqlService for FlightSql {
    type FlightService = Self;

    async fn do_handshake(
        &self,
        request: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Handshakes>, Status> {
        let bearer = auth::handshake(&self.server, request.metadata()).await?;
        let payload = bearer.as_bytes().to_vec().into();
        let answer = HandshakeResponse { protocol_version: 0, payload };
        let mut response: Response<Handshakes> = Response::new(Box::pin(stream::iter([Ok(answer)])));
        let value = MetadataValue::try_from(bearer.as_bytes()).map_err(|e| refusal(&Error::internal(e)))?;
        response.metadata_mut().insert("authorization", value);
        Ok(response)
    }

    async fn get_flight_info_statement(
        &self,
        command: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let who = auth::caller(&self.server, request.metadata()).await?;
        let (schema, handle) = self.prepare(&who, &command.query).await.map_err(|e| refusal(&e))?;
        let ticket = TicketStatementQuery { statement_handle: handle.into() };
        info(request.into_inner(), &schema, ticket.as_any().encode_to_vec())
    }

    async fn get_flight_info_prepared_statement(
        &self,
        command: CommandPreparedStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let who = auth::caller(&self.server, request.metadata()).await?;
        let query = ticket::Ticket::query(&who, &command.prepared_statement_handle).map_err(|e| refusal(&e))?;
        let (schema, _) = self.prepare(&who, &query).await.map_err(|e| refusal(&e))?;
        info(request.into_inner(), &schema, command.as_any().encode_to_vec())
    }

    async fn get_flight_info_catalogs(
        &self,
        command: CommandGetCatalogs,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::catalogs(command)).await
    }

    async fn get_flight_info_schemas(
        &self,
        command: CommandGetDbSchemas,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::schemas(command.clone())).await
    }

    async fn get_flight_info_tables(
        &self,
        command: CommandGetTables,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::tables(command.clone())).await
    }

    async fn get_flight_info_table_types(
        &self,
        command: CommandGetTableTypes,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::table_types(command)).await
    }

    async fn get_flight_info_sql_info(
        &self,
        command: CommandGetSqlInfo,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::sql_info(command.clone(), &self.config)).await
    }

    async fn get_flight_info_primary_keys(
        &self,
        command: CommandGetPrimaryKeys,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, keys(no_primary_keys())).await
    }

    async fn get_flight_info_exported_keys(
        &self,
        command: CommandGetExportedKeys,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, keys(no_foreign_keys())).await
    }

    async fn get_flight_info_imported_keys(
        &self,
        command: CommandGetImportedKeys,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, keys(no_foreign_keys())).await
    }

    async fn get_flight_info_cross_reference(
        &self,
        command: CommandGetCrossReference,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, keys(no_foreign_keys())).await
    }

    async fn get_flight_info_xdbc_type_info(
        &self,
        command: CommandGetXdbcTypeInfo,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        self.described(request, &command, catalogue::types(command)).await
    }

    async fn do_get_statement(
        &self,
        ticket: TicketStatementQuery,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.rows(request.metadata(), &ticket.statement_handle).await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.rows(request.metadata(), &query.prepared_statement_handle).await
    }

    async fn do_get_catalogs(
        &self,
        command: CommandGetCatalogs,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::catalogs(command)).await
    }

    async fn do_get_schemas(
        &self,
        command: CommandGetDbSchemas,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::schemas(command)).await
    }

    async fn do_get_tables(
        &self,
        command: CommandGetTables,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::tables(command)).await
    }

    async fn do_get_table_types(
        &self,
        command: CommandGetTableTypes,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::table_types(command)).await
    }

    async fn do_get_sql_info(
        &self,
        command: CommandGetSqlInfo,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::sql_info(command, &self.config)).await
    }

    async fn do_get_primary_keys(
        &self,
        _: CommandGetPrimaryKeys,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, keys(no_primary_keys())).await
    }

    async fn do_get_exported_keys(
        &self,
        _: CommandGetExportedKeys,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, keys(no_foreign_keys())).await
    }

    async fn do_get_imported_keys(
        &self,
        _: CommandGetImportedKeys,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, keys(no_foreign_keys())).await
    }

    async fn do_get_cross_reference(
        &self,
        _: CommandGetCrossReference,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, keys(no_foreign_keys())).await
    }

    async fn do_get_xdbc_type_info(
        &self,
        command: CommandGetXdbcTypeInfo,
        request: Request<Ticket>,
    ) -> Result<Response<Rows>, Status> {
        self.answered(request, catalogue::types(command)).await
    }

    async fn do_put_statement_update(
        &self,
        _: CommandStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        self.refused(request.metadata(), "an update").await
    }

    async fn do_put_statement_ingest(
        &self,
        _: CommandStatementIngest,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        self.refused(request.metadata(), "a bulk ingest").await
    }

    async fn do_put_prepared_statement_update(
        &self,
        _: CommandPreparedStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        self.refused(request.metadata(), "an update").await
    }

    async fn do_put_prepared_statement_query(
        &self,
        _: CommandPreparedStatementQuery,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<DoPutPreparedStatementResult, Status> {
        auth::caller(&self.server, request.metadata()).await?;
        Err(refusal(&Error::new(
            ErrorKind::Unsupported,
            "no_parameters",
            "parameters of a prepared statement are not taken",
            "write their values into the query",
        )))
    }

    async fn do_action_create_prepared_statement(
        &self,
        command: ActionCreatePreparedStatementRequest,
        request: Request<Action>,
    ) -> Result<ActionCreatePreparedStatementResult, Status> {
        let who = auth::caller(&self.server, request.metadata()).await?;
        let (schema, handle) = self.prepare(&who, &command.query).await.map_err(|e| refusal(&e))?;
        let encoded = FlightInfo::new().try_with_schema(&schema).map_err(|e| outside(e.into()))?;
        Ok(ActionCreatePreparedStatementResult {
            prepared_statement_handle: handle.into(),
            dataset_schema: encoded.schema,
            parameter_schema: Vec::new().into(),
        })
    }

    /// A handle is all there is of a prepared statement: nothing has to be freed, so that nobody has to be asked who he is
    /// (clients exist that close without their token).
    async fn do_action_close_prepared_statement(
        &self,
        _: ActionClosePreparedStatementRequest,
        _: Request<Action>,
    ) -> Result<(), Status> {
        Ok(())
    }

    async fn register_sql_info(&self, _: i32, _: &SqlInfo) {}
}
