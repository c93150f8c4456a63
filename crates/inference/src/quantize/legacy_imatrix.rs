//! Importance files from before llama.cpp stored them as GGUF (`imatrix.dat`), read only.
//!
//! Little-endian: the number of entries; for each the name's length and bytes, the number of calls (chunks), the number
//! of values and the values, which are mean squares times calls. Then, in newer files, the chunks and the dataset's name.

use super::Imatrix;
use crate::gguf::GgufError;

/// Most bytes of a tensor's or data set's name.
const MAX_NAME: usize = 4096;

/// Parses the whole file.
///
/// # Errors
/// [`GgufError::Malformed`] with the byte for a file that is cut or has senseless lengths, [`GgufError::Tensor`] for
/// values that are not finite.
pub(super) fn parse(bytes: &[u8]) -> Result<Imatrix, GgufError> {
    let mut c = Cursor { bytes, at: 0 };
    let entries = c.length("number of entries", usize::MAX)?;
    let mut columns = Vec::new();
    for _ in 0..entries {
        let name = c.text()?;
        let calls = c.length("number of calls", usize::MAX)?.max(1);
        let values = c.length("number of values", c.left() / 4)?;
        let values: Vec<f32> = c.take(values * 4)?.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        columns.push((name, values, calls));
    }
    let (mut chunks, mut datasets) = (0, Vec::new());
    if c.left() > 0 {
        chunks = c.length("number of chunks", usize::MAX)? as u32;
        datasets.push(c.text()?);
    }
    let mut out = Imatrix::new(datasets, chunks, 0);
    for (name, values, calls) in columns {
        out.add(&name, &values, calls as u64)?;
    }
    Ok(out)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
    fn take(&mut self, n: usize) -> Result<&'a [u8], GgufError> {
        let part = self.bytes.get(self.at..self.at.saturating_add(n)).ok_or_else(|| {
            GgufError::malformed(self.at, format!("imatrix.dat: {n} bytes wanted, {} left; copy it again", self.left()))
        })?;
        self.at += n;
        Ok(part)
    }
    /// A count that is not negative and at most `limit`.
    fn length(&mut self, what: &str, limit: usize) -> Result<usize, GgufError> {
        let at = self.at;
        let raw = self.take(4)?;
        let n = i32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
        match usize::try_from(n) {
            Ok(n) if n <= limit => Ok(n),
            _ => Err(GgufError::malformed(at, format!("imatrix.dat: the {what} is {n}, which cannot be"))),
        }
    }
    fn text(&mut self) -> Result<String, GgufError> {
        let n = self.length("length of a name", MAX_NAME)?;
        let at = self.at;
        let name = std::str::from_utf8(self.take(n)?);
        name.map(str::to_owned).map_err(|_| GgufError::malformed(at, "imatrix.dat: a name is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(trailer: bool) -> Vec<u8> {
        let mut out = Vec::new();
        let int = |out: &mut Vec<u8>, n: i32| out.extend(n.to_le_bytes());
        int(&mut out, 2);
        for (name, calls, values) in [("blk.0.attn_q.weight", 4, vec![8.0f32, 2.0]), ("x", 1, vec![3.0])] {
            int(&mut out, name.len() as i32);
            out.extend(name.as_bytes());
            int(&mut out, calls);
            int(&mut out, values.len() as i32);
            values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        if trailer {
            int(&mut out, 17);
            int(&mut out, 4);
            out.extend(b"wiki");
        }
        out
    }

    #[test]
    fn values_are_mean_squares_times_calls() {
        let m = parse(&file(true)).unwrap();
        assert_eq!(m.get("blk.0.attn_q.weight").unwrap(), [2.0, 0.5]);
        assert_eq!(m.get("x").unwrap(), [3.0]);
        assert_eq!((m.chunks, m.datasets), (17, vec!["wiki".to_owned()]));
        assert_eq!(parse(&file(false)).unwrap().tensors().count(), 2);
    }

    #[test]
    fn cut_and_senseless_files_are_refused() {
        let whole = file(true);
        let plain = file(false).len();
        for cut in (0..whole.len()).filter(|n| *n != plain) {
            assert!(parse(&whole[..cut]).is_err(), "{cut} bytes");
        }
        let mut bad = file(false);
        bad[..4].copy_from_slice(&(-1i32).to_le_bytes());
        assert!(parse(&bad).unwrap_err().to_string().contains("number of entries is -1"));
        let mut bad = file(false);
        let at = 4 + 4 + "blk.0.attn_q.weight".len() + 4;
        bad[at..at + 4].copy_from_slice(&i32::MAX.to_le_bytes());
        assert!(parse(&bad).unwrap_err().to_string().contains("number of values"));
        let mut nan = file(false);
        nan[at + 4..at + 8].copy_from_slice(&f32::NAN.to_le_bytes());
        assert!(parse(&nan).unwrap_err().to_string().contains("`blk.0.attn_q.weight`"));
    }

    proptest::proptest! {
        /// Any change of a few bytes gives an importance matrix with finite values or an error.
        #[test]
        fn changed_bytes_never_panic(changes in proptest::collection::vec((0usize..60, proptest::prelude::any::<u8>()), 1..6)) {
            let mut bytes = file(true);
            for (at, byte) in changes {
                let n = bytes.len();
                bytes[at % n] = byte;
            }
            if let Ok(m) = Imatrix::from_bytes(bytes) {
                let all = m.tensors().filter_map(|t| m.get(t)).flatten();
                proptest::prop_assert!(all.into_iter().all(|v| v.is_finite() && v >= 0.0));
            }
        }
    }
}
