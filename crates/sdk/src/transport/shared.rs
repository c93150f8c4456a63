//! One cache of GET answers for many devices of a process: every device still asks, verifies and decides for
//! itself, but identical bytes cross the network once. A simulator of thousands of phones needs it; a phone does not.

use super::{BodySink, Flow, HttpRequest, HttpResponse, HttpTransport, Method, ResponseHead, TransportError, fetch};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Slot = Arc<tokio::sync::Mutex<Option<(u64, Arc<HttpResponse>)>>>;

/// Wraps a transport. GETs below `prefix` without a `range` header are answered from the cache; an entry is
/// revalidated when [`SharedGets::begin_round`] was called since. A request with `if-none-match` equal to the
/// cached `etag` gets a 304 like from a server. Everything else passes through.
pub struct SharedGets<T> {
    inner: T,
    prefixes: Vec<String>,
    limit_bytes: u64,
    round: AtomicU64,
    slots: Mutex<HashMap<String, Slot>>,
}

impl<T: HttpTransport> SharedGets<T> {
    /// `prefixes` are address prefixes whose answers do not depend on the device, at most `limit_bytes` each.
    pub fn new(inner: T, prefixes: Vec<String>, limit_bytes: u64) -> Self {
        Self { inner, prefixes, limit_bytes, round: AtomicU64::new(1), slots: Mutex::new(HashMap::new()) }
    }

    /// From now on every entry is asked for again, once (with its entity tag).
    pub fn begin_round(&self) {
        self.round.fetch_add(1, Ordering::SeqCst);
    }

    /// The wrapped transport.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn cacheable(&self, request: &HttpRequest) -> bool {
        request.method == Method::Get
            && request.get_header("range").is_none()
            && self.prefixes.iter().any(|p| request.url.starts_with(p.as_str()))
    }

    fn slot(&self, url: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(url) {
            return Arc::clone(slot);
        }
        Arc::clone(slots.entry(url.to_owned()).or_default())
    }

    /// The current answer. Only 200 and 404 are kept; a failure reaches every device that asked.
    async fn current(&self, request: &HttpRequest) -> Result<Arc<HttpResponse>, TransportError> {
        let slot = self.slot(&request.url);
        let mut held = slot.lock().await;
        let round = self.round.load(Ordering::SeqCst);
        if let Some((at, answer)) = held.as_ref()
            && *at == round
        {
            return Ok(Arc::clone(answer));
        }
        let mut ask = HttpRequest { headers: Vec::new(), ..request.clone() };
        ask.headers = request.headers.iter().filter(|(n, _)| *n != "if-none-match").cloned().collect();
        if let Some((_, old)) = held.as_ref()
            && let Some(etag) = old.head.header("etag")
        {
            ask = ask.header("if-none-match", etag);
        }
        let answer = fetch(&self.inner, ask, self.limit_bytes).await?;
        match (answer.head.status, held.as_mut()) {
            (304, Some((at, old))) => {
                *at = round;
                Ok(Arc::clone(old))
            }
            (200 | 404, _) => {
                let answer = Arc::new(answer);
                *held = Some((round, Arc::clone(&answer)));
                Ok(answer)
            }
            _ => Ok(Arc::new(answer)),
        }
    }
}

#[async_trait::async_trait]
impl<T: HttpTransport> HttpTransport for SharedGets<T> {
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError> {
        if !self.cacheable(&request) {
            return self.inner.send(request, sink).await;
        }
        let answer = self.current(&request).await?;
        let same = matches!(
            (request.get_header("if-none-match"), answer.head.header("etag")),
            (Some(theirs), Some(ours)) if theirs == ours
        );
        if same && answer.head.status == 200 {
            sink.head(&ResponseHead { status: 304, headers: answer.head.headers.clone() });
            return Ok(());
        }
        if sink.head(&answer.head) == Flow::More && !answer.body.is_empty() {
            sink.data(&answer.body);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryHttp;
    use super::*;

    #[tokio::test]
    async fn identical_gets_cross_the_network_once_a_round() {
        let server = MemoryHttp::new();
        server.put("http://h/a", b"one".to_vec());
        let shared = SharedGets::new(server.clone(), vec!["http://h/".into()], 100);
        for _ in 0..5 {
            let r = fetch(&shared, HttpRequest::get("http://h/a"), 100).await.unwrap();
            assert_eq!(&r.body[..], b"one");
        }
        assert_eq!(server.requests().len(), 1);
        let etag = fetch(&shared, HttpRequest::get("http://h/a"), 100).await.unwrap();
        let etag = etag.head.header("etag").unwrap().to_owned();
        let ask = || HttpRequest::get("http://h/a").header("if-none-match", etag.clone());
        assert_eq!(fetch(&shared, ask(), 100).await.unwrap().head.status, 304);

        server.put("http://h/a", b"two".to_vec());
        assert_eq!(fetch(&shared, ask(), 100).await.unwrap().head.status, 304, "same round: same view");
        shared.begin_round();
        let r = fetch(&shared, ask(), 100).await.unwrap();
        assert_eq!((r.head.status, &r.body[..]), (200, &b"two"[..]));
        assert_eq!(server.requests().len(), 2);
    }

    #[tokio::test]
    async fn ranges_and_posts_pass_through() {
        let server = MemoryHttp::new();
        server.put("http://h/a", b"0123".to_vec());
        let shared = SharedGets::new(server.clone(), vec!["http://h/".into()], 100);
        for _ in 0..2 {
            let r = fetch(&shared, HttpRequest::get("http://h/a").header("range", "bytes=1-2"), 100).await.unwrap();
            assert_eq!(&r.body[..], b"12");
        }
        assert_eq!(server.requests().len(), 2);
    }
}
