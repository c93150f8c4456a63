//! The reqwest transport against a real socket: cuts, redirects, limits, and a whole update over TCP.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed expectation is a failed test"
)]

mod support;

use flywheel_sdk::*;
use std::sync::{Arc, Mutex};
use support::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Installs the TLS provider; the second call of a test binary finds it installed.
fn transport() -> ReqwestTransport {
    let _ = rustls::crypto::ring::default_provider().install_default();
    ReqwestTransport::new().unwrap()
}

/// Answers each connection's first request with fixed bytes, then closes; remembers the requests.
async fn raw_server(answer: Vec<u8>) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(vec![]));
    let log = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut buffer = vec![0; 16 << 10];
            let n = socket.read(&mut buffer).await.unwrap_or(0);
            log.lock().unwrap().push(String::from_utf8_lossy(&buffer[..n]).into_owned());
            let _ = socket.write_all(&answer).await;
        }
    });
    (address, seen)
}

#[tokio::test]
async fn a_body_that_ends_early_is_an_error_and_blocks_were_delivered() {
    let (url, _) = raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf".to_vec()).await;
    struct Blocks(Vec<u8>);
    impl BodySink for Blocks {
        fn head(&mut self, head: &ResponseHead) -> Flow {
            assert_eq!((head.status, head.header("content-length")), (200, Some("100")));
            Flow::More
        }
        fn data(&mut self, block: &[u8]) -> Flow {
            self.0.extend_from_slice(block);
            Flow::More
        }
    }
    let mut sink = Blocks(vec![]);
    let e = transport().send(HttpRequest::get(url), &mut sink).await.unwrap_err();
    assert!(matches!(e, TransportError::Broken(_)), "{e:?}");
    assert_eq!(sink.0, b"half");
}

#[tokio::test]
async fn redirects_are_answers_and_the_key_stays_home() {
    let (other, other_seen) = raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()).await;
    let answer = format!("HTTP/1.1 302 Found\r\nlocation: {other}\r\ncontent-length: 0\r\n\r\n");
    let (url, seen) = raw_server(answer.into_bytes()).await;
    let request = HttpRequest::get(url).header("x-fleet-ingest-key", "secret");
    assert_eq!(fetch(&transport(), request, 10).await.unwrap().head.status, 302);
    assert!(seen.lock().unwrap()[0].contains("x-fleet-ingest-key: secret"));
    assert!(other_seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn limits_and_dead_ports_are_typed_errors_without_the_address() {
    let (url, _) = raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world".to_vec()).await;
    let e = fetch(&transport(), HttpRequest::get(url), 10).await.unwrap_err();
    assert_eq!(e, TransportError::TooLong { limit_bytes: 10 });
    let e = fetch(&transport(), HttpRequest::get("http://127.0.0.1:1/secret-token"), 10).await.unwrap_err();
    let TransportError::Unreachable(text) = e else { panic!("{e:?}") };
    assert!(!text.contains("secret-token"), "{text}");
}

/// Serves the in-memory server over a socket, one request a connection.
async fn bridge(http: MemoryHttp) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let http = http.clone();
            tokio::spawn(async move {
                let mut head = vec![];
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = socket.read_u8().await else {
                        return;
                    };
                    head.push(byte);
                }
                let text = String::from_utf8_lossy(&head).into_owned();
                let path = text.split(' ').nth(1).unwrap_or("/");
                let mut request = HttpRequest::get(format!("{BASE}{path}"));
                for (name, key) in [("range", "range: "), ("if-none-match", "if-none-match: ")] {
                    if let Some(line) = text.lines().find_map(|l| l.strip_prefix(key)) {
                        request = request.header(name, line);
                    }
                }
                let answer = fetch(&http, request, u64::MAX).await.unwrap();
                let mut out = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", answer.head.status);
                for (name, value) in &answer.head.headers {
                    out.push_str(&format!("{name}: {value}\r\n"));
                }
                out.push_str(&format!("content-length: {}\r\n\r\n", answer.body.len()));
                let _ = socket.write_all(out.as_bytes()).await;
                let _ = socket.write_all(&answer.body).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn a_whole_update_over_tcp() {
    let mut server = Server::new();
    let one = bundle(1, &[9 << 20, 1000]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let base = bridge(server.http.clone()).await;
    let home = Home::new();
    let transport: Arc<dyn HttpTransport> = Arc::new(transport());
    let config = DeviceConfig::new(app(), base.clone(), "key", Arc::clone(&server.root), home.path());
    let blobs =
        Arc::new(HttpBlobs::new(Arc::clone(&transport), format!("{base}/tuf/demo/targets"), Durability::Full, 4));
    let env = Env {
        clock: Arc::new(server.clock.clone()),
        rng: Box::new(<rand_chacha::ChaCha8Rng as rand::SeedableRng>::from_seed([1; 32])),
        transport,
        blobs: Arc::clone(&blobs) as Arc<dyn BlobSource>,
        host: home.host.clone(),
        shared: SharedCaches::new(),
    };
    let device = Device::open(config, env).unwrap();
    // A binding runs calls on any thread: the futures must be able to move.
    let mut device = tokio::spawn(async move {
        let mut device = device;
        assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: one.id });
        load(&mut device, &one);
        assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Current);
        let _ = (device.upload().await, device.sync_index().await.is_err());
        device
    })
    .await
    .unwrap();
    assert_eq!(blobs.fetched_bytes(), (9 << 20) + 1000);
    assert!(device.load_begin().is_ok());
}
