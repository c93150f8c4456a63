//! Properties that must hold for any fleet and any sequence of events.

use crate::planner_rules::{act, draft, install, ranges_widen, report, request};
use crate::support::{at, device, history, phase, response};
use flywheel_experiment::gate::{GateSpecV1, evaluate};
use flywheel_experiment::planner::{
    ArmInventory, Change, Inventory, PlanV1, RequestKind, RingDevice, RolloutPolicyV1, plan_next,
};
use flywheel_experiment::window::{DeviceRecord, Windows, close_windows};
use flywheel_types::assign::{Arm, AssignmentV1};
use flywheel_types::rows::DeviceHistory;
use flywheel_types::wire::DeviceFactsV1;
use flywheel_types::{AppId, Approval, Automation, InstallId, RolloutState as S, Verdict as V};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Cases per property.
const CASES: u32 = 48;

fn fleet() -> impl Strategy<Value = Vec<DeviceRecord>> {
    let one = (0_u32..13, 0_u32..13, any::<bool>(), 1_u32..3, prop::option::weighted(0.05, 1_i64..90));
    prop::collection::vec(one, 60..700).prop_map(|rows| {
        let record = |(i, (s, n, treated, p, failed)): (usize, (u32, u32, bool, u32, Option<i64>))| {
            let arm = if treated { Arm::Treatment } else { Arm::Control };
            let mut r = device(i, arm, p, s.min(n), n);
            r.first_failure_at = failed.map(at);
            r
        };
        rows.into_iter().enumerate().map(record).collect()
    })
}

/// The same histories in two orders, some devices twice.
fn histories() -> impl Strategy<Value = (Vec<DeviceHistory>, Vec<DeviceHistory>)> {
    let one =
        (0_u32..300, any::<bool>(), 1_u32..3, 0_i64..30, prop::collection::vec((0_i64..100, any::<bool>()), 0..8));
    prop::collection::vec(one, 60..400)
        .prop_map(|rows| {
            let make = |(i, treated, p, hour, answers): (u32, bool, u32, i64, Vec<(i64, bool)>)| {
                let arm = if treated { Arm::Treatment } else { Arm::Control };
                let responses = answers.into_iter().map(|(h, no)| response(hour + h, no)).collect();
                DeviceHistory { phase: p, exposed_at: at(hour), responses, ..history(&format!("d{i}"), arm) }
            };
            let mut all: Vec<_> = rows.into_iter().map(make).collect();
            // Two histories of one device with equal exposure would be the same history.
            let mut seen = std::collections::HashSet::new();
            all.retain(|h| seen.insert((h.install.clone(), h.exposed_at)));
            all
        })
        .prop_flat_map(|all| (Just(all.clone()), Just(all).prop_shuffle()))
}

fn spec() -> GateSpecV1 {
    let mut s = GateSpecV1 { planned_devices: 400, ..GateSpecV1::default() };
    s.burn_in.devices_per_arm = 50;
    s
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn device_order_changes_nothing((sorted, shuffled) in histories()) {
        let phases = [phase(1, 100_000, 100_000), phase(2, 300_000, 300_000)];
        let judge = |h: &[DeviceHistory]| {
            let w = close_windows(h, &spec(), &phases, at(-1), &[], at(110)).unwrap();
            let r = evaluate(&spec(), &phases, &w, None, at(110)).unwrap();
            (w, r)
        };
        prop_assert_eq!(judge(&sorted), judge(&shuffled));
    }

    #[test]
    fn swapping_the_arms_negates_the_difference(closed in fleet()) {
        let phases = [phase(1, 100_000, 100_000), phase(2, 300_000, 300_000)];
        let swapped = closed.iter().cloned().map(|mut r| {
            r.arm = if r.arm == Arm::Control { Arm::Treatment } else { Arm::Control };
            r
        });
        let mut s = spec();
        // The same level on both sides makes the bounds mirror images.
        s.alpha_pass = s.alpha_fail / s.fail_tests() as f64;
        let b = Windows { closed: swapped.collect(), ..Windows::default() };
        let a = Windows { closed, ..Windows::default() };
        let ra = evaluate(&s, &phases, &a, None, at(300)).unwrap();
        let rb = evaluate(&s, &phases, &b, None, at(300)).unwrap();
        let (ga, gb) = (ra.gate("rejection_rate").unwrap(), rb.gate("rejection_rate").unwrap());
        let mirrored = |x: Option<f64>, y: Option<f64>| match (x, y) {
            (Some(x), Some(y)) => (x + y).abs() < 1e-9,
            (x, y) => x == y,
        };
        prop_assert!(mirrored(ga.difference, gb.difference), "{ga:?} {gb:?}");
        prop_assert!(mirrored(ga.lower, gb.upper) && mirrored(ga.upper, gb.lower), "{ga:?} {gb:?}");
    }

    #[test]
    fn every_number_of_a_report_is_finite(closed in fleet()) {
        let windows = Windows { closed, ..Windows::default() };
        let r = evaluate(&spec(), &[phase(1, 1, 1), phase(2, 1, 1)], &windows, None, at(300)).unwrap();
        let json = serde_json::to_string(&r).unwrap();
        prop_assert_eq!(serde_json::from_str::<flywheel_experiment::gate::GateReportV1>(&json).unwrap(), r);
    }

    #[test]
    fn any_history_of_a_rollout_keeps_the_rules(
        automation in prop::sample::select(Automation::ALL.to_vec()),
        approval in prop::sample::select(Approval::ALL.to_vec()),
        ring in 0_u8..3,
        ticks in prop::collection::vec((0_usize..7, 0_usize..10, 0_u8..4, 0_u64..220), 1..40),
    ) {
        let policy = RolloutPolicyV1 { automation, approval, ..act() };
        let mut plan = draft(&policy, (0..ring).map(install).collect());
        let mut replay = Vec::new();
        for (i, (verdict, ask, who, restored)) in ticks.into_iter().enumerate() {
            let now = at(i as i64 * 20);
            let r = V::ALL.get(verdict).map(|v| report(&plan, *v));
            let inventory = inventory(&plan, restored);
            let asks = requests(&plan, ask, who);
            let next = plan_next(&policy, &plan, &inventory, r.as_ref(), now, &asks).unwrap();
            let promoted = asks.iter().any(|a| matches!(a.kind, RequestKind::Promote { .. }));
            check_step(&policy, &plan, &next.plan, V::ALL.get(verdict).copied(), promoted)?;
            let again = plan_next(&policy, &plan, &inventory, r.as_ref(), now, &asks).unwrap();
            prop_assert_eq!(&again, &next, "the same input gives the same plan");
            replay.push(next.plan.digest().unwrap());
            let back = [request("z", "zoe", RequestKind::Rollback)];
            let out = plan_next(&policy, &next.plan, &inventory, r.as_ref(), now, &back).unwrap();
            let reachable = match next.plan.state {
                S::Draft | S::AwaitingApproval | S::Signed => out.state == S::Superseded,
                S::RolledBack | S::Superseded => !out.changed(&next.plan),
                S::RollingBack => matches!(out.state, S::RollingBack | S::RolledBack),
                _ => out.state == S::RollingBack && out.plan.treatment_bundle == plan.control_bundle,
            };
            prop_assert!(reachable, "rollback from {}", next.plan.state);
            plan = next.plan;
        }
    }
}

fn inventory(plan: &PlanV1, restored: u64) -> Inventory {
    let arm = ArmInventory { assigned: 200, reporting: 200, confirmed: 198, failed: 2 };
    let ring = plan.ring.iter().map(|i| RingDevice { install: *i, confirmed_at: Some(at(0)), failed: false });
    Inventory { treatment: arm, control: arm, ring: ring.collect(), to_restore: 200, restored: restored.min(200) }
}

fn requests(plan: &PlanV1, ask: usize, who: u8) -> Vec<flywheel_experiment::planner::OperatorRequest> {
    let generation = plan.generation + 1;
    let by = ["ada", "bob", "eve", "kim"][usize::from(who)];
    let kind = match ask {
        0 => RequestKind::Approve { generation, change: Change::Start },
        1 => RequestKind::Approve { generation, change: Change::Advance },
        2 => RequestKind::Pause,
        3 => RequestKind::Halt,
        4 => RequestKind::Resume,
        5 => RequestKind::Promote { approved_by: None },
        6 => RequestKind::Promote { approved_by: Some("eve".into()) },
        _ => return Vec::new(),
    };
    vec![request("a", by, kind)]
}

fn check_step(
    policy: &RolloutPolicyV1,
    before: &PlanV1,
    after: &PlanV1,
    verdict: Option<V>,
    promoted: bool,
) -> Result<(), TestCaseError> {
    if after.generation == before.generation {
        prop_assert_eq!(before, after, "a plan is never edited");
        return Ok(());
    }
    prop_assert_eq!(after.generation, before.generation + 1);
    prop_assert!(before.state.can_become(after.state), "{} to {}", before.state, after.state);
    prop_assert!(ranges_widen(before, after));
    if after.step > before.step && before.step > 0 && !promoted {
        prop_assert_eq!(verdict, Some(V::Pass), "only PASS promotes by itself");
        prop_assert!(policy.automation != Automation::Observe);
    }
    if after.phases.len() == before.phases.len() {
        prop_assert_eq!((before.treatment, before.control), (after.treatment, after.control), "one ratio in a phase");
    }
    if verdict == Some(V::Fail) && policy.automation == Automation::Act && before.step > 0 && !promoted {
        let down = matches!(after.state, S::RollingBack | S::RolledBack | S::Paused | S::Holding | S::Superseded);
        prop_assert!(down || before.fail_override.is_some(), "{} after FAIL", after.state);
    }
    Ok(())
}

#[test]
fn no_device_changes_its_arm_while_arms_are_compared() {
    let policy = act();
    let mut plan = draft(&policy, Vec::new());
    let facts = DeviceFactsV1::default();
    let devices: Vec<InstallId> = (0..4000_u32)
        .map(|i| {
            let mut key = [7_u8; 32];
            key[..4].copy_from_slice(&i.to_le_bytes());
            InstallId::of_public_key(&key)
        })
        .collect();
    let mut arms: BTreeMap<InstallId, Arm> = BTreeMap::new();
    for hour in 0..20 {
        let r = report(&plan, V::Pass);
        plan = plan_next(&policy, &plan, &inventory(&plan, 0), Some(&r), at(hour * 25), &[]).unwrap().plan;
        let Some(rollout) = plan.assignment() else {
            continue;
        };
        let document = AssignmentV1 {
            v: 1,
            app: AppId::new("a").unwrap(),
            serial: plan.generation,
            issued_at: at(0),
            poll_s: 3600,
            jitter_pct: 10,
            default_bundle: Some(plan.default_bundle()),
            rollouts: vec![rollout],
            pins: BTreeMap::new(),
        };
        let compares = plan.phases.last().is_some_and(|p| p.compares());
        for d in &devices {
            let decision = document.decide(d, &facts);
            let Some((_, _, arm)) = decision.arm else {
                continue;
            };
            if compares {
                assert_eq!(*arms.entry(*d).or_insert(arm), arm);
            } else {
                assert_eq!((arm, decision.bundle), (Arm::Treatment, Some(plan.candidate_bundle)));
            }
        }
    }
    assert_eq!(plan.state, S::Complete);
    let treated = arms.values().filter(|a| **a == Arm::Treatment).count();
    assert_eq!(arms.len(), 4000);
    assert!((1850..2150).contains(&treated), "{treated}");
}
