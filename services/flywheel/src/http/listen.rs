//! The accept loop: a connection that sends its headers slowly is closed, connections are bounded so that files are left for
//! the log and the tables, and a stop lets running requests end.

use super::senders::Peer;
use anyhow::Result;
use axum::Router;
use axum::http::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::Service;

/// Longest time that running requests have after a stop.
const LAST_REQUESTS: Duration = Duration::from_secs(30);
/// Pause after the system refused a connection (too many open files): the loop must not spin.
const AFTER_REFUSAL: Duration = Duration::from_millis(100);
/// The same trouble is logged again after this.
const SAID_AGAIN: Duration = Duration::from_secs(10);
/// Connections that wait in the kernel to be accepted; it takes fewer when `net.core.somaxconn` is lower. More would be
/// dropped, and a phone tries again after one, three, seven seconds.
const BACKLOG: u32 = 16_384;

/// Bounds of the connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest time for the headers of a request, and between two requests.
    pub header_timeout: Duration,
    /// Connections at once; others wait in the kernel.
    pub connections: usize,
}

/// Listens for a fleet that comes at once.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // a restart need not wait for connections of the process before
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves `app` until `stop` ends.
pub async fn serve(listener: TcpListener, app: Router, limits: Limits, stop: impl Future<Output = ()>) -> Result<()> {
    let (stopping, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut trouble = Trouble::default();
    let mut stop = pin!(stop);
    loop {
        let open = connections.len();
        if open >= limits.connections {
            trouble.say("as many connections are open as may be; others wait", open);
        }
        tokio::select! {
            accepted = listener.accept(), if open < limits.connections => match accepted {
                Ok((stream, peer)) => {
                    // when it is crowded, who was answered makes room for the next
                    let keep = open < limits.connections / 4 * 3;
                    let app = WithPeer { app: app.clone(), peer: Peer(peer.ip()) };
                    connections.spawn(connection(stream, app, limits.header_timeout, keep, stopped.clone()));
                }
                Err(e) => {
                    trouble.say(&format!("a connection was not accepted: {e}"), open);
                    tokio::time::sleep(AFTER_REFUSAL).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    drop((listener, stopping));
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_REQUESTS, all).await.is_err() {
        tracing::warn!("requests that do not end are cut off");
    }
    Ok(())
}

/// Says the same trouble once in a while, however often it comes.
#[derive(Default)]
struct Trouble {
    last: Option<Instant>,
}

impl Trouble {
    fn say(&mut self, what: &str, connections: usize) {
        if self.last.is_none_or(|at| at.elapsed() > SAID_AGAIN) {
            self.last = Some(Instant::now());
            tracing::warn!(connections, "{what}");
        }
    }
}

/// The app for one connection: requests say where they came from.
#[derive(Clone)]
struct WithPeer {
    app: Router,
    peer: Peer,
}

impl<B> Service<Request<B>> for WithPeer
where
    Router: Service<Request<B>>,
{
    type Response = <Router as Service<Request<B>>>::Response;
    type Error = <Router as Service<Request<B>>>::Error;
    type Future = <Router as Service<Request<B>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<Request<B>>::poll_ready(&mut self.app, context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        self.app.call(request)
    }
}

async fn connection(
    stream: TcpStream,
    app: WithPeer,
    header_timeout: Duration,
    keep: bool,
    mut stopped: watch::Receiver<()>,
) {
    let _ = stream.set_nodelay(true);
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(header_timeout).keep_alive(keep);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(header_timeout).keep_alive_timeout(header_timeout);
    let mut serving = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(app)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        _ = stopped.changed() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(e) = ended {
        // phones come and go: nobody needs to look at this
        tracing::debug!(error = %e, "a connection ended with an error");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn slow_headers_are_cut_off_and_a_stop_lets_a_request_end() {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (begun, running) = oneshot::channel::<()>();
        let begun = std::sync::Arc::new(std::sync::Mutex::new(Some(begun)));
        let (go_on, wait) = watch::channel(false);
        let app = Router::new().route(
            "/slow",
            get(move || async move {
                drop(begun.lock().unwrap().take());
                let mut wait = wait.clone();
                let _ = wait.wait_for(|go| *go).await;
                "done"
            }),
        );
        let (stop, stopped) = oneshot::channel::<()>();
        let limits = Limits { header_timeout: Duration::from_millis(100), connections: 2 };
        let server = tokio::spawn(serve(listener, app, limits, async {
            let _ = stopped.await;
        }));
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n").await.unwrap();
        let mut answer = Vec::new();
        slow.read_to_end(&mut answer).await.unwrap();
        assert!(!answer.windows(4).any(|w| w == b"done"), "headers that never end are not served");
        let mut good = TcpStream::connect(address).await.unwrap();
        good.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let _ = running.await;
        stop.send(()).unwrap();
        go_on.send_replace(true);
        let mut answer = String::new();
        good.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("done"), "{answer}");
        server.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn more_connections_than_may_be_open_wait_for_their_turn() {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits { header_timeout: Duration::from_secs(60), connections: 1 };
        let app = Router::new().route("/", get(async || "done"));
        tokio::spawn(serve(listener, app, limits, std::future::pending()));
        let mut lines = Vec::new();
        for _ in 0..5 {
            let mut line = TcpStream::connect(address).await.unwrap();
            line.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            lines.push(line);
        }
        for mut line in lines {
            let mut answer = String::new();
            // ends because the server closes a connection when others wait
            line.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with("done"), "{answer}");
        }
    }
}
