//! Reconciles one rollout: reads what the fleet did, asks the pure planner for the next plan, stores plan, verdicts
//! and audit entry in one transaction, and makes the published assignment match. Runs again and again until nothing
//! changes; a rollback is just another plan.

mod evidence;
mod look;
mod requests;

use super::{app, notify};
use crate::delivery::Publication;
use crate::server::Server;
use flywheel_experiment::gate::{GateReportV1, GateSpecV1};
use flywheel_experiment::planner::{Next, PlanV1, RolloutDraft, RolloutPolicyV1, plan_next};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::apps::AppSettings;
use flywheel_store::jobs::NewJob;
use flywheel_store::releases::ReleaseState;
use flywheel_store::rollouts::{NewRollout, RolloutRow, VerdictRow};
use flywheel_types::assign::Predicate;
use flywheel_types::{AppId, CandidateId, Digest, Error, InstallId, RolloutId, RolloutState};
use serde_json::{Value, json};

pub const KIND: &str = "reconcile_rollout";
/// A plan settles in a few rounds; more means that the planner and the world do not agree.
const MAX_ROUNDS: usize = 8;

/// Queues a reconciliation.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, rollout: &RolloutId) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "rollout": rollout }))
        .dedup(format!("{app}:{rollout}"))
        .concurrency(format!("rollout:{app}"), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// What a person or the pipeline asks for when a rollout starts.
pub struct StartRequest {
    pub bundle: Digest,
    pub ring: Option<Vec<InstallId>>,
    pub eligible: Vec<Predicate>,
    pub policy: Option<RolloutPolicyV1>,
    pub created_by: String,
}

/// What is frozen with a rollout; stored beside it and named by digest in every plan.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Frozen {
    pub v: u8,
    pub policy: RolloutPolicyV1,
    pub spec: GateSpecV1,
}

/// Drafts a rollout: freezes policy and gate spec from the incumbent's telemetry. The first bundle of an app has
/// nothing to be compared with: it becomes the default at once.
///
/// # Errors
/// `NotFound` or `Conflict` when the bundle is not an approved release or another rollout is open.
pub async fn start(server: &Server, id: &AppId, request: StartRequest) -> Result<RolloutRow, Error> {
    let release = server
        .store
        .release_get(id, request.bundle)
        .await?
        .filter(|r| r.state == ReleaseState::Approved)
        .ok_or_else(|| {
            Error::not_found("release_not_approved", format!("bundle {} is not an approved release", request.bundle))
        })?;
    let open = server.store.rollout_list(id, true, 10).await?;
    if let Some(other) = open.first() {
        return Err(Error::conflict(
            "rollout_open",
            format!("rollout `{}` is still open", other.rollout_id),
            "finish it or roll it back first",
        ));
    }
    let settings = app(server, id).await?.settings;
    let policy = policy(&settings, request.policy.clone())?;
    let control = server.store.release_last_complete(id).await?.map(|r| r.manifest);
    let earlier = server.store.rollout_list(id, false, 1000).await?;
    let rollout_id = rollout_id(request.bundle, release.candidate_id.as_ref(), &earlier)?;
    let Some(control) = control else {
        return first_bundle(server, id, &rollout_id, request, &policy, release.candidate_id).await;
    };
    let spec = evidence::freeze_spec(server, id, control, &settings, &policy).await?;
    let draft = RolloutDraft {
        rollout_id: rollout_id.clone(),
        eligible: request.eligible,
        ring: request.ring.unwrap_or(settings.ring),
        candidate_bundle: request.bundle,
        control_bundle: control,
        created_by: request.created_by.clone(),
    };
    let plan = PlanV1::draft(draft, &policy, &spec, server.now()).map_err(invalid)?;
    let frozen = Frozen { v: 1, policy, spec };
    let new = NewRollout {
        rollout_id: rollout_id.clone(),
        candidate_id: release.candidate_id,
        treatment: request.bundle,
        control: Some(control),
        policy: serde_json::to_value(&frozen).map_err(Error::internal)?,
        created_by: request.created_by.clone(),
    };
    let mut tx = server.begin().await?;
    tx.rollout_create(id, &new).await?;
    append(&mut tx, id, &plan, 0).await?;
    enqueue(&mut tx, id, &rollout_id).await?;
    let detail =
        json!({ "bundle": request.bundle, "control": control, "gate_spec": plan.gate_spec, "policy": plan.policy });
    tx.audit_append(id, &request.created_by, "rollout.create", rollout_id.as_str(), &detail).await?;
    tx.commit().await?;
    row(server, id, &rollout_id).await
}

/// Nothing to compare with: default bundle, complete.
async fn first_bundle(
    server: &Server,
    id: &AppId,
    rollout_id: &RolloutId,
    request: StartRequest,
    policy: &RolloutPolicyV1,
    candidate_id: Option<CandidateId>,
) -> Result<RolloutRow, Error> {
    let new = NewRollout {
        rollout_id: rollout_id.clone(),
        candidate_id,
        treatment: request.bundle,
        control: None,
        policy: serde_json::to_value(policy).map_err(Error::internal)?,
        created_by: request.created_by.clone(),
    };
    publish_assignment(server, id, Some(request.bundle), None).await?;
    let why = "first bundle of the app: nothing to compare with";
    let mut tx = server.begin().await?;
    tx.rollout_create(id, &new).await?;
    let path = [RolloutState::Draft, RolloutState::Signed, RolloutState::Canary, RolloutState::Complete];
    for step in path.windows(2) {
        tx.rollout_state_set(id, rollout_id, step[0], step[1], why).await?;
    }
    tx.release_complete_set(id, request.bundle).await?;
    let detail = json!({ "bundle": request.bundle, "reason": why });
    tx.audit_append(id, &request.created_by, "rollout.complete", rollout_id.as_str(), &detail).await?;
    tx.commit().await?;
    row(server, id, rollout_id).await
}

fn policy(settings: &AppSettings, given: Option<RolloutPolicyV1>) -> Result<RolloutPolicyV1, Error> {
    let mut policy = match (given, settings.extra.get("rollout_policy")) {
        (Some(p), _) => p,
        (None, Some(v)) => serde_json::from_value(v.clone()).map_err(|e| {
            Error::invalid("bad_rollout_policy", e.to_string(), "correct `rollout_policy` in the app's settings")
        })?,
        (None, None) => RolloutPolicyV1::default(),
    };
    policy.automation = settings.automation;
    policy.approval = settings.approval;
    policy.check().map_err(invalid)?;
    Ok(policy)
}

fn invalid(e: flywheel_experiment::ExperimentError) -> Error {
    Error::invalid("rollout_refused", e.to_string(), "correct the policy or the request")
}

/// A derived id: name and number of this attempt, so that a second try of the same model shuffles the fleet anew.
/// Names the candidate, so that two servers that do the same with the same model shuffle the fleet in the same way: the
/// digest of a bundle also covers what the evaluation measured, which is never twice the same.
fn rollout_id(bundle: Digest, candidate: Option<&CandidateId>, earlier: &[RolloutRow]) -> Result<RolloutId, Error> {
    // a candidate can be published again as another bundle: what the id names is what is counted
    let same = |r: &&RolloutRow| match candidate {
        Some(c) => r.candidate_id.as_ref() == Some(c),
        None => r.candidate_id.is_none() && r.treatment == bundle,
    };
    let before = earlier.iter().filter(same).count();
    let hex = bundle.to_hex();
    let name = candidate.map_or(&hex[..12], |c| c.as_str().trim_start_matches("c-"));
    RolloutId::new(format!("r-{name}-{}", before + 1)).map_err(Error::internal)
}

async fn row(server: &Server, id: &AppId, rollout: &RolloutId) -> Result<RolloutRow, Error> {
    let found = server.store.rollout_get(id, rollout).await?;
    found.ok_or_else(|| Error::not_found("rollout_not_found", format!("there is no rollout `{rollout}`")))
}

#[derive(serde::Deserialize)]
struct Payload {
    rollout: RolloutId,
}

/// The step.
///
/// # Errors
/// Of the lake, the database and the publication.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, rollout) = (ctx.app(), super::payload::<Payload>(ctx)?.rollout);
    let (mut said, mut published) = (Vec::new(), false);
    // load: what the fleet did is read once, the plan and the requests in every round
    let mut look = look::Look::load(server, id, &rollout).await?;
    let mut fleet = None;
    for _ in 0..MAX_ROUNDS {
        let current = row(server, id, &rollout).await?;
        let Some((frozen, plan)) = load_plan(server, id, &current).await? else { break };
        if current.state.is_final() {
            break;
        }
        let fleet = match &mut fleet {
            Some(f) => f,
            none => none.insert(evidence::fleet(server, id, plan.candidate_bundle).await?),
        };
        let asked = requests::open(server, id, &plan).await?;
        // decide
        let inventory = evidence::inventory(&plan, &look.histories, fleet);
        let now = look.now;
        let report = look.report(&frozen, &plan)?.cloned();
        let next =
            plan_next(&frozen.policy, &plan, &inventory, report.as_ref(), now, &asked.planner).map_err(invalid)?;
        said.push(next.reason.clone());
        // commit, then do: publishing is idempotent and repeated by the next run after a crash
        let verdict = look.verdict(&rollout, next.plan.generation)?;
        commit(server, ctx, &plan, &next, report.as_ref(), verdict.as_ref(), &asked).await?;
        look.verdict_stored();
        if !next.changed(&plan) {
            break;
        }
        repair_assignment(server, id).await?;
        published = true;
    }
    if !published {
        repair_assignment(server, id).await?;
    }
    Ok(json!({ "rollout": rollout, "said": said }))
}

/// Frozen policy and newest plan; `None` for the first bundle, which has no plan.
pub async fn load_plan(server: &Server, id: &AppId, row: &RolloutRow) -> Result<Option<(Frozen, PlanV1)>, Error> {
    let Some(stored) = server.store.rollout_plan_latest(id, &row.rollout_id).await? else { return Ok(None) };
    let frozen = serde_json::from_value(row.policy.clone()).map_err(Error::internal)?;
    let plan = serde_json::from_value(stored.plan).map_err(Error::internal)?;
    Ok(Some((frozen, plan)))
}

/// One transaction: plan, state, verdicts, answers, audit, mail.
async fn commit(
    server: &Server,
    ctx: &JobContext,
    before: &PlanV1,
    next: &Next,
    report: Option<&GateReportV1>,
    verdict: Option<&VerdictRow>,
    asked: &requests::Asked,
) -> Result<(), Error> {
    let (id, rollout) = (ctx.app(), &before.rollout_id);
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    if let Some(verdict) = verdict {
        tx.rollout_verdict_append(id, verdict).await?;
    }
    for answer in &next.answers {
        for request in asked.stored(&answer.request) {
            tx.rollout_request_decide(id, request, answer.accepted, &answer.text).await?;
        }
    }
    // a question to approvers comes with an unchanged plan; stable keys keep mails single
    notify::enqueue_rollout(&mut tx, server, id, before, next, report).await?;
    if next.changed(before) {
        append(&mut tx, id, &next.plan, i64::try_from(before.generation).unwrap_or(i64::MAX)).await?;
        if next.plan.state != before.state {
            tx.rollout_state_set(id, rollout, before.state, next.plan.state, &next.reason).await?;
            server.metrics.add("flywheel_rollout_transitions_total", &[("state", next.plan.state.as_str())], 1);
        }
        if next.plan.state == RolloutState::Complete {
            tx.release_complete_set(id, next.plan.candidate_bundle).await?;
        }
        let detail = audit_detail(before, next, report);
        tx.audit_append(id, "controller", "rollout.plan", rollout.as_str(), &detail).await?;
    }
    tx.commit().await?;
    Ok(())
}

fn audit_detail(before: &PlanV1, next: &Next, report: Option<&GateReportV1>) -> Value {
    let gates = report.map(|r| {
        r.gates
            .iter()
            .map(|g| {
                json!({ "gate": g.name, "verdict": g.verdict, "control": g.control_value, "treatment": g.treatment_value,
                    "lower": g.lower, "upper": g.upper, "margin": g.margin,
                    "devices": [g.control_devices, g.treatment_devices] })
            })
            .collect::<Vec<_>>()
    });
    json!({
        "from": before.state, "to": next.plan.state, "generation": next.plan.generation, "step": next.plan.step,
        "treatment_ppm": next.plan.treatment.width(), "control_ppm": next.plan.control.width(),
        "reason": next.reason, "verdict": report.map(|r| r.verdict), "gates": gates,
    })
}

async fn append(tx: &mut Tx, id: &AppId, plan: &PlanV1, parent: i64) -> Result<(), Error> {
    let value = serde_json::to_value(plan).map_err(Error::internal)?;
    tx.rollout_plan_append(id, &plan.rollout_id, parent, &value).await?;
    Ok(())
}

/// Makes the published assignment match the stored plans: the whole state, no hints, so that the path after a crash
/// is the path of every day.
///
/// # Errors
/// Of the database and the publication.
pub async fn repair_assignment(server: &Server, id: &AppId) -> Result<(), Error> {
    let mut default = server.store.release_last_complete(id).await?.map(|r| r.manifest);
    let mut entries = Vec::new();
    for row in server.store.rollout_list(id, true, 100).await? {
        if let Some((_, plan)) = load_plan(server, id, &row).await? {
            entries.extend(plan.assignment());
            default = default.or(row.control);
        }
    }
    publish_assignment(server, id, default, Some(entries)).await
}

async fn publish_assignment(
    server: &Server,
    id: &AppId,
    default_bundle: Option<Digest>,
    rollouts: Option<Vec<flywheel_types::assign::RolloutAssignmentV1>>,
) -> Result<(), Error> {
    let now = server.now();
    let published = server.delivery.state(id)?;
    let Some(old) = published.assignment() else { return Err(Error::internal("nothing is published")) };
    let mut next = old.clone();
    next.default_bundle = default_bundle;
    if let Some(rollouts) = rollouts {
        next.rollouts = rollouts;
    }
    let stale = !published.due(server.delivery.expiries(), now).is_empty();
    if next == *old && !stale {
        return Ok(());
    }
    let assignment = (next != *old).then(|| {
        next.serial += 1;
        next.issued_at = now;
        next
    });
    server.publish(id, Publication { assignment, ..Publication::default() }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;

    fn earlier(candidate: Option<&CandidateId>, bundle: Digest) -> RolloutRow {
        let at = DateTime::UNIX_EPOCH;
        RolloutRow {
            app_id: AppId::new("shop").unwrap(),
            rollout_id: RolloutId::new("r-x-1").unwrap(),
            candidate_id: candidate.cloned(),
            treatment: bundle,
            control: None,
            state: RolloutState::Complete,
            generation: 1,
            policy: Value::Null,
            reason: None,
            created_by: "test".into(),
            created_at: at,
            state_since: at,
        }
    }

    #[test]
    fn the_attempts_of_a_candidate_are_counted_over_its_bundles() {
        let (one, other) = (CandidateId::new("c-one").unwrap(), CandidateId::new("c-other").unwrap());
        let (first, second) = (Digest::of(b"first"), Digest::of(b"second"));
        let rows = [earlier(Some(&one), first), earlier(Some(&other), second), earlier(None, second)];
        let id = |bundle, candidate: Option<&CandidateId>| rollout_id(bundle, candidate, &rows).unwrap().to_string();
        assert_eq!(id(second, Some(&one)), "r-one-2", "published again as another bundle");
        assert_eq!(id(first, Some(&CandidateId::new("c-new").unwrap())), "r-new-1");
        assert_eq!(
            id(second, None),
            format!("r-{}-2", &second.to_hex()[..12]),
            "without a candidate the bundle counts"
        );
        assert_eq!(id(first, None), format!("r-{}-1", &first.to_hex()[..12]));
    }
}
