//! Lines of a file, compressed or not, in batches of bounded size. A line that is too long is skipped without being held.

use crate::decode::{Context, Decoded};
use crate::disposition::Kind;
use crate::events::history;
use crate::inflate::ZSTD_WINDOW_LOG_MAX;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

/// Longest line, bytes: one event with question and answer takes a fraction of it.
const LINE_BYTES: usize = 1 << 20;
/// Text of one batch, bytes.
const BATCH_BYTES: usize = 2 << 20;
/// Bytes read at once.
const BUFFER: usize = 256 << 10;

/// How a file of lines is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Reads lines.
pub struct Lines {
    reader: Box<dyn BufRead + Send>,
    /// Lines read so far.
    line: usize,
}

/// Some lines, with their numbers counted from 1.
#[derive(Debug, Default)]
pub struct Batch {
    text: Vec<u8>,
    /// Number and place of each line that is not blank; no place for one that is too long.
    lines: Vec<(usize, Option<Range<usize>>)>,
    /// Lines taken, blank ones too.
    pub taken: usize,
}

impl Lines {
    /// Reads `file` from its beginning.
    ///
    /// # Errors
    /// When the decompressor cannot be made.
    pub fn open(file: File, compression: Compression) -> io::Result<Self> {
        let file = BufReader::with_capacity(BUFFER, file);
        let reader: Box<dyn BufRead + Send> = match compression {
            Compression::None => Box::new(file),
            Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER, flate2::bufread::MultiGzDecoder::new(file))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(file)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(BufReader::with_capacity(BUFFER, decoder))
            }
        };
        Ok(Self { reader, line: 0 })
    }

    /// Reads to the end, so that a file that was cut or damaged is known before anything of it is stored.
    ///
    /// # Errors
    /// When the file cannot be read or decompressed.
    pub fn verify(mut self) -> io::Result<()> {
        io::copy(&mut self.reader, &mut io::sink()).map(|_| ())
    }

    /// Passes over `n` lines.
    ///
    /// # Errors
    /// When the file cannot be read or decompressed.
    pub fn skip(&mut self, n: usize) -> io::Result<()> {
        let mut text = Vec::new();
        for _ in 0..n {
            text.clear();
            if self.line(&mut text)?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Whether there is nothing more.
    ///
    /// # Errors
    /// When the file cannot be read or decompressed.
    pub fn at_end(&mut self) -> io::Result<bool> {
        Ok(self.reader.fill_buf()?.is_empty())
    }

    /// Up to `limit` lines; fewer when they are long or there are no more.
    ///
    /// # Errors
    /// When the file cannot be read or decompressed.
    pub fn batch(&mut self, limit: usize) -> io::Result<Batch> {
        let mut out = Batch::default();
        while out.taken < limit && out.text.len() < BATCH_BYTES {
            let begin = out.text.len();
            let Some(fits) = self.line(&mut out.text)? else { break };
            out.taken += 1;
            if !fits {
                out.text.truncate(begin);
                out.lines.push((self.line, None));
            } else if out.text[begin..].trim_ascii().is_empty() {
                out.text.truncate(begin);
            } else {
                out.lines.push((self.line, Some(begin..out.text.len())));
            }
        }
        Ok(out)
    }

    /// Appends the next line without its end; `false` when it is longer than it may be, `None` at the end of the file.
    fn line(&mut self, out: &mut Vec<u8>) -> io::Result<Option<bool>> {
        let (begin, mut any, mut fits) = (out.len(), false, true);
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                self.line += usize::from(any);
                return Ok(any.then_some(fits));
            }
            any = true;
            let end = buffer.iter().position(|b| *b == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            fits &= out.len() - begin + part.len() <= LINE_BYTES;
            if fits {
                out.extend_from_slice(part);
            }
            let used = end.map_or(buffer.len(), |e| e + 1);
            self.reader.consume(used);
            if end.is_some() {
                self.line += 1;
                return Ok(Some(fits));
            }
        }
    }
}

/// Rows of the lines of a batch: events as `/v1/events` takes them, one per line.
#[must_use]
pub fn decode<'a>(ctx: &Context<'a>, batch: &'a Batch) -> Decoded<'a> {
    let mut out = Decoded::default();
    for (line, place) in &batch.lines {
        let text = place.clone().and_then(|p| batch.text.get(p));
        match text.map(std::str::from_utf8) {
            Some(Ok(text)) => history(ctx, &mut out, *line, text),
            Some(Err(e)) => out.quarantine(Kind::Unknown, "bad_event", format!("line {line}: not UTF-8: {e}")),
            None => {
                let detail = format!("line {line}: longer than {LINE_BYTES} bytes");
                out.quarantine(Kind::Unknown, "line_too_long", detail);
            }
        }
    }
    out
}
