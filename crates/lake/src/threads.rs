//! Threads apart from those that serve requests. A join of large tables, or the encoding of a file, computes for seconds
//! between two points where it can be set aside; here it delays others of its kind only, never intake or the time-out of its
//! caller.

use crate::error::LakeError;
use std::sync::Arc;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;

/// Threads for one kind of work.
pub(crate) struct Threads {
    runtime: Option<Runtime>,
    /// Tasks that may run at once.
    pub slots: Arc<Semaphore>,
}

/// Who gets a core first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    Normal,
    /// A tenth of what the threads of the intake get where both want the same core.
    BehindIntake,
}

/// Niceness of [`Priority::BehindIntake`].
const NICE: i32 = 10;

impl Threads {
    pub fn start(name: &'static str, threads: usize, priority: Priority) -> Result<Self, LakeError> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(threads).thread_name(name).enable_all();
        if priority == Priority::BehindIntake {
            builder.on_thread_start(|| {
                // on Linux this is about the calling thread; where it is refused, it competes with the intake
                if let Err(e) = rustix::process::setpriority_process(None, NICE) {
                    tracing::warn!(error = %e, "a thread keeps its priority");
                }
            });
        }
        let runtime = builder.build();
        let runtime =
            runtime.map_err(|source| LakeError::Io { what: format!("cannot start threads for {name}"), source })?;
        Ok(Self { runtime: Some(runtime), slots: Arc::new(Semaphore::new(threads)) })
    }

    /// Handle to spawn on; `None` only while the lake is dropped.
    pub fn handle(&self) -> Option<&Handle> {
        self.runtime.as_ref().map(Runtime::handle)
    }

    /// Runs `work` here and waits for it.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, LakeError>> + Send + 'static,
    ) -> Result<T, LakeError> {
        let handle = self.handle().ok_or_else(|| LakeError::Unexpected("the lake is closing".to_owned()))?;
        handle.spawn(work).await.map_err(|e| LakeError::Unexpected(e.to_string()))?
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
