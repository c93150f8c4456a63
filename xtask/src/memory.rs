//! Peak proportional set size over a set of processes and their descendants, sampled from /proc.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Samples twice a second until dropped or stopped.
pub struct PeakPss {
    peak_kb: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PeakPss {
    /// Watches this process's whole tree.
    pub fn start() -> Self {
        let (peak_kb, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (p, s) = (peak_kb.clone(), stop.clone());
        let me = std::process::id();
        let thread = std::thread::spawn(move || {
            while !s.load(Ordering::Relaxed) {
                p.fetch_max(tree_pss_kb(me), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        Self { peak_kb, stop, thread: Some(thread) }
    }
    /// Peak so far, MB (10^6 bytes).
    pub fn peak_mb(&self) -> u64 {
        self.peak_kb.load(Ordering::Relaxed) * 1024 / 1_000_000
    }
}

impl Drop for PeakPss {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

fn tree_pss_kb(root: u32) -> u64 {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let Ok(dir) = fs::read_dir("/proc") else { return 0 };
    for entry in dir.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        if let Some(parent) = parent_of(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut seen, mut todo, mut sum) = (HashSet::new(), vec![root], 0);
    while let Some(pid) = todo.pop() {
        if seen.insert(pid) {
            sum += pss_kb(pid);
            todo.extend(children.get(&pid).into_iter().flatten());
        }
    }
    sum
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // the command name stands in parentheses and may hold anything; fields count from the last one
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn pss_kb(pid: u32) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .ok()
        .and_then(|t| {
            let line = t.lines().find(|l| l.starts_with("Pss:"))?.to_owned();
            line.split_whitespace().nth(1)?.parse().ok()
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn own_memory_is_seen() {
        assert!(super::tree_pss_kb(std::process::id()) > 500);
    }
}
