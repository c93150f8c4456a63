//! Configuration: one TOML file, every key optional, checked as a whole before anything starts.

use anyhow::{Context, Result, bail};
use flywheel_telemetry::Masks;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The whole configuration. Paths that are left out lie below `data_dir`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Folder of everything we own.
    pub data_dir: PathBuf,
    /// Address of the HTTP server.
    pub listen: SocketAddr,
    /// Address that people and devices use, for links in mails.
    pub public_url: Option<String>,
    /// `sqlite://…` or `postgres://…`.
    pub database_url: Option<String>,
    /// Name of this ingest node in Delta transactions; unique per node, never changed.
    pub writer_id: String,
    pub clock: ClockConfig,
    pub worker: WorkerConfig,
    pub ingest: IngestConfig,
    pub flight: Option<FlightConfig>,
    pub import: ImportConfig,
    pub mail: Option<MailConfig>,
    pub models: ModelsConfig,
}

/// Which business clock runs the policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClockConfig {
    /// The wall clock; controllers run every `tick_s` seconds.
    System { tick_s: u64 },
    /// Moves only by `POST /v1/clock`; for simulations. Leases and time-outs stay real.
    Virtual { start: chrono::DateTime<chrono::Utc> },
}

/// Background work inside `serve`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerConfig {
    /// Run jobs inside `serve`; turn off when `flywheel worker` processes do it.
    pub embedded: bool,
    /// Jobs at the same time.
    pub slots: usize,
    /// Lease of a job, seconds; a worker that is silent for longer loses it.
    pub lease_s: u64,
}

/// Limits of the intake.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IngestConfig {
    /// Largest request body after decompression, bytes.
    pub max_body_bytes: usize,
    /// Bytes that may wait in the log for the tables before the intake answers 503.
    pub max_backlog_bytes: u64,
    /// Bodies that may be in memory at once before the intake answers 503, bytes.
    pub max_in_flight_bytes: usize,
    /// Space the disk must keep: with less the intake answers 503 until there is more again, bytes.
    pub min_free_bytes: u64,
    /// Longest time for the headers of a request and for its body, seconds.
    pub upload_timeout_s: u64,
    /// Seconds between commits to the tables.
    pub flush_s: u64,
    /// Bytes in the log that are committed at once, without waiting for `flush_s`.
    pub flush_bytes: u64,
    /// The log begins a new file past this size, bytes; a file is deleted when the tables have all of it.
    pub segment_bytes: u64,
    /// Events that one install, known by its signature, may send in a minute; 0 is no quota.
    pub install_events_per_minute: u32,
    /// Events that may come from one network (IPv4 /24, IPv6 /56) in a minute; 0 is no quota.
    pub network_events_per_minute: u32,
    /// Proxies of ours that stand before the server, each of which adds the address it saw to `X-Forwarded-For`.
    pub trusted_proxies: usize,
    /// Personal data that is replaced in free text before it is stored.
    pub masks: Masks,
}

/// Arrow Flight SQL, and what one of its queries may take.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlightConfig {
    /// Address of the gRPC server.
    pub listen: SocketAddr,
    /// Longest time of one query, reading included, seconds.
    #[serde(default = "flight_timeout")]
    pub timeout_s: u64,
    /// Rows of one result.
    #[serde(default = "flight_rows")]
    pub max_rows: usize,
    /// Arrow memory of one result, bytes; it is streamed, never held as a whole.
    #[serde(default = "flight_bytes")]
    pub max_bytes: usize,
}

fn flight_timeout() -> u64 {
    60
}
fn flight_rows() -> usize {
    1_000_000
}
fn flight_bytes() -> usize {
    256 << 20
}

/// History from files.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImportConfig {
    /// Folders and prefixes of buckets that may be imported from, as URLs; nothing when empty.
    pub sources: Vec<String>,
}

/// Where mail goes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MailConfig {
    /// `smtp://host:port` or `smtps://user:password@host`.
    pub smtp_url: String,
    pub from: String,
    /// One message per recipient.
    pub to: Vec<String>,
    /// Longest time for one message, seconds.
    #[serde(default = "mail_timeout")]
    pub timeout_s: u64,
}

/// Model files that server-side jobs use.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelsConfig {
    /// Folder of the sentence encoder (`model.safetensors`, `vocab.txt`).
    pub encoder_dir: Option<PathBuf>,
}

fn mail_timeout() -> u64 {
    20
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: "/var/lib/flywheel".into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            public_url: None,
            database_url: None,
            writer_id: "ingest-0".into(),
            clock: ClockConfig::System { tick_s: 60 },
            worker: WorkerConfig::default(),
            ingest: IngestConfig::default(),
            flight: None,
            import: ImportConfig::default(),
            mail: None,
            models: ModelsConfig::default(),
        }
    }
}
impl Default for WorkerConfig {
    fn default() -> Self {
        Self { embedded: true, slots: 2, lease_s: 60 }
    }
}
impl Default for IngestConfig {
    fn default() -> Self {
        Self {
            max_body_bytes: 8 << 20,
            max_backlog_bytes: 8 << 30,
            max_in_flight_bytes: 64 << 20,
            min_free_bytes: 1 << 30,
            upload_timeout_s: 60,
            flush_s: 10,
            flush_bytes: 512 << 20,
            segment_bytes: 64 << 20,
            install_events_per_minute: 0,
            network_events_per_minute: 0,
            trusted_proxies: 0,
            masks: Masks::default(),
        }
    }
}

impl Config {
    /// Reads and checks the file at `path`; the defaults when `None`.
    ///
    /// # Errors
    /// When the file cannot be read, has an unknown key or a value that cannot work; the message names it.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let config: Self = match path {
            None => Self::default(),
            Some(p) => {
                let text = std::fs::read_to_string(p)
                    .with_context(|| format!("cannot read the configuration {}", p.display()))?;
                toml::from_str(&text).with_context(|| format!("the configuration {} is not valid", p.display()))?
            }
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        if self.worker.slots == 0 {
            bail!("worker.slots is 0: set it to 1 or more, or worker.embedded = false");
        }
        if self.writer_id.is_empty() {
            bail!("writer_id is empty: give this ingest node a name that never changes");
        }
        if let Some(url) = &self.database_url
            && !(url.starts_with("sqlite:") || url.starts_with("postgres"))
        {
            bail!("database_url must begin with sqlite: or postgres:");
        }
        if let Some(f) = &self.flight
            && (f.timeout_s == 0 || f.max_rows == 0 || f.max_bytes == 0)
        {
            bail!("a limit of [flight] is 0: no query could answer; leave the key out for its default");
        }
        if let Some(m) = &self.mail
            && m.to.is_empty()
        {
            bail!("mail.to is empty: name at least one recipient or remove [mail]");
        }
        for source in &self.import.sources {
            flywheel_lake::import::check(source, std::slice::from_ref(source))
                .map_err(|e| anyhow::anyhow!("import.sources: {}: {}", e.message, e.hint))?;
        }
        Ok(())
    }

    /// Database URL, the SQLite file below `data_dir` by default.
    #[must_use]
    pub fn database_url(&self) -> String {
        self.database_url.clone().unwrap_or_else(|| format!("sqlite://{}", self.data_dir.join("control.db").display()))
    }
    /// Link base for mails and the CLI.
    #[must_use]
    pub fn public_url(&self) -> String {
        self.public_url.clone().unwrap_or_else(|| format!("http://{}", self.listen))
    }
    /// Folder of content-addressed objects (datasets, models, vectors, attribution state).
    #[must_use]
    pub fn objects_dir(&self) -> PathBuf {
        self.data_dir.join("objects")
    }
    /// Folder of the Delta tables and the write-ahead log.
    #[must_use]
    pub fn lake_dir(&self) -> PathBuf {
        self.data_dir.join("lake")
    }
    /// Folder of the published TUF trees, one below per app.
    #[must_use]
    pub fn tuf_dir(&self) -> PathBuf {
        self.data_dir.join("tuf")
    }
    /// Folder of the online keys (`rollout`, `snapshot`, `timestamp`), one below per app.
    #[must_use]
    pub fn keys_dir(&self) -> PathBuf {
        self.data_dir.join("keys")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_example_is_valid() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/flywheel.toml");
        let config = Config::load(Some(&path)).unwrap();
        assert!(config.worker.embedded);
    }

    #[test]
    fn a_source_that_is_no_folder_or_bucket_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (source, fits) in [("file:///srv/history/", true), ("s3://bucket/x", true), ("/srv/history", false)] {
            std::fs::write(file.path(), format!("[import]\nsources = [\"{source}\"]\n")).unwrap();
            let loaded = Config::load(Some(file.path()));
            assert_eq!(loaded.is_ok(), fits, "{source}: {loaded:?}");
        }
        let e = format!("{:#}", Config::load(Some(file.path())).unwrap_err());
        assert!(e.contains("import.sources") && e.contains("/srv/history"), "{e}");
    }

    #[test]
    fn an_unknown_key_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "lisen = \"127.0.0.1:1\"\n").unwrap();
        let e = format!("{:#}", Config::load(Some(file.path())).unwrap_err());
        assert!(e.contains("lisen"), "{e}");
    }
}
