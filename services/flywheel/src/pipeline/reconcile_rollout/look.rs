//! One look at what the fleet did: read once per run, judged once, stored once. Judged again only when the plan got other
//! phases meanwhile, because then other devices count.

use super::{Frozen, evidence, invalid};
use crate::server::Server;
use chrono::{DateTime, Utc};
use flywheel_experiment::gate::{GateReportV1, evaluate};
use flywheel_experiment::planner::PlanV1;
use flywheel_experiment::window::{PhaseV1, close_windows};
use flywheel_store::rollouts::VerdictRow;
use flywheel_types::rows::DeviceHistory;
use flywheel_types::{AppId, Error, RolloutId};

/// The data of a run and the report on it.
pub struct Look {
    /// Business time of the run: every round of it plans at this time.
    pub now: DateTime<Utc>,
    pub histories: Vec<DeviceHistory>,
    /// What the report was made for: signing time and phases of the plan.
    made_for: Option<(DateTime<Utc>, Vec<PhaseV1>)>,
    /// The newest report; before the first one of this run that of an earlier run.
    report: Option<GateReportV1>,
    stored: bool,
}

impl Look {
    /// Reads histories and the newest stored report. What is received while the run plans counts in the next one.
    ///
    /// # Errors
    /// Of the lake and the database.
    pub async fn load(server: &Server, app: &AppId, rollout: &RolloutId) -> Result<Self, Error> {
        Ok(Self {
            now: server.now(),
            histories: server.lake.device_histories(app, rollout, None).await?,
            made_for: None,
            report: evidence::last_report(server, app, rollout).await?,
            stored: false,
        })
    }

    /// The report for `plan`; `None` while nothing is compared.
    ///
    /// # Errors
    /// `Invalid` for a gate spec or phases that cannot be judged.
    pub fn report(&mut self, frozen: &Frozen, plan: &PlanV1) -> Result<Option<&GateReportV1>, Error> {
        let (Some(signed_at), false) = (plan.signed_at, plan.phases.is_empty()) else { return Ok(None) };
        let current = self.made_for.as_ref().is_some_and(|(at, phases)| *at == signed_at && *phases == plan.phases);
        if !current {
            let windows = close_windows(&self.histories, &frozen.spec, &plan.phases, signed_at, &[], self.now);
            let report =
                evaluate(&frozen.spec, &plan.phases, &windows.map_err(invalid)?, self.report.as_ref(), self.now);
            self.report = Some(report.map_err(invalid)?);
            self.made_for = Some((signed_at, plan.phases.clone()));
        }
        Ok(self.report.as_ref())
    }

    /// The verdict to store with a plan of `generation`; `None` when this look has none or it is stored already: a look
    /// is written down once, as the first plan of the run saw it.
    ///
    /// # Errors
    /// `Internal` when the report cannot be written as JSON.
    pub fn verdict(&self, rollout: &RolloutId, generation: u64) -> Result<Option<VerdictRow>, Error> {
        let (Some(report), Some(_), false) = (&self.report, &self.made_for, self.stored) else { return Ok(None) };
        Ok(Some(VerdictRow {
            rollout_id: rollout.clone(),
            look: self.now.timestamp(),
            gate: VerdictRow::WHOLE.into(),
            generation: i64::try_from(generation).unwrap_or(i64::MAX),
            verdict: report.verdict,
            numbers: serde_json::to_value(report).map_err(Error::internal)?,
            at: self.now,
        }))
    }

    /// The transaction with [`Self::verdict`] is committed.
    pub fn verdict_stored(&mut self) {
        self.stored |= self.made_for.is_some();
    }
}
