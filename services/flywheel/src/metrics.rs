//! Our own counters and gauges in Prometheus text form. Few and named; labels come from closed sets, never from users.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;

/// Counters by name and label text (`reason="x"`).
#[derive(Debug, Default)]
pub struct Metrics {
    counters: Mutex<BTreeMap<(&'static str, String), u64>>,
}

/// Help line of each counter; a counter that is not listed here does not exist.
const HELP: &[(&str, &str)] = &[
    ("flywheel_ingest_events_total", "Events received, by disposition."),
    ("flywheel_jobs_total", "Jobs ended, by kind and state."),
    ("flywheel_rollout_transitions_total", "Rollout transitions, by new state."),
    ("flywheel_mails_total", "Mails, by result."),
    ("flywheel_ticks_total", "Controller ticks."),
];

/// A value as it is now.
#[derive(Debug, Clone, Copy)]
pub struct Gauge {
    pub name: &'static str,
    pub help: &'static str,
    pub value: f64,
}

impl Metrics {
    /// Adds to a counter.
    pub fn add(&self, name: &'static str, labels: &[(&str, &str)], n: u64) {
        let text = labels.iter().map(|(k, v)| format!("{k}=\"{v}\"")).collect::<Vec<_>>().join(",");
        if let Ok(mut map) = self.counters.lock() {
            *map.entry((name, text)).or_default() += n;
        }
    }

    /// All counters and the given gauges, with help and type lines.
    #[must_use]
    pub fn render(&self, gauges: &[Gauge]) -> String {
        let mut out = String::new();
        for Gauge { name, help, value } in gauges {
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
        }
        let Ok(map) = self.counters.lock() else { return out };
        for (name, help) in HELP {
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} counter\n");
            for ((_, labels), value) in map.iter().filter(|((n, _), _)| n == name) {
                let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
                let _ = writeln!(out, "{name}{braces} {value}");
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_prometheus_text() {
        let m = Metrics::default();
        m.add("flywheel_jobs_total", &[("kind", "lora"), ("state", "succeeded")], 2);
        m.add("flywheel_ticks_total", &[], 1);
        let text = m.render(&[Gauge { name: "flywheel_installs", help: "Installs.", value: 3.0 }]);
        assert!(
            text.starts_with(
                "# HELP flywheel_installs Installs.\n# TYPE flywheel_installs gauge\nflywheel_installs 3\n"
            )
        );
        assert!(text.contains("flywheel_jobs_total{kind=\"lora\",state=\"succeeded\"} 2\n"), "{text}");
        assert!(text.contains("\nflywheel_ticks_total 1\n"), "{text}");
    }
}
