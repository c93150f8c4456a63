//! Which knowledge chunk or prompt template causes the excess of failures, with error control, and what may be
//! done about it.
//!
//! Five stages, all on sums: a logistic **baseline** (who would have failed anyway), a sparse **noisy-OR** on top
//! (which cause explains a failure best), a **screen**, a **fresh e-process** per suspect that counts each person
//! once, drops the most incriminating people and feeds e-BH, and a randomised **canary** as causal proof. The model
//! is refitted at period borders only, so a row is always judged by a model that has not seen it.
//! A chunk that fails under some templates and not under others is not to blame: the finding goes to the template.
//!
//! The decision uses the adjuster of the running maximum rather than deciding once per epoch: a freeze cannot be
//! un-happened, steps come whenever rows come, and the adjuster makes the set of ever-frozen chunks independent of
//! how often somebody looked. It costs about `2 ln ln E` in evidence, which the demo's causes pay in a day.

mod canary;
mod community;
mod decide;
mod explain;
mod model;
mod patterns;
mod policy;
mod refit;
mod report;
mod scope;
mod state;
mod step;
mod suspect;

pub use policy::{AttributionError, AttributionPolicyV1, FailureKind, FreezePolicyV1};
pub use report::{
    Buddy, CanaryReport, ChunkContext, ChunkInfo, FreezePrecision, Proposal, StepReport, SubjectKind, SuspectReport,
    TemplateEffect, TraceShare, Transition,
};
pub use state::AttributionState;
pub use step::step;
