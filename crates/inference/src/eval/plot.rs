//! A plot of divergence against size as SVG.

use super::Interval;
use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 50.0;
/// Colours of Okabe and Ito, told apart also by the colour-blind.
const COLOURS: [&str; 2] = ["#0072b2", "#d55e00"];

/// A point.
pub(super) struct Point {
    pub label: String,
    pub series: usize,
    pub bytes: f64,
    pub kld: f64,
    pub interval: Option<Interval>,
}

struct Scale {
    x: (f64, f64),
    /// Decimal logarithms.
    y: (f64, f64),
}

impl Scale {
    fn of(points: &[&Point]) -> Self {
        let (mut x, mut y) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
        for p in points {
            x = (x.0.min(p.bytes), x.1.max(p.bytes));
            let (low, high) = p.interval.filter(|i| i.low > 0.0).map_or((p.kld, p.kld), |i| (i.low, i.high));
            y = (y.0.min(low.log10()), y.1.max(high.log10()));
        }
        let pad = ((x.1 - x.0) * 0.08).max(x.1.abs() * 0.02);
        Self { x: (x.0 - pad, x.1 + pad), y: ((y.0 - 0.05).floor(), (y.1 + 0.05).ceil()) }
    }
    fn x(&self, bytes: f64) -> f64 {
        LEFT + (bytes - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }
    fn y(&self, kld: f64) -> f64 {
        TOP + (self.y.1 - kld.log10()) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Points with a divergence above 0 (others have no logarithm), those of a series joined by size.
pub(super) fn svg(series: &[&str], points: &[Point]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let mut shown: Vec<&Point> = points.iter().filter(|p| p.kld > 0.0 && p.kld.is_finite()).collect();
    shown.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
    if !shown.is_empty() {
        let scale = Scale::of(&shown);
        axes(&mut out, &scale);
        for (i, name) in series.iter().enumerate() {
            let own: Vec<&Point> = shown.iter().copied().filter(|p| p.series == i).collect();
            if !own.is_empty() {
                draw(&mut out, &scale, name, i, &own);
            }
        }
    }
    out.push_str("</svg>\n");
    out
}

fn axes(out: &mut String, s: &Scale) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    // Writing into a string cannot fail, here and below.
    let _ = writeln!(out, "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>");
    for decade in s.y.0 as i32..=s.y.1 as i32 {
        let y = s.y(10f64.powi(decade));
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">1e{decade}</text>",
            LEFT - 6.0,
            y + 4.0
        );
    }
    for i in 0..=4 {
        let bytes = s.x.0 + (s.x.1 - s.x.0) * f64::from(i) / 4.0;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{:.1}</text>",
            s.x(bytes),
            bottom + 18.0,
            bytes / 1e6
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">file, MB</text>\n\
         <text transform=\"translate(16 {}) rotate(-90)\" text-anchor=\"middle\">mean KLD, nats (95 % interval)</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 12.0,
        (TOP + bottom) / 2.0
    );
}

fn draw(out: &mut String, s: &Scale, name: &str, index: usize, points: &[&Point]) {
    let colour = COLOURS[index % COLOURS.len()];
    let line: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", s.x(p.bytes), s.y(p.kld))).collect();
    let _ = writeln!(out, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", line.join(" "));
    for p in points {
        let (x, y) = (s.x(p.bytes), s.y(p.kld));
        if let Some(i) = p.interval.filter(|i| i.low > 0.0) {
            let _ = writeln!(out, "<path d=\"M{x:.1} {:.1}V{:.1}\" stroke=\"{colour}\"/>", s.y(i.low), s.y(i.high));
        }
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 7.0,
            y - 5.0,
            escaped(&p.label)
        );
    }
    let y = TOP + 16.0 * (index as f64 + 1.0);
    let x = WIDTH - RIGHT - 90.0;
    let _ = writeln!(
        out,
        "<circle cx=\"{x}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/><text x=\"{}\" y=\"{y:.1}\">{}</text>",
        y - 4.0,
        x + 10.0,
        escaped(name)
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
