//! Seeded fleets through the whole crate: windows, gates, planner. Acceptance: of 200 rollouts without any effect at
//! most 2 are rolled back; harm is rolled back; an improvement is promoted to the whole fleet.

use crate::planner_rules::{act, draft};
use crate::support::at;
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_experiment::gate::{BaselineV1, GateReportV1, GateSpecV1, evaluate};
use flywheel_experiment::planner::{ArmInventory, Inventory, PlanV1, RolloutPolicyV1, plan_next};
use flywheel_experiment::window::{DeviceRecord, close_windows};
use flywheel_types::assign::{Arm, bucket};
use flywheel_types::rows::{DeviceHistory, Response};
use flywheel_types::{InstallId, LabelKind, RolloutState as S, TrustClass};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, HashSet};

/// A fleet and what the candidate does to it.
#[derive(Clone, Copy)]
struct Scenario {
    devices: u32,
    control_rejects: f64,
    treatment_rejects: f64,
    treatment_latency: f64,
    control_fails: f64,
    treatment_fails: f64,
    /// Mean responses of a device in 72 hours.
    responses: u32,
    max_hours: i64,
}

impl Scenario {
    fn neutral(devices: u32) -> Self {
        Self {
            devices,
            control_rejects: 0.20,
            treatment_rejects: 0.20,
            treatment_latency: 1.0,
            control_fails: 0.005,
            treatment_fails: 0.005,
            responses: 12,
            max_hours: 24 * 60,
        }
    }
}

struct World {
    rng: ChaCha8Rng,
    scenario: Scenario,
    /// Install id and its behaviour: rejection factor, speed factor.
    devices: Vec<(InstallId, f64, f64)>,
    exposed: HashSet<usize>,
    /// Devices whose record has not closed yet.
    open: Vec<DeviceHistory>,
    /// Devices ever exposed: control, treatment.
    in_arm: [u64; 2],
}

/// What became of a rollout.
#[derive(Debug)]
struct Outcome {
    state: S,
    /// Hours from the first exposure to the end, or to the last tick.
    hours: i64,
    exposed_share: f64,
    /// Closed devices per arm when the canary was left, upwards or downwards.
    decided_at: Option<(u64, i64)>,
    steps: Vec<String>,
    last_reason: String,
}

impl World {
    fn new(seed: u64, scenario: Scenario) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let devices = (0..scenario.devices)
            .map(|i| {
                let mut key = [0_u8; 32];
                key[..4].copy_from_slice(&i.to_le_bytes());
                key[4..12].copy_from_slice(&seed.to_le_bytes());
                // Users differ: some reject nearly nothing, some three times as much as others.
                let taste = [0.25, 0.75, 1.0, 2.0][rng.random_range(0..4)];
                let speed = (0.10 * normal(&mut rng)).exp();
                (InstallId::of_public_key(&key), taste, speed)
            })
            .collect();
        Self { rng, scenario, devices, exposed: HashSet::new(), open: Vec::new(), in_arm: [0, 0] }
    }

    fn baseline(&mut self) -> BaselineV1 {
        let samples = (0..3000).map(|_| {
            let speed = (0.10 * normal(&mut self.rng)).exp();
            300.0 * speed * (0.20 * normal(&mut self.rng)).exp()
        });
        BaselineV1 {
            rejection_rate: self.scenario.control_rejects,
            ttft_ms: [("mid".to_owned(), samples.collect())].into(),
            planned_devices: u64::from(self.scenario.devices) / 5,
        }
    }

    /// Devices poll once a day: each in its own hour sees the assignment and, if it has an arm, is exposed.
    fn poll(&mut self, plan: &PlanV1, now: DateTime<Utc>, tick_hours: i64) {
        let Some(a) = plan.assignment() else { return };
        for i in 0..self.devices.len() {
            let slot = (i as i64 * 7) % 24 / tick_hours;
            if self.exposed.contains(&i) || (now - at(0)).num_hours() / tick_hours % (24 / tick_hours) != slot {
                continue;
            }
            let b = bucket(&a.salt, &self.devices[i].0);
            let arm = match (a.treatment.contains(b), a.control.contains(b)) {
                (true, _) => Arm::Treatment,
                (_, true) => Arm::Control,
                _ => continue,
            };
            self.exposed.insert(i);
            let history = self.live(i, arm, a.phase, now);
            self.in_arm[usize::from(arm == Arm::Treatment)] += 1;
            self.open.push(history);
        }
    }

    /// Everything the device will do, with receipt times in the future.
    fn live(&mut self, i: usize, arm: Arm, phase: u32, now: DateTime<Utc>) -> DeviceHistory {
        let (install, taste, speed) = self.devices[i];
        let s = self.scenario;
        let (rate, slower, fails) = match arm {
            Arm::Control => (s.control_rejects, 1.0, s.control_fails),
            Arm::Treatment => (s.treatment_rejects, s.treatment_latency, s.treatment_fails),
        };
        let n = self.rng.random_range(1..=2 * s.responses - 1);
        let mut times: Vec<i64> = (0..n).map(|_| self.rng.random_range(0..72 * 60)).collect();
        times.sort_unstable();
        let responses = times
            .into_iter()
            .map(|m| Response {
                at: now + TimeDelta::minutes(m),
                label: (self.rng.random::<f64>() < rate * taste).then_some(LabelKind::Rejected),
                label_at: None,
                refused: false,
                ttft_ms: Some(300.0 * speed * slower * (0.20 * normal(&mut self.rng)).exp()),
            })
            .collect();
        let failures = if self.rng.random::<f64>() < fails { vec![now + TimeDelta::hours(3)] } else { Vec::new() };
        DeviceHistory {
            install: install.to_string(),
            trust: TrustClass::Keyed,
            first_seen: at(-500),
            device_class: "mid".into(),
            locale: "en".into(),
            arm,
            phase,
            exposed_at: now,
            crossed_over: false,
            responses,
            failures,
            confirmed_at: Some(now + TimeDelta::minutes(10)),
        }
    }

    fn inventory(&self, plan: &PlanV1) -> Inventory {
        let all = self.in_arm[0] + self.in_arm[1];
        let arm = |n: u64| ArmInventory { assigned: n, reporting: n, confirmed: n, failed: 0 };
        let treatment = arm(if plan.treatment.to == 1_000_000 { all } else { self.in_arm[1] });
        Inventory { treatment, control: arm(self.in_arm[0]), ring: Vec::new(), to_restore: all, restored: all }
    }
}

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let u: f64 = rng.random::<f64>().max(1e-12);
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

/// Runs one rollout of `policy` on a tick of `tick` hours until it ends, holds, or time is up.
fn run(seed: u64, scenario: Scenario, policy: &RolloutPolicyV1, tick: i64) -> Outcome {
    let mut world = World::new(seed, scenario);
    let spec = GateSpecV1::freeze(&world.baseline()).unwrap();
    let mut plan = draft(policy, Vec::new());
    plan.salt = format!("r{seed}");
    plan.gate_spec = spec.digest().unwrap();
    let mut closed: Vec<DeviceRecord> = Vec::new();
    let mut report: Option<GateReportV1> = None;
    let mut out = Outcome {
        state: plan.state,
        hours: 0,
        exposed_share: 0.0,
        decided_at: None,
        steps: Vec::new(),
        last_reason: String::new(),
    };
    for hour in (0..scenario.max_hours).step_by(tick as usize) {
        let now = at(hour);
        world.poll(&plan, now, tick);
        if let Some(signed_at) = plan.signed_at.filter(|_| !plan.phases.is_empty()) {
            let w = close_windows(&world.open, &spec, &plan.phases, signed_at, &closed, now).unwrap();
            report = Some(evaluate(&spec, &plan.phases, &w, report.as_ref(), now).unwrap());
            let done: HashSet<&str> = w.closed.iter().map(|r| r.install.as_str()).collect();
            world.open.retain(|h| !done.contains(h.install.as_str()));
            closed = w.closed;
        }
        loop {
            let next = plan_next(policy, &plan, &world.inventory(&plan), report.as_ref(), now, &[]).unwrap();
            out.last_reason = next.reason.clone();
            if !next.changed(&plan) {
                break;
            }
            if plan.state == S::Canary {
                let arm = closed.iter().filter(|r| r.arm == Arm::Treatment).count() as u64;
                out.decided_at = Some((arm, hour));
            }
            out.steps.push(format!("{hour} h {}: {}", next.state, next.reason));
            plan = next.plan;
            if plan.state.is_final() || plan.state == S::Holding {
                break;
            }
        }
        out.state = plan.state;
        out.hours = hour;
        if plan.state.is_final() || plan.state == S::Holding {
            break;
        }
    }
    out.exposed_share = world.in_arm[1] as f64 / f64::from(scenario.devices);
    out
}

#[test]
fn of_200_rollouts_without_effect_at_most_2_are_rolled_back() {
    let mut ends: BTreeMap<S, u32> = BTreeMap::new();
    for seed in 0..200 {
        let o = run(seed, Scenario::neutral(3000), &act(), 24);
        *ends.entry(o.state).or_default() += 1;
    }
    println!("200 rollouts without effect, 3,000 devices: {ends:?}");
    let back = ends.get(&S::RolledBack).copied().unwrap_or(0) + ends.get(&S::RollingBack).copied().unwrap_or(0);
    assert!(back <= 2, "{ends:?}");
}

#[test]
fn harm_of_8_points_is_rolled_back_from_the_canary() {
    let mut shares = Vec::new();
    for seed in 0..10 {
        let harm = Scenario { treatment_rejects: 0.28, ..Scenario::neutral(6000) };
        let o = run(1000 + seed, harm, &act(), 12);
        assert_eq!(o.state, S::RolledBack, "seed {seed}: {} {:?}", o.last_reason, o.steps);
        assert!(o.exposed_share < 0.12, "{}", o.exposed_share);
        shares.push(o.decided_at);
    }
    println!("harm +8 pp: (closed devices per arm, hours) at the rollback {shares:?}");
}

#[test]
fn an_improvement_is_promoted_to_everybody() {
    for (devices, at_least) in [(2500, 5), (4000, 9)] {
        let mut ends = Vec::new();
        let mut complete = 0;
        for seed in 0..10 {
            let better = Scenario {
                control_rejects: 0.25,
                treatment_rejects: 0.08,
                control_fails: 0.001,
                treatment_fails: 0.001,
                ..Scenario::neutral(devices)
            };
            let o = run(2000 + seed, better, &act(), 12);
            complete += u32::from(o.state == S::Complete);
            assert_ne!(o.state, S::RolledBack, "seed {seed}: {:?}", o.steps);
            if o.state != S::Complete {
                println!("  seed {seed}: {}", o.last_reason);
            }
            ends.push((o.state, o.decided_at, o.hours));
        }
        println!(
            "25 % to 8 %, {devices} devices: (state, (closed treatment devices, hours) at the promotion, end) {ends:?}"
        );
        assert!(complete >= at_least, "{complete} of 10 complete with {devices} devices");
    }
}

#[test]
fn a_crashing_candidate_is_rolled_back_within_a_day() {
    let crash = Scenario { treatment_fails: 0.30, ..Scenario::neutral(2000) };
    let o = run(5, crash, &act(), 6);
    assert_eq!(o.state, S::RolledBack, "{} {:?}", o.last_reason, o.steps);
    assert!(o.hours <= 36, "{o:?}");
}

#[test]
fn a_slower_candidate_is_not_promoted() {
    let slow =
        Scenario { treatment_latency: 1.5, control_rejects: 0.25, treatment_rejects: 0.08, ..Scenario::neutral(3000) };
    let o = run(6, slow, &act(), 12);
    assert_eq!(o.state, S::RolledBack, "{} {:?}", o.last_reason, o.steps);
}

#[test]
fn replays_are_equal() {
    let better = Scenario { control_rejects: 0.25, treatment_rejects: 0.08, ..Scenario::neutral(2000) };
    let (a, b) = (run(9, better, &act(), 12), run(9, better, &act(), 12));
    assert_eq!(format!("{a:?}"), format!("{b:?}"));
}
