//! Just enough HTTP/1.1: one request at a time over one kept connection.

use crate::body::Format;
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::TcpStream;

/// A kept connection to the intake.
pub struct Connection {
    stream: TcpStream,
    head: String,
    buffer: Vec<u8>,
    /// Where the body of the latest answer lies in the buffer.
    answer: std::ops::Range<usize>,
}

impl Connection {
    /// Connects; every request carries the ingest key.
    pub fn open(address: &str, format: Format, key: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /v1/logs HTTP/1.1\r\nhost: {address}\r\ncontent-type: {}\r\nx-fleet-ingest-key: {key}\r\ncontent-length: ",
            format.content_type()
        );
        Ok(Self { stream, head, buffer: vec![0; 64 << 10], answer: 0..0 })
    }

    /// Sends a body and answers the status.
    pub fn post(&mut self, body: &[u8]) -> Result<u16> {
        let head = format!("{}{}\r\n\r\n", self.head, body.len());
        self.stream.write_all(head.as_bytes())?;
        self.stream.write_all(body)?;
        let mut filled = 0;
        loop {
            let room = self.buffer.get_mut(filled..).filter(|r| !r.is_empty()).context("the answer is too long")?;
            let n = self.stream.read(room)?;
            if n == 0 {
                bail!("the server closed the connection");
            }
            filled += n;
            let bytes = self.buffer.get(..filled).unwrap_or_default();
            let end = bytes.windows(4).position(|w| w == b"\r\n\r\n");
            let Some(end) = end else { continue };
            let head = String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).to_ascii_lowercase();
            let length =
                head.lines().find_map(|l| l.strip_prefix("content-length:")).map_or(Ok(0), |l| l.trim().parse());
            let length: usize = length.context("content-length of the answer")?;
            if filled < end + 4 + length {
                continue;
            }
            self.answer = end + 4..end + 4 + length;
            let status = head.split_whitespace().nth(1).and_then(|s| s.parse().ok());
            return status.context("the answer has no status");
        }
    }

    /// Body of the latest answer.
    pub fn answer(&self) -> String {
        String::from_utf8_lossy(self.buffer.get(self.answer.clone()).unwrap_or_default()).into_owned()
    }
}
