//! A small SMTP server for tests: real sockets and the real protocol (RFC 5321), with the ways in which servers fail.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// How the server behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Takes every message.
    Takes,
    /// Accepts the connection and never says a word.
    SilentFromStart,
    /// Takes the whole message and never answers.
    SilentAfterData,
    /// Refuses every recipient with 550.
    RefusesRecipient,
    /// Answers 421 and hangs up.
    Busy,
}

/// One message as it arrived.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Received {
    pub from: String,
    pub to: Vec<String>,
    /// Headers and body, dots unstuffed.
    pub data: String,
}

impl Received {
    /// Value of a header that stands in one line.
    pub fn header(&self, name: &str) -> Option<&str> {
        let head = self.data.split("\r\n\r\n").next()?;
        head.lines().find_map(|l| l.strip_prefix(&format!("{name}: ")))
    }
    /// The body as a reader sees it (RFC 2045), with plain line ends.
    pub fn body(&self) -> String {
        let (_, raw) = self.data.split_once("\r\n\r\n").unwrap();
        let bytes = match self.header("Content-Transfer-Encoding") {
            Some("quoted-printable") => unquote(&raw.replace("=\r\n", "")),
            Some("base64") => STANDARD.decode(raw.replace("\r\n", "")).unwrap(),
            _ => raw.as_bytes().to_vec(),
        };
        String::from_utf8(bytes).unwrap().replace("\r\n", "\n")
    }
}

/// `=C3=B6` → the two bytes.
fn unquote(text: &str) -> Vec<u8> {
    let mut parts = text.split('=');
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        out.push(u8::from_str_radix(&part[..2], 16).unwrap());
        out.extend_from_slice(&part.as_bytes()[2..]);
    }
    out
}

/// A running server; it ends with the test's runtime.
#[derive(Debug, Clone)]
pub struct SmtpServer {
    pub addr: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    mode: Arc<Mutex<Mode>>,
}

impl SmtpServer {
    pub async fn start(mode: Mode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = Self { addr, received: Arc::default(), mode: Arc::new(Mutex::new(mode)) };
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(talk(socket, shared.clone()));
            }
        });
        server
    }
    pub fn url(&self) -> String {
        format!("smtp://{}", self.addr)
    }
    pub fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }
    fn mode(&self) -> Mode {
        *self.mode.lock().unwrap()
    }
}

type Lines = tokio::io::Lines<BufReader<OwnedReadHalf>>;

async fn say(out: &mut OwnedWriteHalf, line: &str) -> std::io::Result<()> {
    out.write_all(format!("{line}\r\n").as_bytes()).await
}

async fn talk(socket: TcpStream, server: SmtpServer) -> std::io::Result<()> {
    let (read, mut out) = socket.into_split();
    let mut lines = BufReader::new(read).lines();
    match server.mode() {
        Mode::SilentFromStart => return until_closed(&mut lines).await,
        Mode::Busy => return say(&mut out, "421 too busy, come back later").await,
        Mode::Takes | Mode::SilentAfterData | Mode::RefusesRecipient => say(&mut out, "220 test ESMTP").await?,
    }
    let mut mail = Received::default();
    while let Some(line) = lines.next_line().await? {
        let verb = line.split([' ', ':']).next().unwrap_or("").to_ascii_uppercase();
        match verb.as_str() {
            "EHLO" => {
                say(&mut out, "250-test").await?;
                say(&mut out, "250 8BITMIME").await?;
            }
            "HELO" | "NOOP" => say(&mut out, "250 ok").await?,
            "RSET" => {
                mail = Received::default();
                say(&mut out, "250 ok").await?;
            }
            "MAIL" => {
                mail.from = between(&line);
                say(&mut out, "250 ok").await?;
            }
            "RCPT" if server.mode() == Mode::RefusesRecipient => say(&mut out, "550 no such mailbox here").await?,
            "RCPT" => {
                mail.to.push(between(&line));
                say(&mut out, "250 ok").await?;
            }
            "DATA" => {
                say(&mut out, "354 go on").await?;
                mail.data = data(&mut lines).await?;
                if server.mode() == Mode::SilentAfterData {
                    return until_closed(&mut lines).await;
                }
                server.received.lock().unwrap().push(std::mem::take(&mut mail));
                say(&mut out, "250 taken").await?;
            }
            "QUIT" => return say(&mut out, "221 bye").await,
            _ => say(&mut out, "500 what?").await?,
        }
    }
    Ok(())
}

/// Holds the connection open without a word.
async fn until_closed(lines: &mut Lines) -> std::io::Result<()> {
    while lines.next_line().await?.is_some() {}
    Ok(())
}

/// Lines up to the lonely dot.
async fn data(lines: &mut Lines) -> std::io::Result<String> {
    let mut out = String::new();
    while let Some(line) = lines.next_line().await? {
        if line == "." {
            break;
        }
        out.push_str(line.strip_prefix('.').unwrap_or(&line));
        out.push_str("\r\n");
    }
    Ok(out)
}

/// `MAIL FROM:<a@b> SIZE=1` → `a@b`.
fn between(line: &str) -> String {
    let inner = line.split('<').nth(1).and_then(|r| r.split('>').next());
    inner.unwrap_or_default().to_owned()
}
