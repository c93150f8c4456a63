//! Decompression of request bodies with a cap on the result, checked while inflating: a small bomb must not become
//! a large allocation. gzip bodies may consist of several members; all are read (a decoder that stops after the
//! first would acknowledge data it never saw).

use flywheel_types::{Error, ErrorKind};
use std::borrow::Cow;
use std::io::Read;

/// Largest window of a zstd stream, as a power of two: the 8 MiB every decoder should support (RFC 8878, 3.1.1.1.2).
pub(crate) const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// The body as the decoders see it.
///
/// # Errors
/// `unsupported_encoding` for anything but `identity`, `gzip` and `zstd`; `too_large` past
/// `cap` bytes; `bad_compression` for a truncated or damaged stream.
pub fn inflate<'a>(encoding: Option<&str>, body: &'a [u8], cap: usize) -> Result<Cow<'a, [u8]>, Error> {
    match encoding.map_or_else(|| "identity".to_owned(), |e| e.trim().to_ascii_lowercase()).as_str() {
        "" | "identity" => {
            if body.len() > cap {
                return Err(too_large(cap));
            }
            Ok(Cow::Borrowed(body))
        }
        "gzip" | "x-gzip" => read_capped(flate2::bufread::MultiGzDecoder::new(body), cap).map(Cow::Owned),
        "zstd" => {
            let mut reader = zstd::stream::read::Decoder::with_buffer(body).map_err(bad_stream)?;
            // the window is memory that the sender chooses: up to 128 MiB for a body of ten bytes
            reader.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(bad_stream)?;
            read_capped(reader, cap).map(Cow::Owned)
        }
        other => Err(Error::new(
            ErrorKind::Unsupported,
            "unsupported_encoding",
            format!("Content-Encoding `{}` is not supported", other.chars().take(64).collect::<String>()),
            "send the body as identity, gzip or zstd, with one encoding only",
        )),
    }
}

fn read_capped(reader: impl Read, cap: usize) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    let mut limited = reader.take(cap as u64 + 1);
    limited.read_to_end(&mut out).map_err(bad_stream)?;
    if out.len() > cap {
        return Err(too_large(cap));
    }
    Ok(out)
}

fn bad_stream(e: std::io::Error) -> Error {
    Error::invalid(
        "bad_compression",
        format!("the compressed body is damaged or cut short: {e}"),
        "send the whole body again; nothing of it was stored",
    )
}

fn too_large(cap: usize) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        "body_too_large",
        format!("the body is larger than {cap} bytes after decompression"),
        "split the batch",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        e.write_all(data).unwrap();
        e.finish().unwrap()
    }

    #[test]
    fn all_gzip_members_are_read() {
        let mut two = gzip(b"first ");
        two.extend(gzip(b"second"));
        assert_eq!(&*inflate(Some("gzip"), &two, 100).unwrap(), b"first second");
    }

    #[test]
    fn every_truncation_of_gzip_is_refused() {
        let whole = gzip(b"some words that compress to a stream");
        for cut in 0..whole.len() {
            let got = inflate(Some("gzip"), &whole[..cut], 1000);
            assert!(got.is_err(), "cut at {cut} of {} was accepted", whole.len());
        }
    }

    #[test]
    fn bombs_stop_at_the_cap() {
        let zeros = vec![0u8; 4 << 20];
        for (enc, body) in [("gzip", gzip(&zeros)), ("zstd", zstd::encode_all(&zeros[..], 1).unwrap())] {
            let e = inflate(Some(enc), &body, 1 << 20).unwrap_err();
            assert_eq!(e.kind, ErrorKind::TooLarge, "{enc}");
            assert_eq!(inflate(Some(enc), &body, 4 << 20).unwrap().len(), 4 << 20);
        }
        assert_eq!(inflate(None, &zeros, 10).unwrap_err().kind, ErrorKind::TooLarge);
    }

    #[test]
    fn stacked_and_unknown_encodings_are_named() {
        assert_eq!(inflate(Some("gzip, zstd"), b"", 1).unwrap_err().code, "unsupported_encoding");
        assert_eq!(inflate(Some("br"), b"", 1).unwrap_err().code, "unsupported_encoding");
    }

    #[test]
    fn a_zstd_window_beyond_8_mib_is_refused() {
        // a frame of one empty raw block; the second byte after the magic is the window: 10 + 13 or 10 + 17 bits
        let frame = |window: u8| [0x28, 0xb5, 0x2f, 0xfd, 0, window << 3, 1, 0, 0];
        assert_eq!(inflate(Some("zstd"), &frame(13), 10).unwrap().len(), 0);
        assert_eq!(inflate(Some("zstd"), &frame(17), 10).unwrap_err().code, "bad_compression");
    }

    #[test]
    fn truncated_zstd_is_refused() {
        let whole = zstd::encode_all(&b"some words that compress to a stream"[..], 3).unwrap();
        for cut in 1..whole.len() {
            assert!(inflate(Some("zstd"), &whole[..cut], 1000).is_err(), "cut at {cut}");
        }
    }
}
