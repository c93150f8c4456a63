//! Values of options: sizes in bytes, tensors with a type, files with a label.

use flywheel_inference::gguf::TensorType;
use std::path::PathBuf;

/// Units of [`bytes`]; `M` is 10^6 as in the sizes of shops and networks, `Mi` is 2^20.
const UNITS: [(&str, u64); 13] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("ki", 1 << 10),
    ("mi", 1 << 20),
    ("gi", 1 << 30),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("k", 1_000),
    ("m", 1_000_000),
    ("g", 1_000_000_000),
    ("b", 1),
];

/// A number of bytes: `95000000`, `95MB`, `1.5 GiB`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| lower.strip_suffix(name).map(|number| (number.trim_end(), *unit)))
        .unwrap_or((&lower, 1));
    let whole = number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    let part = || number.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0).map(|n| (n * unit as f64) as u64);
    match whole.or_else(part) {
        Some(n) if n > 0 => Ok(n),
        _ => Err(format!("`{text}` is not a size such as 95000000, 95MB or 1.5GiB")),
    }
}

/// `TENSOR=TYPE`, for example `token_embd.weight=Q6_K`.
pub fn tensor_type(text: &str) -> Result<(String, TensorType), String> {
    let (name, ty) = text.split_once('=').ok_or_else(|| format!("`{text}` is not TENSOR=TYPE"))?;
    Ok((name.to_owned(), ty.parse().map_err(|e: flywheel_inference::gguf::UnknownTensorType| e.to_string())?))
}

/// `LABEL=FILE`.
pub fn labelled(text: &str) -> Result<(String, PathBuf), String> {
    let split = text.split_once('=').filter(|(label, file)| !label.is_empty() && !file.is_empty());
    let (label, file) = split.ok_or_else(|| format!("`{text}` is not LABEL=FILE"))?;
    Ok((label.to_owned(), file.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, want) in [
            ("95000000", 95_000_000),
            ("95MB", 95_000_000),
            ("200 mb", 200_000_000),
            ("1.5GiB", 1_610_612_736),
            ("64k", 64_000),
            ("64Ki", 65_536),
            ("7b", 7),
        ] {
            assert_eq!(bytes(text), Ok(want), "{text}");
        }
        for text in ["", "0", "-3", "12 parsecs", "MB", "1e400", "NaN"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn pairs() {
        assert_eq!(tensor_type("a.weight=q6_k"), Ok(("a.weight".into(), TensorType::Q6K)));
        assert!(tensor_type("a.weight").is_err() && tensor_type("a=Q9").is_err());
        assert_eq!(labelled("stock Q4=x/y=z.gguf"), Ok(("stock Q4".into(), "x/y=z.gguf".into())));
        assert!(labelled("=x").is_err() && labelled("x=").is_err());
    }
}
