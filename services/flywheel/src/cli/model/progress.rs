//! Progress on standard error, and Ctrl-C.

use crate::cli::STOPPED;
use crate::pipeline::blocking::stopped;
use flywheel_types::Error;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// What a run and the signals it gets have in common.
#[derive(Debug, Clone, Default)]
pub struct Session(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// The program waits for a person: there is nothing to end in order.
    idle: AtomicBool,
}

impl Session {
    /// Waits for Ctrl-C or a request to end. The first one asks the run to end at its next look, a second one does not wait.
    pub async fn listen(self) {
        loop {
            if signal().await.is_err() {
                return; // without signals the system's own way to end a program remains
            }
            if self.0.idle.load(Ordering::Relaxed) || self.0.stop.swap(true, Ordering::Relaxed) {
                std::process::exit(i32::from(STOPPED));
            }
            note("stopping at the next step; again to stop at once");
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }
    /// For callbacks: whether the work goes on.
    pub fn go(&self) -> ControlFlow<()> {
        if self.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
    /// For work without callbacks.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_stopped() { Err(stopped("on request")) } else { Ok(()) }
    }
    /// Whether the program only waits for a person now.
    pub fn idle(&self, idle: bool) {
        self.0.idle.store(idle, Ordering::Relaxed);
    }
}

async fn signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut end = signal(SignalKind::terminate())?;
    tokio::select! {
        done = tokio::signal::ctrl_c() => done,
        _ = end.recv() => Ok(()),
    }
}

/// One line on standard error: what is no result.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// How far a run is: a bar on a terminal, else a line now and then.
pub struct Bar<'a> {
    session: &'a Session,
    what: String,
    bar: Option<ProgressBar>,
    shown: Option<Instant>,
}

impl<'a> Bar<'a> {
    pub fn new(session: &'a Session, what: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0));
        if let Some(bar) = &bar {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} {elapsed} (left {eta})");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.set_prefix(what.to_owned());
        }
        Self { session, what: what.to_owned(), bar, shown: None }
    }

    /// Shows `done` of `of` and what is worked on; answers whether the work goes on.
    pub fn step(&mut self, done: usize, of: usize, now: &str) -> ControlFlow<()> {
        match &self.bar {
            Some(bar) => {
                bar.set_length(of as u64);
                bar.set_position(done as u64);
                bar.set_message(now.to_owned());
            }
            None if self.shown.is_none_or(|at| at.elapsed() >= LINE_EVERY) => {
                self.shown = Some(Instant::now());
                let now = if now.is_empty() { String::new() } else { format!(": {now}") };
                note(&format!("{} {done} of {of}{now}", self.what));
            }
            None => {}
        }
        self.session.go()
    }
}

impl Drop for Bar<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
