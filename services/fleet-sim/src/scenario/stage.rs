//! The stage of the story: fleet, people and clock, and the few verbs that every part uses.

use super::admin::Admin;
use super::kb::{self, Fact};
use super::prompt;
use super::world::{Customers, Dense, RealModel, behaviour};
use super::{Args, say};
use anyhow::{Context, Result, bail};
use chrono::{DateTime, TimeDelta, Utc};
use fleet_sim::{Fleet, FleetConfig, LatencyModel, TickReport};
use flywheel_inference::encoder::Encoder;
use flywheel_types::AppId;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Virtual time of one tick.
pub const TICK_HOURS: i64 = 12;
/// Phones of the first ring, by index.
const RING: std::ops::Range<usize> = 100..104;

/// Everything a part of the story needs.
pub struct Stage {
    pub facts: Vec<Fact>,
    pub fleet: Fleet,
    pub operator: Admin,
    pub approver: Admin,
    pub admin: Admin,
    pub ann: Admin,
    pub ben: Admin,
    pub now: DateTime<Utc>,
    pub ticks: u64,
    pub last: TickReport,
    /// Chunks that were ever hidden from everybody (or went on to be repaired), and from a share of the phones.
    pub frozen: BTreeSet<String>,
    pub tested: BTreeSet<String>,
    templates: Arc<AtomicUsize>,
    pub args: Args,
}

impl Stage {
    pub async fn open(args: Args) -> Result<Self> {
        let client = reqwest::Client::builder().build()?;
        let person = |name: &str| -> Result<Admin> {
            let file = args.dir.join(format!("token-{name}"));
            let token = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(Admin::new(client.clone(), &args.server, token.trim()))
        };
        let admin = person("admin")?;
        let clock = admin.get("/v1/clock").await?;
        let start: DateTime<Utc> = clock["now"].as_str().context("the server tells no time")?.parse()?;
        let facts = kb::load()?;
        let templates = Arc::new(AtomicUsize::new(2));
        let fleet = fleet(&args, &facts, &templates, start)?;
        Ok(Self {
            facts,
            fleet,
            operator: person("operator")?,
            approver: person("approver")?,
            ann: person("ann")?,
            ben: person("ben")?,
            admin,
            now: start,
            ticks: 0,
            last: TickReport::default(),
            frozen: BTreeSet::new(),
            tested: BTreeSet::new(),
            templates,
            args,
        })
    }

    /// One tick: the fleet lives, everything is acknowledged, the controllers run.
    pub async fn tick(&mut self) -> Result<()> {
        let next = self.now + TimeDelta::hours(TICK_HOURS);
        let bar = spinner(format!("day {}: {} phones live through half a day", self.day(), self.args.phones));
        self.last = self.fleet.tick(self.now).await?;
        bar.set_message(format!("day {}: the server's jobs run", self.day()));
        self.admin.post("/v1/clock", &json!({ "now": next })).await?;
        bar.finish_and_clear();
        if let Some((what, n)) = self.last.errors.iter().next() {
            say(&format!("  {n} phones report: {what}"));
        }
        self.now = next;
        self.ticks += 1;
        self.look_at_chunks().await
    }

    /// Ticks until `done` answers something, at most `most` times.
    pub async fn until<T>(
        &mut self,
        what: &str,
        most: u64,
        mut done: impl AsyncFnMut(&mut Self) -> Result<Option<T>>,
    ) -> Result<T> {
        for _ in 0..most {
            if let Some(found) = done(self).await? {
                return Ok(found);
            }
            self.tick().await?;
        }
        match done(self).await? {
            Some(found) => Ok(found),
            None => bail!("after {} virtual days: {what} did not happen", most as i64 * TICK_HOURS / 24),
        }
    }

    /// From now on customers also use the next template.
    pub fn launch_template(&self) {
        self.templates.fetch_add(1, Ordering::Relaxed);
    }

    /// Virtual day of the story, from 1.
    pub fn day(&self) -> i64 {
        1 + (self.ticks as i64 * TICK_HOURS) / 24
    }

    pub fn install_ids(&self, range: std::ops::Range<usize>) -> Vec<String> {
        self.fleet.phones()[range].iter().filter_map(|p| p.device()).map(|d| d.install_id().to_string()).collect()
    }

    /// Settings of the app: the controller acts, with the shipped policies.
    pub async fn configure(&self, extra: Value) -> Result<()> {
        let row = self.admin.get("/v1/settings").await?;
        let mut settings = row["settings"].clone();
        settings["automation"] = json!("act");
        settings["approval"] = json!("auto");
        settings["visible_reject_control"] = json!(true);
        settings["ring"] = json!(self.install_ids(RING));
        if let (Some(s), Some(e)) = (settings.as_object_mut(), extra.as_object()) {
            s.extend(e.clone());
        }
        self.admin.put("/v1/settings", &json!({ "version": row["version"], "settings": settings })).await?;
        Ok(())
    }

    /// What the fleet runs: bundle digest → phones.
    pub fn running(&self) -> Vec<(String, u64)> {
        self.last.running.iter().map(|(d, n)| (d.to_hex(), *n)).collect()
    }

    /// Indices of the phones that run a bundle now.
    pub fn running_on(&self, bundle: &str) -> impl Iterator<Item = usize> {
        self.fleet.phones().iter().filter(move |p| p.loaded().is_some_and(|b| b.to_hex() == bundle)).map(|p| p.index())
    }

    /// The prompt that a phone builds from these chunk ids.
    pub fn prompt(&self, template: &str, chunks: &[String], question: &str) -> String {
        let text = |id: &String| {
            let id = id.split('@').next().unwrap_or_default();
            self.facts.iter().find(|f| f.chunk_id == id).map(|f| f.text.as_str())
        };
        prompt::Template::named(template).user_text(chunks.iter().filter_map(text), question)
    }
}

/// Shows on a terminal what takes its time now.
pub fn spinner(what: String) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn fleet(args: &Args, facts: &[Fact], templates: &Arc<AtomicUsize>, start: DateTime<Utc>) -> Result<Fleet> {
    let read = |name: &str| fs::read(args.dir.join(name)).with_context(|| format!("cannot read {name}"));
    let key = String::from_utf8(read("ingest-key")?)?.trim().to_owned();
    let root: Arc<[u8]> = read("offline-keys/trusted-root.json")?.into();
    let mut config = FleetConfig::new(
        AppId::new("support")?,
        args.server.as_str(),
        key,
        root,
        PathBuf::from(&args.phones_dir),
        start,
    );
    config.phones = args.phones;
    config.seed = args.seed;
    config.send_content = true;
    config.use_index = true;
    // a few of them are offline at any tick: 16 must have fetched everything by the end of the first part
    config.own_slot_phones = 20;
    let customers = Arc::new(Customers::new(facts, templates.clone(), 1.5)?);
    let encoder = Encoder::open(&args.models.join("all-minilm-l6-v2"))?;
    let retriever = Arc::new(Dense::new(&encoder, &customers));
    let parts = fleet_sim::fleet::Parts {
        transport: Arc::new(flywheel_sdk::ReqwestTransport::new()?),
        brain: Arc::new(RealModel::default()),
        workload: customers,
        retriever,
        latency: LatencyModel { sigma: 0.15, ..LatencyModel::default() },
        behaviour: behaviour(facts)?,
    };
    Ok(Fleet::new(&config, parts)?)
}
