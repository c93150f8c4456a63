//! Builders shared by the tests.

use chrono::{DateTime, TimeDelta, Utc};
use flywheel_experiment::window::{DeviceRecord, PhaseV1};
use flywheel_types::assign::Arm;
use flywheel_types::rows::{DeviceHistory, Response};
use flywheel_types::{LabelKind, TrustClass};

/// `hours` after the epoch of the tests.
pub fn at(hours: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_790_000_000, 0).unwrap() + TimeDelta::hours(hours)
}

pub fn phase(number: u32, treatment_ppm: u32, control_ppm: u32) -> PhaseV1 {
    PhaseV1 { number, treatment_ppm, control_ppm, started_at: at(0) }
}

/// A closed record with `events` rejections of `responses`.
pub fn device(i: usize, arm: Arm, phase: u32, events: u32, responses: u32) -> DeviceRecord {
    DeviceRecord {
        install: format!("{i:06}-{}-{phase}", arm.as_str()),
        arm,
        phase,
        device_class: "mid".into(),
        locale: "en".into(),
        exposed_at: at(0),
        closed_at: at(96) + TimeDelta::seconds(i as i64),
        responses,
        rejections: events,
        refusals: 0,
        latency: Vec::new(),
        first_failure_at: None,
        reporting: responses > 0,
        crossed_over: false,
    }
}

/// A device exposed at hour 0 that gave no response yet.
pub fn history(install: &str, arm: Arm) -> DeviceHistory {
    DeviceHistory {
        install: install.into(),
        trust: TrustClass::Keyed,
        first_seen: at(-1000),
        device_class: "mid".into(),
        locale: "en".into(),
        arm,
        phase: 1,
        exposed_at: at(0),
        crossed_over: false,
        responses: Vec::new(),
        failures: Vec::new(),
        confirmed_at: Some(at(1)),
    }
}

pub fn response(hour: i64, rejected: bool) -> Response {
    Response {
        at: at(hour),
        label: rejected.then_some(LabelKind::Rejected),
        label_at: None,
        refused: false,
        ttft_ms: Some(100.0),
    }
}
