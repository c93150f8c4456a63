//! `cargo xtask docs`: pages that are made from other files. The tidy test compares them with what this would write.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// A page, the file it is made from, and how.
type Page = (&'static str, &'static str, fn(&str) -> String);

const PAGES: &[Page] = &[("docs/semconv.md", "docs/semconv.yaml", semconv)];

/// Writes every page.
pub fn run(root: &Path) -> Result<()> {
    for (page, source, make) in PAGES {
        let text = fs::read_to_string(root.join(source)).with_context(|| format!("cannot read {source}"))?;
        fs::write(root.join(page), make(&text)).with_context(|| format!("cannot write {page}"))?;
    }
    Ok(())
}

/// Pages that are not what their source says.
pub fn stale(root: &Path) -> Vec<String> {
    let old = |page: &str, source: &str, make: fn(&str) -> String| -> Option<String> {
        let text = fs::read_to_string(root.join(source)).ok()?;
        (fs::read_to_string(root.join(page)).ok()? != make(&text))
            .then(|| format!("{page} is not made from {source}: run `cargo xtask docs`"))
    };
    PAGES.iter().filter_map(|(page, source, make)| old(page, source, *make)).collect()
}

/// One attribute or metric of the registry.
#[derive(Default)]
struct Entry {
    id: String,
    kind: String,
    brief: String,
    examples: String,
    note: String,
    instrument: String,
    unit: String,
}

/// A table of the attributes and one of the metrics.
fn semconv(yaml: &str) -> String {
    let mut out = "# Attributes of the `fleet.*` namespace\n\nMade from `semconv.yaml` by `cargo xtask docs`. \
                   Beside these the intake reads `gen_ai.*` of OpenTelemetry's semantic conventions v1.41.1 with their\n\
                   deprecated spellings, OpenInference, and general resource attributes \
                   (`crates/telemetry/src/otlp/names.rs`). All are optional but\n`gen_ai.response.id`; anything else is kept \
                   as text in the column `attrs`, within limits.\n\n\
                   | attribute | type | meaning | example | stored in |\n|---|---|---|---|---|\n"
        .to_owned();
    let (metrics, attributes): (Vec<_>, Vec<_>) = entries(yaml).into_iter().partition(|e| e.kind == "metric");
    for a in attributes {
        let column = a.note.trim_start_matches("column ");
        out += &format!("| `{}` | {} | {} | `{}` | {column} |\n", a.id, a.kind, a.brief, a.examples);
    }
    if !metrics.is_empty() {
        out += "\n## Metrics\n\nWhat a phone measures of itself between answers, sent to `/v1/metrics`. Any other metric is kept as \
                well, `gen_ai.client.*`\nof the conventions among them; every data point is a row of the table `metrics`.\n\n\
                | metric | instrument | unit | meaning |\n|---|---|---|---|\n";
    }
    for m in metrics {
        let name = m.id.trim_start_matches("metric.");
        out += &format!("| `{name}` | {} | `{}` | {} |\n", m.instrument, m.unit.trim_matches('"'), m.brief);
    }
    out
}

/// The attributes and metrics of a registry file. Only the few forms that the file uses are read.
fn entries(yaml: &str) -> Vec<Entry> {
    let mut out: Vec<Entry> = Vec::new();
    let mut lines = yaml.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let ours = |id: &&str| id.starts_with("fleet.") || id.starts_with("metric.");
        if let Some(id) = line.strip_prefix("- id: ").filter(ours) {
            out.push(Entry { id: id.to_owned(), ..Entry::default() });
        }
        let Some(last) = out.last_mut() else { continue };
        if let Some(kind) = line.strip_prefix("type: ") {
            kind.clone_into(&mut last.kind);
        } else if line == "brief: >" {
            lines.next().unwrap_or_default().clone_into(&mut last.brief);
        } else if let Some(examples) = line.strip_prefix("examples: ") {
            examples.clone_into(&mut last.examples);
        } else if let Some(note) = line.strip_prefix("note: ") {
            note.clone_into(&mut last.note);
        } else if let Some(instrument) = line.strip_prefix("instrument: ") {
            instrument.clone_into(&mut last.instrument);
        } else if let Some(unit) = line.strip_prefix("unit: ") {
            unit.clone_into(&mut last.unit);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_becomes_a_table() {
        let yaml = "groups:\n  - id: registry.fleet\n    attributes:\n      - id: fleet.x\n        type: int\n        brief: >\n          \
                    What x is.\n        examples: 7\n        note: column `x`\n";
        let attribute = "| `fleet.x` | int | What x is. | `7` | `x` |\n";
        assert!(semconv(yaml).ends_with(attribute));
        let metric = "  - id: metric.fleet.y\n    type: metric\n    metric_name: fleet.y\n    brief: >\n      What y is.\n    \
                      instrument: gauge\n    unit: \"1\"\n";
        let both = semconv(&format!("{yaml}{metric}"));
        assert!(both.contains(attribute) && both.ends_with("| `fleet.y` | gauge | `1` | What y is. |\n"), "{both}");
    }
}
