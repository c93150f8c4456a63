//! A server in memory with fault injection, for tests of apps and of this crate: every fault is one that real
//! servers, proxies and networks were reported to produce.

use super::{BodySink, Flow, HttpRequest, HttpResponse, HttpTransport, Method, ResponseHead, TransportError};
use bytes::Bytes;
use flywheel_types::Digest;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What goes wrong with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The request never arrives.
    Unreachable,
    /// The request is handled, the answer is lost before its first byte.
    AnswerLost,
    /// The body breaks off after this many bytes.
    CutAfter(usize),
    /// A range is answered with 200 and the whole body.
    IgnoreRange,
    /// A range is answered with 206 from byte 0.
    RangeFromZero,
    /// The answer carries another entity tag.
    OtherEtag,
    /// This many bytes more than asked for.
    ExtraBytes(usize),
    /// The byte at this offset of the body is flipped.
    FlipByte(usize),
    /// A status instead of the answer, with an optional `Retry-After`.
    Status(u16, Option<&'static str>),
}

type Handler = Arc<dyn Fn(&HttpRequest) -> HttpResponse + Send + Sync>;

#[derive(Default)]
struct Inner {
    files: HashMap<String, (Bytes, String)>,
    handler: Option<Handler>,
    faults: VecDeque<(String, Fault)>,
    offline: bool,
    requests: Vec<HttpRequest>,
    body_bytes: u64,
}

/// The server. Clones are the same server.
#[derive(Clone, Default)]
pub struct MemoryHttp {
    inner: Arc<Mutex<Inner>>,
}

impl MemoryHttp {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves `bytes` at `url`, with an entity tag made from their digest.
    pub fn put(&self, url: impl Into<String>, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        let etag = format!("\"{}\"", &Digest::of(&bytes).to_hex()[..16]);
        self.lock().files.insert(url.into(), (bytes, etag));
    }

    /// Stops serving `url`.
    pub fn delete(&self, url: &str) {
        self.lock().files.remove(url);
    }

    /// Answers everything that is not a stored file.
    pub fn on_request(&self, handler: impl Fn(&HttpRequest) -> HttpResponse + Send + Sync + 'static) {
        self.lock().handler = Some(Arc::new(handler));
    }

    /// The next request whose address contains `part` meets `fault`. Faults wait in order.
    pub fn fail_next(&self, part: impl Into<String>, fault: Fault) {
        self.lock().faults.push_back((part.into(), fault));
    }

    /// While offline every request is unreachable.
    pub fn set_offline(&self, offline: bool) {
        self.lock().offline = offline;
    }

    /// Every request that arrived, in order.
    #[must_use]
    pub fn requests(&self) -> Vec<HttpRequest> {
        self.lock().requests.clone()
    }

    /// Body bytes delivered so far.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.lock().body_bytes
    }

    /// Faults that no request met yet.
    #[must_use]
    pub fn pending_faults(&self) -> usize {
        self.lock().faults.len()
    }

    fn take_fault(&self, url: &str) -> Option<Fault> {
        let mut inner = self.lock();
        let at = inner.faults.iter().position(|(part, _)| url.contains(part.as_str()))?;
        inner.faults.remove(at).map(|(_, f)| f)
    }

    /// What a correct server answers.
    fn answer(&self, request: &HttpRequest, fault: Option<&Fault>) -> HttpResponse {
        let (file, handler) = {
            let inner = self.lock();
            (inner.files.get(&request.url).cloned(), inner.handler.clone())
        };
        match (request.method, file, handler) {
            (Method::Get, Some((bytes, etag)), _) => serve(request, &bytes, &etag, fault),
            (_, _, Some(handler)) => handler(request),
            _ => HttpResponse { head: ResponseHead { status: 404, headers: vec![] }, body: Bytes::new() },
        }
    }
}

fn serve(request: &HttpRequest, bytes: &Bytes, etag: &str, fault: Option<&Fault>) -> HttpResponse {
    let shown = if fault == Some(&Fault::OtherEtag) { "\"other\"" } else { etag };
    let mut headers = vec![("etag".to_owned(), shown.to_owned())];
    let head = |status, headers| ResponseHead { status, headers };
    if request.get_header("if-none-match") == Some(etag) {
        return HttpResponse { head: head(304, headers), body: Bytes::new() };
    }
    let stale = request.get_header("if-range").is_some_and(|t| t != etag);
    let range = request.get_header("range").filter(|_| !stale && fault != Some(&Fault::IgnoreRange));
    let Some((from, to)) = range.and_then(parse_range) else {
        return HttpResponse { head: head(200, headers), body: bytes.clone() };
    };
    let total = bytes.len();
    if from >= total {
        headers.push(("content-range".into(), format!("bytes */{total}")));
        return HttpResponse { head: head(416, headers), body: Bytes::new() };
    }
    let (from, to) =
        if fault == Some(&Fault::RangeFromZero) { (0, to.min(total - 1) - from) } else { (from, to.min(total - 1)) };
    headers.push(("content-range".into(), format!("bytes {from}-{to}/{total}")));
    HttpResponse { head: head(206, headers), body: bytes.slice(from..=to) }
}

fn parse_range(text: &str) -> Option<(usize, usize)> {
    let (from, to) = text.strip_prefix("bytes=")?.split_once('-')?;
    Some((from.parse().ok()?, to.parse().ok()?))
}

/// Applies the faults that change a body on its way.
fn on_the_way(mut answer: HttpResponse, fault: Option<&Fault>) -> (HttpResponse, bool) {
    match fault {
        Some(Fault::CutAfter(n)) => {
            answer.body.truncate(*n);
            return (answer, true);
        }
        Some(Fault::FlipByte(at)) => {
            let mut body = answer.body.to_vec();
            if let Some(b) = body.get_mut(*at) {
                *b ^= 0x40;
            }
            answer.body = body.into();
        }
        Some(Fault::ExtraBytes(n)) => {
            let mut body = answer.body.to_vec();
            body.resize(body.len() + n, 0xAA);
            answer.body = body.into();
        }
        _ => {}
    }
    (answer, false)
}

#[async_trait::async_trait]
impl HttpTransport for MemoryHttp {
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError> {
        // A real network is never done at once; tests that drop a call half-way need this point.
        tokio::task::yield_now().await;
        let offline = self.lock().offline;
        let fault = if offline { Some(Fault::Unreachable) } else { self.take_fault(&request.url) };
        if fault == Some(Fault::Unreachable) {
            return Err(TransportError::Unreachable("no route".into()));
        }
        self.lock().requests.push(request.clone());
        let answer = match &fault {
            Some(Fault::Status(status, retry)) => HttpResponse {
                head: ResponseHead {
                    status: *status,
                    headers: retry.iter().map(|v| ("retry-after".to_owned(), (*v).to_owned())).collect(),
                },
                body: Bytes::new(),
            },
            other => self.answer(&request, other.as_ref()),
        };
        if fault == Some(Fault::AnswerLost) {
            return Err(TransportError::Broken("the answer was lost".into()));
        }
        let (answer, cut) = on_the_way(answer, fault.as_ref());
        if sink.head(&answer.head) == Flow::Stop {
            return Ok(());
        }
        for block in answer.body.chunks(1000) {
            tokio::task::yield_now().await;
            self.lock().body_bytes += block.len() as u64;
            if sink.data(block) == Flow::Stop {
                return Ok(());
            }
        }
        if cut { Err(TransportError::Broken("reset by peer".into())) } else { Ok(()) }
    }
}
