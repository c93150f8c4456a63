//! The long-running roles: `serve` (HTTP, controllers, worker) and `worker` (jobs only).

use crate::config::{ClockConfig, Config};
use crate::pipeline::Steps;
use crate::pipeline::notify::{self, DeadJobs};
use crate::server::Server;
use crate::{controller, descriptors, flight, http};
use anyhow::{Context, Result};
use flywheel_jobs::{Worker, WorkerOptions};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Runs until SIGINT or SIGTERM; then finishes requests, hands jobs back and flushes the tables.
///
/// # Errors
/// When a store, a table or the address cannot be opened.
pub async fn serve(config: Config) -> Result<()> {
    let connections = descriptors::raise();
    let server = Server::open(config).await?;
    let listener = listen(server.config.listen)?;
    let flight_sql = match &server.config.flight {
        Some(config) => Some((listen(config.listen)?, config.clone())),
        None => None,
    };
    tracing::info!(address = %server.config.listen, flight_sql = server.config.flight.is_some(), "serving");
    if let Err(e) = notify::enqueue_pending(&server).await {
        tracing::warn!(error = %e, inside = e.inside.as_deref(), "mail that waits goes out with the next message");
    }
    let (stop, stopped) = watch::channel(false);
    let mut tasks = tokio::task::JoinSet::new();
    if server.config.worker.embedded {
        let (s, end) = (server.clone(), ended(stopped.clone()));
        tasks.spawn(async move { work(s, end).await });
    }
    if let ClockConfig::System { tick_s } = server.config.clock {
        let (s, end) = (server.clone(), ended(stopped.clone()));
        tasks.spawn(async move { controller::run(s, Duration::from_secs(tick_s.max(1)), end).await });
    }
    let app = http::router(server.clone());
    let header_timeout = Duration::from_secs(server.config.ingest.upload_timeout_s);
    let limits = http::listen::Limits { header_timeout, connections };
    if let Some((listener, config)) = flight_sql {
        let router = flight::router(server.clone(), config);
        tasks.spawn(async move {
            if let Err(e) = http::listen::serve(listener, router, limits, signal()).await {
                tracing::error!(error = %e, "Flight SQL is no longer served");
            }
        });
    }
    http::listen::serve(listener, app, limits, signal()).await?;
    let _ = stop.send(true);
    while tasks.join_next().await.is_some() {}
    server.lake.flush().await.map_err(|e| anyhow::anyhow!("the last flush failed: {e}"))?;
    Ok(())
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    http::listen::bind(address).with_context(|| format!("cannot listen on {address}"))
}

/// Jobs only, until SIGINT or SIGTERM.
///
/// # Errors
/// As [`serve`].
pub async fn worker(config: Config) -> Result<()> {
    let server = Server::open(config).await?;
    work(server, signal()).await;
    Ok(())
}

async fn work(server: Arc<Server>, stop: impl Future<Output = ()> + Send) {
    let options = WorkerOptions {
        slots: server.config.worker.slots,
        lease: Duration::from_secs(server.config.worker.lease_s),
        poll: Duration::from_millis(50),
        ..WorkerOptions::default()
    };
    let handlers = Steps(server.clone()).handlers();
    let worker = Worker::with_events(server.store.clone(), handlers, options, Arc::new(DeadJobs));
    worker.run(stop).await;
}

async fn ended(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|s| *s).await;
}

async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut term) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
    }
}
