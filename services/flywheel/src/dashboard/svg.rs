//! Interval charts as SVG made on the server: testable as text, printable, readable without JavaScript.

use std::fmt::Write as _;

/// One interval. All values are shares (0.01 = one percentage point); lower is better.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub lower: f64,
    pub value: f64,
    pub upper: f64,
    /// Beyond it the candidate fails.
    pub margin: f64,
}

const WIDTH: f64 = 320.0;
const HEIGHT: f64 = 36.0;
const PAD: f64 = 6.0;

/// Draws the interval with the zero line and the forbidden zone beyond the margin.
/// Text for screen readers says the same in numbers.
#[must_use]
pub fn interval(name: &str, i: Interval) -> String {
    let reach = [i.lower, i.value, i.upper, i.margin * 1.5]
        .into_iter()
        .filter(|v| v.is_finite())
        .fold(1e-4_f64, |m, v| m.max(v.abs()));
    let x = |v: f64| {
        let clamped = if v.is_finite() { v.clamp(-reach, reach) } else { reach.copysign(v) };
        PAD + (clamped + reach) / (2.0 * reach) * (WIDTH - 2.0 * PAD)
    };
    let middle = HEIGHT / 2.0;
    let mut s = String::with_capacity(900);
    let title = format!(
        "{}: difference {:+.2} pp, interval {:+.2} to {:+.2} pp, margin {:+.2} pp",
        escape(name),
        i.value * 100.0,
        i.lower * 100.0,
        i.upper * 100.0,
        i.margin * 100.0
    );
    let _ = write!(
        s,
        "<svg class=\"interval\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\"><title>{title}</title>\
         <rect class=\"forbidden\" x=\"{m:.1}\" y=\"2\" width=\"{w:.1}\" height=\"{h:.1}\"/>\
         <line class=\"zero\" x1=\"{z:.1}\" x2=\"{z:.1}\" y1=\"2\" y2=\"{b:.1}\"/>\
         <line class=\"bar\" x1=\"{l:.1}\" x2=\"{u:.1}\" y1=\"{middle}\" y2=\"{middle}\"/>\
         <circle class=\"point\" cx=\"{v:.1}\" cy=\"{middle}\" r=\"4\"/></svg>",
        m = x(i.margin),
        w = (WIDTH - x(i.margin)).max(0.0),
        h = HEIGHT - 4.0,
        z = x(0.0),
        b = HEIGHT - 2.0,
        l = x(i.lower),
        u = x(i.upper),
        v = x(i.value),
    );
    s
}

/// Escapes text for HTML and SVG content.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_title_says_the_numbers_and_names_are_escaped() {
        let s = interval("a<b", Interval { lower: -0.02, value: -0.01, upper: 0.004, margin: 0.005 });
        assert!(s.contains("a&lt;b: difference -1.00 pp, interval -2.00 to +0.40 pp, margin +0.50 pp"), "{s}");
        assert!(!s.contains("a<b"));
    }

    #[test]
    fn an_infinite_bound_stays_inside_the_picture() {
        let s = interval("x", Interval { lower: f64::NEG_INFINITY, value: 0.0, upper: f64::INFINITY, margin: 0.01 });
        assert!(s.contains("x1=\"6.0\" x2=\"314.0\""), "{s}");
        assert!(!s.contains("NaN") && !s.contains("inf\""), "{s}");
    }
}
