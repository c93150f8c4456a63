//! Background jobs under leases: claim, heartbeat, fencing, retry, dead letter, and cron schedules.
//!
//! # Promises
//! * A job that was enqueued is run at least once; its side effect happens exactly once when the handler makes it in a
//!   transaction that calls [`JobContext::fence`] or [`JobContext::succeed`]. The attempt number is the fencing token;
//!   effects outside the database are keyed by `(job, attempt)` or by digest.
//! * A job whose worker dies is found when its lease ends, waits with back-off, and is dead after `max_attempts`.
//! * A shut-down is no attempt. A cancel reaches a running job with its next heartbeat.
//! * A schedule's slot is decided once, also with several replicas, and a slot that is not run leaves a visible row.
//!
//! The table of cron rules is in [`cron`] and [`policy`]. What a job does is none of this crate's business: handlers are
//! registered by kind ([`Handlers`]).

mod backoff;
mod context;
pub mod cron;
mod error;
mod handler;
mod heartbeat;
pub mod policy;
mod reap;
mod scheduler;
mod settle;
mod spec;
mod worker;

pub use backoff::Backoff;
pub use context::{JobContext, StopReason};
pub use cron::schedule_next;
pub use error::{JobError, ScheduleError};
pub use handler::{Handlers, JobEvents, JobHandler, Outcome};
pub use scheduler::{Scheduler, SchedulerOptions};
pub use spec::{ScheduleSpec, schedule_pause, schedule_put, schedule_resume, schedule_run_now};
pub use worker::{Worker, WorkerOptions};

pub use flywheel_store::jobs::{Enqueued, JobRow, JobToken, NewJob};
