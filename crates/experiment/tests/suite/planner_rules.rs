//! The planner, rule by rule.

use crate::support::at;
use flywheel_experiment::gate::{GateReportV1, GateSpecV1, SrmReport, plain_word};
use flywheel_experiment::planner::{
    Action, ArmInventory, Change, InconclusivePolicy, Inventory, Next, OperatorRequest, PlanV1, RequestKind,
    RingDevice, RolloutDraft, RolloutPolicyV1, StepV1, plan_next,
};
use flywheel_types::{Approval, Automation, Digest, InstallId, RolloutId, RolloutState as S, Verdict as V};
use std::collections::BTreeMap;

pub fn act() -> RolloutPolicyV1 {
    RolloutPolicyV1 { automation: Automation::Act, approval: Approval::Auto, ..RolloutPolicyV1::default() }
}

pub fn install(n: u8) -> InstallId {
    InstallId::of_public_key(&[n; 32])
}

pub fn draft(policy: &RolloutPolicyV1, ring: Vec<InstallId>) -> PlanV1 {
    let d = RolloutDraft {
        rollout_id: RolloutId::new("r1").unwrap(),
        eligible: Vec::new(),
        ring,
        candidate_bundle: Digest::of(b"new"),
        control_bundle: Digest::of(b"old"),
        created_by: "ada".into(),
    };
    PlanV1::draft(d, policy, &GateSpecV1::default(), at(0)).unwrap()
}

/// A report for the plan's phase with one gate.
pub fn report(plan: &PlanV1, verdict: V) -> GateReportV1 {
    let gate = serde_json::json!({
        "name": "rejection_rate", "kind": "rejection", "required": true, "verdict": verdict, "word": "",
        "method": "asymptotic", "control_devices": 0, "treatment_devices": 0, "control_events": 0,
        "treatment_events": 0, "control_value": null, "treatment_value": null, "difference": null, "lower": null,
        "upper": null, "margin": null, "e_value": null, "p_value": null, "information_pct": null,
        "reason": "because", "failed_at": null
    });
    GateReportV1 {
        v: 1,
        spec: plan.gate_spec,
        now: at(0),
        phase: plan.phase,
        verdict,
        word: plain_word(verdict).into(),
        reason: "because".into(),
        gates: vec![serde_json::from_value(gate).unwrap()],
        phases: Vec::new(),
        srm: SrmReport::default(),
        exclusions: BTreeMap::new(),
        failed_at: None,
    }
}

pub fn request(id: &str, by: &str, kind: RequestKind) -> OperatorRequest {
    OperatorRequest { id: id.into(), by: by.into(), reason: "test".into(), kind }
}

fn busy() -> Inventory {
    let arm = ArmInventory { assigned: 200, reporting: 195, confirmed: 195, failed: 0 };
    Inventory { treatment: arm, control: arm, to_restore: 200, ..Inventory::default() }
}

fn step(policy: &RolloutPolicyV1, plan: &PlanV1, verdict: Option<V>, hour: i64, asks: &[OperatorRequest]) -> Next {
    let r = verdict.map(|v| report(plan, v));
    plan_next(policy, plan, &busy(), r.as_ref(), at(hour), asks).unwrap()
}

/// A plan in its first step.
fn canary(policy: &RolloutPolicyV1) -> PlanV1 {
    let mut plan = draft(policy, Vec::new());
    for _ in 0..4 {
        let generation = plan.generation + 1;
        let approve =
            ["bob", "eve"].map(|by| request(by, by, RequestKind::Approve { generation, change: Change::Start }));
        plan = step(policy, &plan, None, 0, &approve).plan;
    }
    assert_eq!(plan.state, S::Canary);
    plan
}

/// Both ranges only grow and never meet; when the treatment takes everything no control is left.
pub fn ranges_widen(before: &PlanV1, after: &PlanV1) -> bool {
    let everybody = after.treatment.width() == 1_000_000;
    let control = if everybody { after.control.width() == 0 } else { before.control.widens_to(after.control) };
    let apart = everybody || after.treatment.to <= after.control.from;
    before.treatment.widens_to(after.treatment) && control && apart
}

#[test]
fn an_acting_app_goes_from_draft_to_complete_and_ranges_only_widen() {
    let policy = act();
    let ring = vec![install(1), install(2)];
    let mut plan = draft(&policy, ring.clone());
    let mut inventory = busy();
    let mut seen = vec![plan.state];
    for tick in 0..40 {
        let hour = tick * 12;
        if tick >= 3 {
            let ok = |install: &InstallId| RingDevice { install: *install, confirmed_at: Some(at(30)), failed: false };
            inventory.ring = ring.iter().map(ok).collect();
        }
        let r = report(&plan, V::Pass);
        let next = plan_next(&policy, &plan, &inventory, Some(&r), at(hour), &[]).unwrap();
        if next.changed(&plan) {
            assert_eq!(next.plan.parent, Some(plan.digest().unwrap()));
            assert_eq!(next.plan.generation, plan.generation + 1);
            assert!(plan.state.can_become(next.plan.state));
            assert!(ranges_widen(&plan, &next.plan));
            seen.push(next.plan.state);
        }
        plan = next.plan;
    }
    assert_eq!(seen, [S::Draft, S::Signed, S::Ring, S::Canary, S::Ramping, S::Ramping, S::Complete]);
    assert_eq!(plan.default_bundle(), plan.candidate_bundle);
    assert_eq!(plan.assignment(), None, "the default bundle takes over");
    let phases: Vec<_> = plan.phases.iter().map(|p| (p.number, p.treatment_ppm, p.control_ppm)).collect();
    assert_eq!(phases, [(1, 100_000, 100_000), (2, 500_000, 500_000), (3, 1_000_000, 0)]);
    assert_eq!(
        plan.passed.iter().map(|p| p.by.as_str()).collect::<Vec<_>>(),
        ["ring", "gate", "gate", "confirmations"]
    );
    assert_eq!(plan.signed_at, Some(at(0)));
}

#[test]
fn verdicts_map_to_the_table() {
    let policy = act();
    let plan = canary(&policy);
    let a = plan.assignment().unwrap();
    assert_eq!((a.treatment.to, a.control.from, a.control.to, a.phase), (100_000, 500_000, 600_000, 1));
    for (verdict, state) in [
        (V::Fail, S::RollingBack),
        (V::Invalid, S::Holding),
        (V::Pass, S::Ramping),
        (V::Warn, S::Canary),
        (V::Continue, S::Canary),
        (V::Inconclusive, S::Holding),
    ] {
        let next = step(&policy, &plan, Some(verdict), 48, &[]);
        assert_eq!(next.state, state, "{verdict}");
        assert_eq!(next.plan.state, next.state);
    }
    assert_eq!(step(&policy, &plan, None, 48, &[]).state, S::Canary, "no report is not a PASS");
    assert_eq!(step(&policy, &plan, Some(V::Pass), 23, &[]).state, S::Canary, "a step lasts at least 24 hours");
}

#[test]
fn a_report_of_another_phase_or_spec_does_not_promote() {
    let policy = act();
    let plan = canary(&policy);
    let mut r = report(&plan, V::Pass);
    r.phase = 7;
    let next = plan_next(&policy, &plan, &busy(), Some(&r), at(48), &[]).unwrap();
    assert_eq!(next.state, S::Canary);
    let mut r = report(&plan, V::Pass);
    r.spec = Digest::of(b"other");
    assert_eq!(plan_next(&policy, &plan, &busy(), Some(&r), at(48), &[]).unwrap().state, S::Canary);
    let other = RolloutPolicyV1 { ring_bake_hours: 1, ..act() };
    assert!(plan_next(&other, &plan, &busy(), None, at(48), &[]).is_err());
}

#[test]
fn a_rollback_is_the_next_plan_with_the_older_bundle() {
    let policy = act();
    let plan = canary(&policy);
    let next = step(&policy, &plan, Some(V::Fail), 48, &[]);
    let a = next.plan.assignment().unwrap();
    assert_eq!(a.treatment_bundle, plan.control_bundle);
    assert_eq!((a.treatment, a.control), (plan.treatment, plan.control));
    assert_eq!(a.phase, 2);
    assert!(next.actions.contains(&Action::PublishAssignment));
    assert!(matches!(&next.actions[1], Action::Alert { urgent: true, text } if text.contains("because")));
    let mut inventory = busy();
    inventory.restored = 199;
    let wait = plan_next(&policy, &next.plan, &inventory, None, at(50), &[]).unwrap();
    assert_eq!((wait.state, wait.reason.contains("199 of 200")), (S::RollingBack, true));
    inventory.restored = 200;
    let done = plan_next(&policy, &next.plan, &inventory, None, at(50), &[]).unwrap();
    assert_eq!(done.state, S::RolledBack);
    assert_eq!(done.plan.default_bundle(), plan.control_bundle);
    assert_eq!(done.plan.assignment(), None);
}

#[test]
fn not_reporting_devices_and_the_exposure_cap_stop_a_step() {
    let policy = act();
    let plan = canary(&policy);
    let mut inventory = busy();
    inventory.treatment.reporting = 150;
    let r = report(&plan, V::Pass);
    let next = plan_next(&policy, &plan, &inventory, Some(&r), at(48), &[]).unwrap();
    assert_eq!((next.state, next.reason.contains("not reporting")), (S::Canary, true), "{}", next.reason);
    let capped = RolloutPolicyV1 { exposure_cap_ppm: 100_000, ..act() };
    let plan = canary(&capped);
    let next = step(&capped, &plan, Some(V::Pass), 48, &[]);
    assert_eq!((next.state, next.reason.contains("exposure cap")), (S::Holding, true));
    let go = [request("1", "bob", RequestKind::Promote { approved_by: None })];
    assert_eq!(step(&capped, &next.plan, Some(V::Pass), 49, &go).state, S::Ramping);
}

#[test]
fn halt_assigns_nobody_new_and_resume_reopens() {
    let policy = act();
    let plan = canary(&policy);
    let halted = step(&policy, &plan, Some(V::Continue), 30, &[request("1", "bob", RequestKind::Halt)]);
    assert_eq!(halted.state, S::Paused);
    assert!(halted.plan.assignment().unwrap().intake_closed);
    assert!(halted.actions.contains(&Action::PublishAssignment));
    assert_eq!(step(&policy, &halted.plan, Some(V::Pass), 60, &[]).state, S::Paused, "paused means paused");
    let back = step(&policy, &halted.plan, Some(V::Pass), 60, &[request("2", "bob", RequestKind::Resume)]);
    assert_eq!(back.state, S::Canary);
    assert!(!back.plan.assignment().unwrap().intake_closed);
    let paused = step(&policy, &plan, None, 30, &[request("3", "bob", RequestKind::Pause)]);
    assert!(!paused.plan.assignment().unwrap().intake_closed);
    assert_eq!(step(&policy, &paused.plan, Some(V::Fail), 60, &[]).state, S::RollingBack, "a FAIL acts while paused");
}

#[test]
fn rollback_outranks_everything_in_the_same_call() {
    let policy = act();
    let plan = canary(&policy);
    let asks = [
        request("1", "bob", RequestKind::Promote { approved_by: None }),
        request("2", "bob", RequestKind::Halt),
        request("3", "eve", RequestKind::Rollback),
    ];
    let next = step(&policy, &plan, Some(V::Pass), 48, &asks);
    assert_eq!(next.state, S::RollingBack);
    let accepted: Vec<_> = next.answers.iter().map(|a| (a.request.as_str(), a.accepted)).collect();
    assert_eq!(accepted, [("3", true), ("1", false), ("2", false)]);
    let fail = step(&policy, &plan, Some(V::Fail), 48, &asks[..2]);
    assert_eq!(fail.state, S::RollingBack, "also the gate's own rollback");
}

#[test]
fn overriding_a_fail_needs_somebody_else_and_covers_only_that_gate() {
    let policy = RolloutPolicyV1 { automation: Automation::Recommend, ..RolloutPolicyV1::default() };
    let plan = canary(&policy);
    let held = step(&policy, &plan, Some(V::Fail), 48, &[]);
    assert_eq!(held.state, S::Holding, "recommend stops and asks");
    let promote = |by: &str, approver: Option<&str>| {
        [request("p", by, RequestKind::Promote { approved_by: approver.map(str::to_owned) })]
    };
    for (who, approver) in [("bob", None), ("bob", Some("bob")), ("bob", Some(" "))] {
        let next = step(&policy, &held.plan, Some(V::Fail), 49, &promote(who, approver));
        assert_eq!(next.state, S::Holding);
        assert!(!next.answers[0].accepted && next.answers[0].text.contains("other than bob"), "{:?}", next.answers);
        assert_eq!(next.proposal.unwrap().change, Change::RollBack);
    }
    let next = step(&policy, &held.plan, Some(V::Fail), 49, &promote("bob", Some("eve")));
    assert_eq!(next.state, S::Ramping);
    let o = next.plan.fail_override.clone().unwrap();
    assert_eq!((o.by.as_str(), o.approved_by.as_str(), o.gates), ("bob", "eve", vec!["rejection_rate".to_owned()]));
    let after = step(&policy, &next.plan, Some(V::Fail), 80, &[]);
    assert_eq!(after.state, S::Ramping, "the overridden gate neither rolls back nor promotes");
    let mut r = report(&next.plan, V::Fail);
    let mut other = r.gates[0].clone();
    other.name = "failures".into();
    r.gates.push(other);
    let worse = plan_next(&policy, &next.plan, &busy(), Some(&r), at(80), &[]).unwrap();
    assert_eq!(worse.state, S::Holding, "a new FAIL is in force again");
}

#[test]
fn recommend_needs_approval_of_exactly_this_change() {
    let policy = RolloutPolicyV1::default();
    let plan = canary(&policy);
    let next = step(&policy, &plan, Some(V::Pass), 48, &[]);
    assert!(!next.changed(&plan));
    let p = next.proposal.unwrap();
    assert_eq!((p.generation, p.change, p.approvals_missing), (plan.generation + 1, Change::Advance, Some(1)));
    let approve = |generation, change| [request("a", "bob", RequestKind::Approve { generation, change })];
    let stale = step(&policy, &plan, Some(V::Pass), 48, &approve(p.generation - 1, Change::Advance));
    assert!(!stale.changed(&plan) && !stale.answers[0].accepted);
    let wrong = step(&policy, &plan, Some(V::Pass), 48, &approve(p.generation, Change::RollBack));
    assert!(!wrong.changed(&plan) && wrong.answers.is_empty());
    let go = step(&policy, &plan, Some(V::Pass), 48, &approve(p.generation, Change::Advance));
    assert_eq!((go.state, go.answers[0].accepted), (S::Ramping, true));
    let not_passed = step(&policy, &plan, Some(V::Continue), 48, &approve(p.generation, Change::Advance));
    assert!(!not_passed.changed(&plan), "an approval does not replace a PASS");
    let fail = step(&policy, &plan, Some(V::Fail), 48, &approve(p.generation, Change::RollBack));
    assert_eq!(fail.state, S::RollingBack);
}

#[test]
fn observe_never_moves_by_itself_but_obeys() {
    let policy = RolloutPolicyV1 { automation: Automation::Observe, ..RolloutPolicyV1::default() };
    let plan = canary(&policy);
    for v in V::ALL {
        let generation = plan.generation + 1;
        let asks = [Change::Advance, Change::RollBack]
            .map(|change| request(change.as_str(), "bob", RequestKind::Approve { generation, change }));
        assert!(!step(&policy, &plan, Some(*v), 48, &asks).changed(&plan), "{v}");
    }
    let seen = step(&policy, &plan, Some(V::Fail), 48, &[]).proposal.unwrap();
    assert_eq!((seen.change, seen.approvals_missing), (Change::RollBack, None));
    let go = [request("1", "bob", RequestKind::Promote { approved_by: None })];
    assert_eq!(step(&policy, &plan, Some(V::Continue), 48, &go).state, S::Ramping);
    let back = [request("1", "bob", RequestKind::Rollback)];
    assert_eq!(step(&policy, &plan, Some(V::Continue), 48, &back).state, S::RollingBack);
}

#[test]
fn two_people_start_and_the_creator_is_not_one_of_them() {
    let policy = RolloutPolicyV1 { approval: Approval::Two, ..act() };
    let plan = draft(&policy, Vec::new());
    let plan = step(&policy, &plan, None, 0, &[]).plan;
    assert_eq!(plan.state, S::AwaitingApproval);
    let ok =
        |who: &str| request(who, who, RequestKind::Approve { generation: plan.generation + 1, change: Change::Start });
    let alone = step(&policy, &plan, None, 1, &[ok("bob"), ok("ada")]);
    assert!(!alone.changed(&plan));
    assert_eq!(alone.proposal.unwrap().approvals_missing, Some(1));
    assert_eq!(alone.answers.len(), 1, "only the creator's approval is refused, bob's waits");
    let twice = OperatorRequest { id: "again".into(), ..ok("bob") };
    assert!(!step(&policy, &plan, None, 1, &[ok("bob"), twice]).changed(&plan));
    assert_eq!(step(&policy, &plan, None, 1, &[ok("bob"), ok("eve")]).state, S::Signed);
    let withdrawn = step(&policy, &plan, None, 1, &[request("w", "ada", RequestKind::Rollback)]);
    assert_eq!(withdrawn.state, S::Superseded);
}

#[test]
fn a_ring_waits_for_all_devices_and_stops_on_a_failure() {
    let policy = RolloutPolicyV1 { approval: Approval::One, ..act() };
    let mut plan = draft(&policy, vec![install(1), install(2)]);
    plan.state = S::Ring;
    let device = |n, hour, failed| RingDevice { install: install(n), confirmed_at: Some(at(hour)), failed };
    let go = |ring: Vec<RingDevice>, hour, asks: &[OperatorRequest]| {
        plan_next(&policy, &plan, &Inventory { ring, ..busy() }, None, at(hour), asks).unwrap()
    };
    assert!(go(vec![device(1, 1, false)], 90, &[]).reason.contains("1 of 2"));
    assert!(go(vec![device(1, 1, false), device(9, 1, false)], 90, &[]).reason.contains("1 of 2"), "a stranger");
    let both = vec![device(1, 1, false), device(2, 10, false)];
    assert!(go(both.clone(), 33, &[]).reason.contains("bake"));
    let asked = go(both.clone(), 34, &[]);
    assert_eq!(asked.proposal.unwrap().change, Change::Advance, "manual promotion unless approval is auto");
    let promote = [request("1", "bob", RequestKind::Promote { approved_by: None })];
    assert_eq!(go(both, 12, &promote).state, S::Canary);
    let broken = vec![device(1, 1, false), device(2, 10, true)];
    assert_eq!(go(broken.clone(), 34, &[]).state, S::Holding);
    assert!(!go(broken, 34, &promote).answers[0].accepted);
}

#[test]
fn the_last_step_completes_on_confirmations_and_rolls_back_on_failures() {
    let policy = act();
    let mut plan = canary(&policy);
    for hour in [48, 96] {
        plan = step(&policy, &plan, Some(V::Pass), hour, &[]).plan;
    }
    assert_eq!((plan.step, plan.treatment.to), (3, 1_000_000));
    assert_eq!(plan.assignment().unwrap().control.width(), 0, "everybody is in the treatment");
    let mut inventory = busy();
    inventory.treatment = ArmInventory { assigned: 1000, reporting: 900, confirmed: 850, failed: 3 };
    let go = |inventory: &Inventory, hour| plan_next(&policy, &plan, inventory, None, at(hour), &[]).unwrap();
    assert!(go(&inventory, 200).reason.contains("850 of 900"));
    inventory.treatment.confirmed = 860;
    assert_eq!(go(&inventory, 97).state, S::Ramping, "not before the minimum time");
    let done = go(&inventory, 200);
    assert_eq!(done.state, S::Complete);
    assert!(done.actions.contains(&Action::SetDefaultBundle { bundle: plan.candidate_bundle }));
    inventory.treatment.failed = 200;
    let bad = go(&inventory, 200);
    assert_eq!(bad.state, S::RollingBack, "{}", bad.reason);
    let late = plan_next(&policy, &done.plan, &inventory, None, at(300), &[request("1", "bob", RequestKind::Rollback)]);
    let late = late.unwrap();
    assert_eq!(late.state, S::RollingBack);
    assert!(late.actions.contains(&Action::SetDefaultBundle { bundle: plan.control_bundle }));
}

#[test]
fn inconclusive_follows_the_policy() {
    let back = RolloutPolicyV1 { inconclusive: InconclusivePolicy::RollBack, ..act() };
    assert_eq!(step(&back, &canary(&back), Some(V::Inconclusive), 400, &[]).state, S::RollingBack);
    let ask = RolloutPolicyV1 { inconclusive: InconclusivePolicy::PromoteWithApproval, ..act() };
    let held = step(&ask, &canary(&ask), Some(V::Inconclusive), 400, &[]);
    assert_eq!(held.state, S::Holding);
    let asked = step(&ask, &held.plan, Some(V::Inconclusive), 401, &[]);
    let p = asked.proposal.unwrap();
    assert_eq!((p.change, p.approvals_missing), (Change::Advance, Some(1)), "also an acting app asks here");
    let yes = [request("1", "bob", RequestKind::Approve { generation: p.generation, change: p.change })];
    assert_eq!(step(&ask, &held.plan, Some(V::Inconclusive), 401, &yes).state, S::Ramping);
}

#[test]
fn policies_are_checked_and_strict() {
    let bad = |steps: Vec<StepV1>| RolloutPolicyV1 { steps, ..act() }.digest().unwrap_err().to_string();
    let s = |treatment_ppm, control_ppm| StepV1 { treatment_ppm, control_ppm };
    assert!(bad(vec![]).contains("at least"));
    assert!(bad(vec![s(100_000, 100_000)]).contains("last step"));
    assert!(bad(vec![s(600_000, 100_000), s(1_000_000, 0)]).contains("500,000"));
    assert!(bad(vec![s(200_000, 200_000), s(100_000, 300_000), s(1_000_000, 0)]).contains("must grow"));
    assert!(serde_json::from_str::<RolloutPolicyV1>(r#"{"automatoin":"act"}"#).is_err());
    let golden: RolloutPolicyV1 = serde_json::from_str(include_str!("../data/rollout_policy_v1.json")).unwrap();
    assert_eq!(golden, RolloutPolicyV1::default());
    assert_eq!((golden.automation, golden.approval), (Automation::Recommend, Approval::One));
    let same = RolloutDraft { candidate_bundle: Digest::of(b"x"), control_bundle: Digest::of(b"x"), ..draft_input() };
    assert!(PlanV1::draft(same, &act(), &GateSpecV1::default(), at(0)).is_err());
}

fn draft_input() -> RolloutDraft {
    RolloutDraft {
        rollout_id: RolloutId::new("r").unwrap(),
        eligible: Vec::new(),
        ring: Vec::new(),
        candidate_bundle: Digest::of(b"a"),
        control_bundle: Digest::of(b"b"),
        created_by: "ada".into(),
    }
}
