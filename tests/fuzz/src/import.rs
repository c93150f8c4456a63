//! Lines of a file of history (`/v1/imports`), plain and compressed. Every line that is not blank ends in exactly one counted
//! disposition, and a reader that passes over lines goes on where a reader from the beginning would be.

use crate::choice;
use crate::scratch::Scratch;
use crate::telemetry::{check, gzip, with_context, zstd};
use flywheel_telemetry::Endpoint;
use flywheel_telemetry::import::lines::{Compression, Lines, decode};
use std::fs::File;

/// Lines of one input that are decoded: a stream of a few bytes can hold millions.
const LINES: usize = 20_000;

/// First byte: compression (two bits), whether the input is a compressed stream or is compressed first, lines of a batch
/// (three bits).
pub fn lines(data: &[u8]) {
    let (flags, body) = choice(data);
    let compression = [Compression::None, Compression::Gzip, Compression::Zstd][usize::from(flags & 3) % 3];
    let raw = flags & 4 != 0;
    let batch = usize::from(flags >> 3 & 7) + 1;
    let file = match compression {
        Compression::Gzip if !raw => gzip(body),
        Compression::Zstd if !raw => zstd(body),
        _ => body.to_vec(),
    };
    let scratch = Scratch::empty();
    let path = scratch.path().join("lines");
    std::fs::write(&path, file).expect("memory takes it");
    let open = || Lines::open(File::open(&path).expect("it was written"), compression);
    let whole = open().and_then(Lines::verify).is_ok();
    let known = !raw || compression == Compression::None;
    assert!(whole || !known, "a stream that was made whole is read whole");
    let read = open().map(|l| read(l, batch, flags));
    let Ok(Ok((taken, items))) = read else {
        assert!(!whole, "what can be verified can be read");
        return;
    };
    if known {
        let lines: Vec<&[u8]> = body.split(|b| *b == b'\n').collect();
        let filled = lines.iter().filter(|l| !l.trim_ascii().is_empty()).count();
        let ends_open = lines.last().is_some_and(|l| !l.is_empty());
        assert_eq!((taken, items), (lines.len() - 1 + usize::from(ends_open), filled), "every line is counted once");
        let skip = taken / 2;
        let mut rest = open().expect("it was opened before");
        rest.skip(skip).expect("it was read before");
        let before: usize = lines.iter().take(skip).filter(|l| !l.trim_ascii().is_empty()).count();
        let (again, after) = self::read(rest, batch, flags).expect("it was read before");
        assert_eq!((skip + again, before + after), (taken, items), "going on loses and repeats nothing");
    }
}

/// Lines taken and items counted from here on.
fn read(mut lines: Lines, limit: usize, flags: u8) -> std::io::Result<(usize, usize)> {
    let (mut taken, mut items) = (0, 0);
    loop {
        let end = lines.at_end()?;
        let batch = lines.batch(limit)?;
        assert_eq!(end, batch.taken == 0, "the end is where nothing is taken");
        assert!(batch.taken <= limit);
        if end || taken > LINES {
            return Ok((taken, items));
        }
        taken += batch.taken;
        items += with_context(Endpoint::Import, flags, |ctx| {
            let decoded = decode(ctx, &batch);
            check(&decoded, None);
            let now = ctx.now.timestamp_micros();
            assert!(decoded.interactions.iter().all(|r| r.received_at.0 <= now), "history was received before");
            assert!(decoded.feedback.iter().all(|r| r.received_at.0 <= now), "history was received before");
            decoded.items()
        });
    }
}
