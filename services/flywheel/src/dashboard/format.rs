//! Numbers and times as people read them.

use chrono::{DateTime, Utc};

/// Shown where there is no number; "missing" is never shown as zero.
pub const NONE: &str = "–";

/// `2026-03-01 08:05`; the footer says that all times are UTC.
pub fn time(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M").to_string()
}

/// `1.23 %` of a share.
pub fn percent(share: Option<f64>) -> String {
    share.filter(|v| v.is_finite()).map_or_else(|| NONE.into(), |v| format!("{:.2} %", v * 100.0))
}

/// `+1.23 pp` of a difference of shares.
pub fn points(difference: Option<f64>) -> String {
    difference.filter(|v| v.is_finite()).map_or_else(|| NONE.into(), |v| format!("{:+.2} pp", v * 100.0))
}

/// Share of the fleet from parts per million.
pub fn ppm(width: u32) -> String {
    format!("{:.2} %", f64::from(width) / 10_000.0)
}

/// The first characters of a digest or id, enough to tell it apart.
pub fn short(text: &str) -> String {
    text.chars().take(12).collect()
}

/// `12,345`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Odds of an e-value from its natural logarithm: "1,234 to 1"; more than a million is not told apart.
pub fn odds(log_e: f64) -> String {
    if !log_e.is_finite() {
        return NONE.into();
    }
    let e = log_e.exp();
    if e >= 1e6 {
        return "more than 1,000,000 to 1".into();
    }
    if e < 10.0 {
        return format!("{e:.1} to 1");
    }
    // between 10 and a million
    let whole = e.round() as u64;
    format!("{} to 1", count(whole))
}

/// Shortest JSON of a value, cut after `most` characters.
pub fn json(value: &serde_json::Value, most: usize) -> String {
    let text = value.to_string();
    if text.chars().count() <= most {
        return text;
    }
    text.chars().take(most).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(percent(Some(0.01234)), "1.23 %");
        assert_eq!(percent(None), NONE);
        assert_eq!(percent(Some(f64::NAN)), NONE);
        assert_eq!(points(Some(-0.005)), "-0.50 pp");
        assert_eq!(ppm(100_000), "10.00 %");
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(odds(100.0_f64.ln()), "100 to 1");
        assert_eq!(odds(0.0), "1.0 to 1");
        assert_eq!(odds(1000.0), "more than 1,000,000 to 1");
        assert_eq!(json(&serde_json::json!({ "a": 1 }), 3), "{\"a…");
    }
}
