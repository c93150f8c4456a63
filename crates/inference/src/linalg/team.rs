//! A small fork-join team for loops of a few microseconds.
//!
//! A decoder of 135 M parameters runs some 200 parallel loops a token, each a few tens of microseconds long; a general
//! pool spends as much on waking threads. Here the helpers watch one word for a short while after a loop, then sleep.
//! The leader never waits for a helper that has not begun: on a busy machine it does all the work itself, and a late
//! helper finds the loop closed. One leader at a time has the team; another (a second model, a nested loop) works alone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;

/// Looks at the word before a helper offers its core to others: some 20 microseconds.
const SPINS: usize = 600;
/// Offers of the core before a helper sleeps.
const YIELDS: usize = 8;
/// The loop may be entered.
const OPEN: u64 = 1;
/// One helper inside the loop.
const INSIDE: u64 = 2;
const INSIDE_MASK: u64 = 0xfffe;
/// One loop further.
const EPOCH: u64 = 1 << 16;

type Body<'a> = &'a (dyn Fn(usize) + Sync);

/// What the helpers share with the leader.
struct Team {
    /// `[epoch | helpers inside | open]`.
    word: AtomicU64,
    /// Somebody leads.
    led: AtomicBool,
    /// The next index that nobody has taken.
    next: AtomicUsize,
    /// The loop: valid while the word is open or somebody is inside.
    job: Mutex<Option<(Body<'static>, usize)>>,
    /// Helpers beyond these stay outside: the caller's pool is smaller than the team.
    limit: AtomicUsize,
    sleeping: Vec<AtomicBool>,
    threads: OnceLock<Vec<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Calls `body(i)` once for every `i < n`, on as many threads as the current pool has. Which thread does which index
/// is left open, so results must not depend on it.
pub(crate) fn parallel(n: usize, body: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads();
    if n > 1 && threads > 1 {
        let team = team();
        if team.led.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return team.lead(n, threads - 1, &body);
        }
    }
    (0..n).for_each(body);
}

fn team() -> &'static Team {
    static TEAM: OnceLock<Team> = OnceLock::new();
    let team = TEAM.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let helpers = cores.saturating_sub(1).min(63);
        Team {
            word: AtomicU64::new(0),
            led: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            job: Mutex::new(None),
            limit: AtomicUsize::new(0),
            sleeping: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            threads: OnceLock::new(),
            panic: Mutex::new(None),
        }
    });
    team.threads.get_or_init(|| {
        let start = |i| std::thread::Builder::new().name(format!("linalg-{i}")).spawn(move || help(i));
        (0..team.sleeping.len()).map_while(|i| start(i).ok()).map(|h| h.thread().clone()).collect()
    });
    team
}

impl Team {
    fn lead(&self, n: usize, helpers: usize, body: Body<'_>) {
        // SAFETY: only the lifetime changes. The reference is used by helpers inside the loop only, and this
        // function returns after the word was closed and the last of them has left.
        let job = unsafe { std::mem::transmute::<Body<'_>, Body<'static>>(body) };
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = Some((job, n));
        self.next.store(0, Ordering::Relaxed);
        self.limit.store(helpers, Ordering::Relaxed);
        self.word.fetch_add(EPOCH | OPEN, Ordering::SeqCst);
        for (asleep, thread) in self.sleeping.iter().zip(self.threads.get().into_iter().flatten()).take(helpers) {
            if asleep.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| self.work(body, n)));
        self.word.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while self.word.load(Ordering::Acquire) & INSIDE_MASK != 0 {
            looks += 1;
            if looks % SPINS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let theirs = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.led.store(false, Ordering::Release);
        if let Some(cause) = mine.err().or(theirs) {
            resume_unwind(cause);
        }
    }

    /// Takes indices until there is none.
    fn work(&self, body: Body<'_>, n: usize) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                break;
            }
            body(i);
        }
    }

    /// Enters the loop of `word` if it is still open.
    fn enter(&self, word: u64) -> bool {
        let more = word + INSIDE;
        word & OPEN != 0 && self.word.compare_exchange(word, more, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// The life of helper `me`.
fn help(me: usize) {
    let team = team();
    let (mut seen, mut idle) = (0, 0);
    loop {
        let word = team.word.load(Ordering::Acquire);
        if word & OPEN != 0 && word / EPOCH != seen {
            if !team.enter(word) {
                continue; // somebody else entered or the loop closed: look again
            }
            seen = word / EPOCH;
            idle = 0;
            let job = *team.job.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((body, n)) = job.filter(|_| me < team.limit.load(Ordering::Relaxed))
                && let Err(cause) = catch_unwind(AssertUnwindSafe(|| team.work(body, n)))
            {
                *team.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause);
            }
            team.word.fetch_sub(INSIDE, Ordering::AcqRel);
            continue;
        }
        idle += 1;
        if idle <= SPINS {
            std::hint::spin_loop();
        } else if idle <= SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            team.sleeping[me].store(true, Ordering::SeqCst);
            let word = team.word.load(Ordering::SeqCst);
            if word & OPEN == 0 || word / EPOCH == seen {
                std::thread::park();
            }
            team.sleeping[me].store(false, Ordering::SeqCst);
            idle = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once_from_any_thread_and_nested() {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for n in [0, 1, 2, 7, 300] {
                        let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                        for _ in 0..50 {
                            parallel(n, |i| {
                                parallel(2, |_| {
                                    counts[i].fetch_add(1, Ordering::Relaxed);
                                });
                            });
                        }
                        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 100));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let failed = catch_unwind(|| parallel(40, |i| assert!(i != 17, "seventeen")));
        assert!(failed.unwrap_err().downcast_ref::<String>().is_none_or(|s| s.contains("seventeen")));
        let sum = AtomicUsize::new(0);
        parallel(10, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
