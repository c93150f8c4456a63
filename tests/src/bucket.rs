//! A bucket for tests: as much of the S3 interface as listing and reading need. It asks for signed requests, without checking
//! the signature, and lists one object a page.

use anyhow::Result;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A bucket called `history` on a free port; it serves until the process ends.
pub struct Bucket {
    address: SocketAddr,
    objects: Objects,
}

impl Bucket {
    /// An empty one.
    ///
    /// # Errors
    /// When no port can be opened.
    pub fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, objects) = (listener.local_addr()?, Objects::default());
        let served = Arc::clone(&objects);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let objects = Arc::clone(&served);
                std::thread::spawn(move || serve(&stream, &objects));
            }
        });
        Ok(Self { address, objects })
    }

    /// Environment of a program that reads from it.
    pub fn environment(&self) -> Vec<String> {
        ["AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret", "AWS_REGION=test-1", "AWS_ALLOW_HTTP=true"]
            .map(str::to_owned)
            .into_iter()
            .chain([format!("AWS_ENDPOINT=http://{}", self.address)])
            .collect()
    }

    /// Puts an object there, or another in its place.
    pub fn put(&self, key: &str, bytes: Vec<u8>) {
        lock(&self.objects).insert(key.to_owned(), bytes);
    }
}

fn lock(objects: &Objects) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
    objects.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The requests of one connection.
fn serve(mut stream: &TcpStream, objects: &Objects) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            match reader.read_line(&mut line) {
                Ok(n) if n > 0 => {}
                _ => return,
            }
            if line.trim().is_empty() {
                break;
            }
            head.push(line.trim().to_owned());
        }
        let signed = head.iter().any(|l| l.to_ascii_lowercase().starts_with("authorization: aws4-hmac-sha256 "));
        let mut words = head.first().map(|l| l.split(' ')).into_iter().flatten();
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (status, body) = if signed { answer(target, objects) } else { (403, Vec::new()) };
        let header = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\netag: \"{}\"\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
            body.len(),
            body.len()
        );
        let sent = stream.write_all(header.as_bytes());
        let sent = if method == "HEAD" { sent } else { sent.and_then(|()| stream.write_all(&body)) };
        if sent.is_err() {
            return;
        }
    }
}

fn answer(target: &str, objects: &Objects) -> (u16, Vec<u8>) {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let objects = lock(objects);
    let field = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_default().replace("%2F", "/")
    };
    if let Some(key) = path.strip_prefix("/history/").filter(|key| !key.is_empty()) {
        return objects.get(key).map_or((404, Vec::new()), |bytes| (200, bytes.clone()));
    }
    let (prefix, after) = (field("prefix"), field("continuation-token"));
    let mut rest = objects.iter().filter(|(key, _)| key.starts_with(&prefix) && **key > after);
    let mut listed = String::new();
    if let Some((key, bytes)) = rest.next() {
        listed = format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>\"{n}\"</ETag>\
             <Size>{n}</Size></Contents>",
            n = bytes.len()
        );
        if rest.next().is_some() {
            listed += &format!("<NextContinuationToken>{key}</NextContinuationToken>");
        }
    }
    (200, format!("<?xml version=\"1.0\"?><ListBucketResult>{listed}</ListBucketResult>").into_bytes())
}
