//! Experiment statistics, gates and the rollout planner. Pure: no clock, no randomness, no I/O.
//!
//! The flow for one running rollout, at a watermark `now`:
//!
//! 1. [`window::close_windows`] turns device histories into one immutable record per device;
//! 2. [`gate::evaluate`] compares the arms and gives a [`gate::GateReportV1`] with one verdict;
//! 3. [`planner::plan_next`] turns policy, current plan, inventory, report and operator requests into the next
//!    immutable [`planner::PlanV1`] and a list of actions for the executor.
//!
//! Before a candidate may be signed, [`offline::evaluate_offline`] judges it on held-out data.
//!
//! The statistics below are usable on their own: [`special`] (incomplete beta for any shape), [`exact`]
//! (McNemar, Wilson, Clopper-Pearson, Newcombe) and [`confidence`] (confidence sequences and e-processes).

pub mod confidence;
pub mod error;
pub mod exact;
pub mod gate;
pub mod offline;
pub mod planner;
pub mod ratio;
pub mod special;
pub mod window;

pub use error::ExperimentError;
