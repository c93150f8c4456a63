//! `flywheel import`: starts an import on a running server, and shows how far it is.

use super::{ImportArgs, say};
use anyhow::{Context, Result, bail};
use reqwest::{Client, RequestBuilder, Url};
use serde_json::{Value, json};
use std::time::Duration;

/// Between two looks at the job.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Starts the import; with `--follow` waits for its end.
///
/// # Errors
/// When there is no answer or it is an error, when the job does not succeed, or when a file could not be read.
pub async fn run(args: ImportArgs) -> Result<()> {
    let body = json!({ "source": source(&args.source)?, "table": args.table, "format": args.format });
    let started = ask(&args, |http, url| http.post(url).json(&body), "/v1/imports").await?;
    let job = started["job_id"].as_str().context("the answer names no job")?.to_owned();
    if !args.follow {
        say(&format!("job {job}: see `flywheel api get /v1/jobs/{job}`"));
        return Ok(());
    }
    say(&format!("job {job}"));
    let mut shown = String::new();
    let ended = loop {
        let row = ask(&args, |http, url| http.get(url), &format!("/v1/jobs/{job}")).await?;
        if !matches!(row["state"].as_str(), Some("queued" | "running")) {
            break row;
        }
        let line = progress(&row["progress"]);
        if line != shown {
            say(&line);
            shown = line;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    if ended["state"] != "succeeded" {
        bail!("the job is {}: {}", words(&ended["state"]), words(&ended["last_error"]));
    }
    let result = &ended["result"];
    say(&summary(result));
    let failed = result["failed"].as_array().map_or(0, Vec::len);
    if failed > 0 {
        bail!(
            "{failed} of {} objects could not be read; start the import again when they are repaired",
            result["objects"]
        );
    }
    Ok(())
}

/// A path of this machine as the URL of a file; a URL as it is.
fn source(text: &str) -> Result<String> {
    if text.contains("://") {
        return Ok(text.to_owned());
    }
    let path = std::path::absolute(text)?;
    let url = if text.ends_with('/') { Url::from_directory_path(&path) } else { Url::from_file_path(&path) };
    Ok(url.map_err(|()| anyhow::anyhow!("{} cannot be written as a URL", path.display()))?.to_string())
}

async fn ask(args: &ImportArgs, make: impl FnOnce(&Client, &str) -> RequestBuilder, path: &str) -> Result<Value> {
    let url = format!("{}{path}", args.server.trim_end_matches('/'));
    let mut request = make(&Client::new(), &url).bearer_auth(args.token.trim());
    if let Some(app) = &args.app {
        request = request.header("x-fleet-app", app);
    }
    let response = request.send().await.with_context(|| format!("{url}: no answer"))?;
    let status = response.status();
    let text = response.text().await?;
    if !status.is_success() {
        bail!("{status}: {text}");
    }
    serde_json::from_str(&text).with_context(|| format!("{url} answered {text}"))
}

fn words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn progress(p: &Value) -> String {
    if p.is_null() {
        return "waiting".to_owned();
    }
    let current = p["current"].as_str().map(|name| format!(", reading {name}")).unwrap_or_default();
    format!("{} of {} objects, {} rows{current}", p["done"], p["objects"], p["rows"])
}

/// The counts of the end, one thing a line.
fn summary(result: &Value) -> String {
    let mut lines = vec![format!(
        "{} objects: {} rows read, {} were there already",
        result["objects"], result["rows"], result["already"]
    )];
    for (word, title) in [("stored", "stored"), ("quarantined", "quarantined")] {
        for (what, n) in result[word].as_object().into_iter().flatten() {
            lines.push(format!("  {title} {what}: {n}"));
        }
    }
    for name in result["passed_over_first"].as_array().into_iter().flatten() {
        lines.push(format!("  passed over: {} (its name tells no form)", words(name)));
    }
    for (object, columns) in result["ignored_columns"].as_object().into_iter().flatten() {
        lines.push(format!("  {object}: columns without a place: {columns}"));
    }
    for failed in result["failed"].as_array().into_iter().flatten() {
        lines.push(format!("  FAILED {}: {}", words(&failed["object"]), words(&failed["reason"])));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_urls_and_urls_stay() {
        assert_eq!(source("s3://bucket/x/").unwrap(), "s3://bucket/x/");
        assert_eq!(source("/srv/old data/a.parquet").unwrap(), "file:///srv/old%20data/a.parquet");
        assert_eq!(source("/srv/history/").unwrap(), "file:///srv/history/");
    }

    #[test]
    fn the_end_is_told_in_lines() {
        let result = json!({ "objects": 2, "rows": 5, "already": 1, "stored": { "interactions": 4 },
            "quarantined": { "bad_event": 1 }, "failed": [{ "object": "b.parquet", "reason": "damaged" }] });
        assert_eq!(
            summary(&result),
            "2 objects: 5 rows read, 1 were there already\n  stored interactions: 4\n  quarantined bad_event: 1\n  \
             FAILED b.parquet: damaged"
        );
        assert_eq!(progress(&Value::Null), "waiting");
    }
}
