//! `flywheel sql`: one SELECT over the telemetry of an app, as a table for people or in a form for programs.

use super::api::read_stdin;
use super::{SqlArgs, SqlFormat, say};
use anyhow::{Context, Result, bail};
use flywheel_lake::Format;
use reqwest::header::ACCEPT;
use serde_json::Value;
use std::io::Write as _;

/// Sends the query and writes the answer.
///
/// # Errors
/// When there is no answer, or the answer is an error: its code, message and hint are shown.
pub async fn run(args: SqlArgs) -> Result<()> {
    let query = if args.query == "-" { read_stdin()? } else { args.query };
    let url = format!("{}/v1/sql", args.server.trim_end_matches('/'));
    let request = reqwest::Client::new().post(&url).bearer_auth(args.token.trim()).header(ACCEPT, accept(args.format));
    let response = request.json(&serde_json::json!({ "query": query })).send().await;
    let response = response.with_context(|| format!("{url}: no answer"))?;
    let status = response.status();
    let truncated = response.headers().get("x-flywheel-truncated").is_some_and(|v| v == "true");
    let body = response.bytes().await?;
    if !status.is_success() {
        bail!("{status}: {}", String::from_utf8_lossy(&body));
    }
    let (body, truncated) = if args.format == SqlFormat::Table {
        let answer: Value = serde_json::from_slice(&body).context("the answer is not JSON")?;
        (table(&answer).into_bytes(), answer["truncated"] == true)
    } else {
        (body.to_vec(), truncated)
    };
    match &args.output {
        Some(path) => std::fs::write(path, &body).with_context(|| format!("cannot write {}", path.display()))?,
        None => std::io::stdout().write_all(&body)?,
    }
    if truncated {
        tracing::warn!("there are more rows than one answer may have: add LIMIT, or aggregate");
    }
    if args.output.is_none() && args.format == SqlFormat::Json {
        say("");
    }
    Ok(())
}

fn accept(format: SqlFormat) -> &'static str {
    match format {
        SqlFormat::Table | SqlFormat::Json => "application/json",
        SqlFormat::Csv => Format::Csv.media_type(),
        SqlFormat::Arrow => Format::Arrow.media_type(),
        SqlFormat::Parquet => Format::Parquet.media_type(),
    }
}

/// Columns as wide as their widest value.
fn table(answer: &Value) -> String {
    let text = |v: &Value| match v {
        Value::String(s) => s.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let head: Vec<String> = list(&answer["columns"]).iter().map(|c| text(&c["name"])).collect();
    let mut lines = vec![head];
    lines.extend(list(&answer["rows"]).iter().map(|row| list(row).iter().map(text).collect()));
    let columns = lines.first().map_or(0, Vec::len);
    let width = |i: usize| lines.iter().filter_map(|l| l.get(i)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    lines.insert(1, widths.iter().map(|w| "-".repeat(*w)).collect());
    let line = |cells: &Vec<String>| {
        let padded = cells.iter().zip(&widths).map(|(c, w)| format!("{c:w$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up() {
        let answer = serde_json::json!({
            "columns": [{ "name": "trust" }, { "name": "n" }], "rows": [["keyed", 12], [null, 3]],
        });
        assert_eq!(table(&answer), "trust  n\n-----  --\nkeyed  12\n       3\n");
    }
}
