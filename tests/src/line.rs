//! One phone's connection: just enough HTTP/1.1 to send one request after another and to know which connection it was.

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// A kept connection.
pub struct Line {
    stream: TcpStream,
    address: String,
}

/// What matters of an answer.
pub struct Answer {
    pub status: u16,
    /// Seconds of `Retry-After`.
    pub retry_after_s: Option<u64>,
    /// The batch was stored before.
    pub duplicate: bool,
    pub body: String,
}

/// Longest head and body of an answer, bytes.
const LONGEST: usize = 64 << 10;

impl Line {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens.
    pub async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, address: address.to_owned() })
    }

    /// Sends a body and reads the answer. `headers` end with a line break each.
    ///
    /// # Errors
    /// When the connection ends before the answer did.
    pub async fn post(&mut self, path: &str, headers: &str, body: &[u8]) -> Result<Answer> {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n{headers}\r\n",
            self.address,
            body.len()
        );
        self.stream.write_all(&[head.as_bytes(), body].concat()).await?;
        let mut bytes = Vec::new();
        loop {
            if bytes.len() > LONGEST {
                bail!("the answer is too long");
            }
            if self.stream.read_buf(&mut bytes).await? == 0 {
                bail!("the server closed the connection");
            }
            if let Some(answer) = parse(&bytes)? {
                return Ok(answer);
            }
        }
    }
}

/// The answer once all of it is there.
fn parse(bytes: &[u8]) -> Result<Option<Answer>> {
    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).to_ascii_lowercase();
    let header = |name: &str| head.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':').map(str::trim));
    let length: usize = header("content-length").unwrap_or("0").parse().context("content-length of the answer")?;
    let Some(body) = bytes.get(end + 4..end + 4 + length) else { return Ok(None) };
    let status = head.split_whitespace().nth(1).and_then(|s| s.parse().ok());
    Ok(Some(Answer {
        status: status.context("the answer has no status")?,
        retry_after_s: header("retry-after").and_then(|s| s.parse().ok()),
        duplicate: header("x-fleet-duplicate") == Some("true"),
        body: String::from_utf8_lossy(body).into_owned(),
    }))
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_answer_is_read_when_all_of_it_is_there() {
        let text = "HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno";
        for cut in 0..text.len() {
            assert!(super::parse(&text.as_bytes()[..cut]).unwrap().is_none(), "cut at {cut}");
        }
        let answer = super::parse(text.as_bytes()).unwrap().unwrap();
        assert_eq!((answer.status, answer.retry_after_s, answer.duplicate), (503, Some(7), false));
        assert_eq!(answer.body, "no");
    }
}
