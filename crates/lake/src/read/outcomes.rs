//! The derived table `outcomes`: one row per labelled interaction, written by a pipeline step exactly once per
//! `(step, sequence)`.

use crate::error::LakeError;
use crate::lake::Lake;
use chrono::{DateTime, Utc};
use flywheel_telemetry::Table;
use flywheel_telemetry::column::Micros;
use flywheel_telemetry::rows::OutcomeRow;
use flywheel_types::assign::Arm;
use flywheel_types::{AppId, Error, LabelKind, TrustClass};

/// One labelled interaction.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Receipt of the label.
    pub labelled_at: DateTime<Utc>,
    /// Receipt of the interaction.
    pub interaction_at: DateTime<Utc>,
    pub interaction: String,
    pub install: Option<String>,
    pub trust: TrustClass,
    pub template: Option<String>,
    pub bundle: Option<String>,
    pub device_class: Option<String>,
    pub locale: Option<String>,
    /// Rollout, phase and arm.
    pub assignment: Option<(String, u32, Arm)>,
    pub label: LabelKind,
    /// `refused` or `abstained`.
    pub detected: Option<LabelKind>,
}

impl Lake {
    /// Appends outcomes of `app` unless `(step, seq)` was appended before (then `false`). `seq` rises per step: use
    /// the Delta version the step read up to.
    ///
    /// # Errors
    /// When the table cannot be written; repeating the call is safe.
    pub async fn outcomes_append(&self, app: &AppId, step: &str, seq: u64, rows: &[Outcome]) -> Result<bool, Error> {
        let rows: Vec<OutcomeRow> = rows.iter().map(|o| row(app, o)).collect();
        let batch = OutcomeRow::encode(&rows).map_err(LakeError::from)?;
        let writer = format!("{step}/{app}");
        Ok(self.inner.table(Table::Outcomes).append_once(&writer, seq, &batch, &self.inner.buffers).await?)
    }
}

fn row(app: &AppId, o: &Outcome) -> OutcomeRow {
    let (labelled, interaction) = (Micros::from(o.labelled_at), Micros::from(o.interaction_at));
    let (rollout_id, phase, arm) = match &o.assignment {
        Some((r, p, a)) => (Some(r.clone()), i32::try_from(*p).ok(), Some(a.as_str().to_owned())),
        None => (None, None, None),
    };
    OutcomeRow {
        app: app.as_str().to_owned(),
        received_date: labelled.day(),
        received_at: labelled,
        interaction_date: interaction.day(),
        interaction_at: interaction,
        interaction_id: o.interaction.clone(),
        install_id: o.install.clone(),
        trust: o.trust.as_str().to_owned(),
        template_id: o.template.clone(),
        bundle: o.bundle.clone(),
        device_class: o.device_class.clone(),
        locale: o.locale.clone(),
        rollout_id,
        phase,
        arm,
        label: o.label.as_str().to_owned(),
        detected: o.detected.map(|d| d.as_str().to_owned()),
    }
}
