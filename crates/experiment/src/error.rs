//! What can be wrong with the input of this crate. Too little data is never an error: it is a verdict.

use flywheel_types::Error;

/// Rejected input: a setting out of range, or rows that contradict each other.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExperimentError {
    /// A number of a gate spec, policy or offline input is out of its range.
    #[error("`{field}` is {value}; {rule}")]
    OutOfRange { field: &'static str, value: String, rule: String },
    /// The list of phases is empty, unordered or holds a width above the fleet.
    #[error("phases: {0}")]
    Phases(String),
    /// A previous report belongs to another gate spec: a spec is frozen for the life of a rollout.
    #[error(
        "the previous report was made with gate spec {previous}, not {current}; a changed spec needs a new rollout"
    )]
    SpecChanged { previous: String, current: String },
    /// Latency thresholds were asked for from too few samples.
    #[error("{samples} samples for device class `{class}` are too few for quantile {quantile}; {needed} are needed")]
    TooFewSamples { class: String, quantile: f64, samples: usize, needed: usize },
    /// An operator's request cannot be followed in this state.
    #[error("{0}")]
    Request(String),
    /// A value could not be written as JSON (cannot happen for values made by this crate).
    #[error("cannot encode as JSON: {0}")]
    Encode(String),
}

impl From<ExperimentError> for Error {
    fn from(e: ExperimentError) -> Self {
        let text = e.to_string();
        match e {
            ExperimentError::OutOfRange { .. } => {
                Self::invalid("setting_out_of_range", text, "correct the setting and send it again")
            }
            ExperimentError::Phases(_) => {
                Self::invalid("bad_phases", text, "pass the phases of the current plan, oldest first")
            }
            ExperimentError::SpecChanged { .. } => {
                Self::conflict("gate_spec_changed", text, "end this rollout and start a new one")
            }
            ExperimentError::TooFewSamples { .. } => Self::invalid(
                "too_few_latency_samples",
                text,
                "collect more baseline telemetry, or merge rare device classes",
            ),
            ExperimentError::Request(_) => {
                Self::conflict("request_not_possible", text, "read the rollout's state and try again")
            }
            ExperimentError::Encode(_) => Self::internal(text),
        }
    }
}
