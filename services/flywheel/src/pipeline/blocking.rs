//! Long computations of a job: on a blocking thread, with progress, and stopped when the job is stopped.

use flywheel_jobs::JobContext;
use flywheel_types::{Error, ErrorKind};
use serde_json::Value;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often progress is stored.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// What a computation and its job share. Computations outside a job take a fresh one.
#[derive(Debug, Clone, Default)]
pub struct Watch(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    progress: Mutex<Option<Value>>,
}

impl Watch {
    /// Shows how far the computation is; answers whether it goes on.
    pub fn report(&self, progress: Value) -> ControlFlow<()> {
        if let Ok(mut shown) = self.0.progress.lock() {
            *shown = Some(progress);
        }
        if self.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Whether the computation shall end: look between units of work.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }

    /// Asks the computation to end.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }

    /// What was reported since the last call.
    fn news(&self) -> Option<Value> {
        self.0.progress.lock().ok().and_then(|mut shown| shown.take())
    }
}

/// Nobody waits any more: the computation shall not go on for nobody.
struct StopOnDrop(Watch);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// The error of a computation that was asked to end. Another attempt may come.
#[must_use]
pub fn stopped(why: &str) -> Error {
    Error::new(ErrorKind::Unavailable, "stopped", format!("the work was stopped: {why}"), "another attempt goes on")
}

/// Runs `work` on a blocking thread, stores what it reports, and asks it to end when the job shall stop.
///
/// # Errors
/// Those of `work`; [`stopped`]; a conflict when another attempt owns the job.
pub async fn watched<T, F>(ctx: &JobContext, work: F) -> Result<T, Error>
where
    T: Send + 'static,
    F: FnOnce(&Watch) -> Result<T, Error> + Send + 'static,
{
    let watch = Watch::default();
    let _guard = StopOnDrop(watch.clone());
    let inside = watch.clone();
    let mut task = tokio::task::spawn_blocking(move || work(&inside));
    let mut tick = tokio::time::interval(PROGRESS_EVERY);
    loop {
        tokio::select! {
            done = &mut task => return done.map_err(Error::internal)?,
            why = ctx.stopped() => {
                watch.stop();
                let _ = task.await; // it ends at its next look; files and checkpoints are whole then
                return Err(stopped(&format!("{why:?}")));
            }
            _ = tick.tick() => {
                if let Some(progress) = watch.news() {
                    ctx.progress(&progress).await.map_err(super::lost)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_computation_sees_that_nobody_waits() {
        let watch = Watch::default();
        assert!(watch.report(json!({ "done": 1 })).is_continue());
        assert_eq!(watch.news(), Some(json!({ "done": 1 })));
        assert_eq!(watch.news(), None, "progress is stored once");
        drop(StopOnDrop(watch.clone()));
        assert!(watch.is_stopped() && watch.report(json!({ "done": 2 })).is_break());
    }
}
