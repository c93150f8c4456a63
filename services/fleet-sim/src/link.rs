//! A bad link between one phone and the artefact store: cuts and flips bytes of real HTTP answers.

use flywheel_sdk::{BodySink, Flow, HttpRequest, HttpTransport, ResponseHead, TransportError};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// What happens to one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkFault {
    /// The connection breaks after this many body bytes.
    CutAfter(u64),
    /// One bit of the byte at this offset is turned round (a hostile or broken proxy).
    FlipByte(u64),
}

/// Wraps a transport; answers of addresses that contain `part` meet the faults, one each, in order.
pub struct Link {
    inner: Arc<dyn HttpTransport>,
    part: String,
    faults: Mutex<VecDeque<LinkFault>>,
}

impl Link {
    pub fn new(inner: Arc<dyn HttpTransport>, part: impl Into<String>, faults: Vec<LinkFault>) -> Self {
        Self { inner, part: part.into(), faults: Mutex::new(faults.into()) }
    }

    /// The next `times` answers meet this fault too.
    pub fn add(&self, fault: LinkFault, times: usize) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.extend(std::iter::repeat_n(fault, times));
    }

    /// From now on the link is honest.
    pub fn clear(&self) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Faults that have not happened yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

struct Faulty<'a> {
    sink: &'a mut dyn BodySink,
    fault: LinkFault,
    at: u64,
    cut: bool,
}

impl BodySink for Faulty<'_> {
    fn head(&mut self, head: &ResponseHead) -> Flow {
        self.sink.head(head)
    }
    fn data(&mut self, block: &[u8]) -> Flow {
        let from = self.at;
        self.at += block.len() as u64;
        match self.fault {
            LinkFault::CutAfter(n) if self.at > n => {
                self.cut = true;
                let keep = usize::try_from(n.saturating_sub(from)).unwrap_or(0);
                self.sink.data(&block[..keep.min(block.len())]);
                Flow::Stop
            }
            LinkFault::FlipByte(n) if (from..self.at).contains(&n) => {
                let mut block = block.to_vec();
                if let Some(byte) = usize::try_from(n - from).ok().and_then(|i| block.get_mut(i)) {
                    *byte ^= 1;
                }
                self.sink.data(&block)
            }
            _ => self.sink.data(block),
        }
    }
}

#[async_trait::async_trait]
impl HttpTransport for Link {
    async fn send(&self, request: HttpRequest, sink: &mut dyn BodySink) -> Result<(), TransportError> {
        let fault = if request.url.contains(&self.part) {
            self.faults.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
        } else {
            None
        };
        let Some(fault) = fault else {
            return self.inner.send(request, sink).await;
        };
        let mut faulty = Faulty { sink, fault, at: 0, cut: false };
        self.inner.send(request, &mut faulty).await?;
        if faulty.cut { Err(TransportError::Broken("the simulated link was cut".into())) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flywheel_sdk::{MemoryHttp, fetch};

    #[tokio::test]
    async fn cuts_and_flips_only_what_it_should() {
        let http = MemoryHttp::new();
        http.put("h/blobs/a", vec![7u8; 3000]);
        http.put("h/b", vec![7u8; 3000]);
        let faults = vec![LinkFault::CutAfter(1500), LinkFault::FlipByte(2999)];
        let link = Link::new(Arc::new(http), "/blobs/", faults);
        let get = |url: &str| HttpRequest::get(url);
        assert!(matches!(fetch(&link, get("h/blobs/a"), 9999).await, Err(TransportError::Broken(_))));
        assert_eq!(fetch(&link, get("h/b"), 9999).await.unwrap().body, vec![7u8; 3000]);
        let flipped = fetch(&link, get("h/blobs/a"), 9999).await.unwrap().body;
        assert_eq!((flipped[2998], flipped[2999]), (7, 6));
        assert_eq!(link.left(), 0);
        assert_eq!(fetch(&link, get("h/blobs/a"), 9999).await.unwrap().body, vec![7u8; 3000]);
    }
}
