//! `flywheel api`: calls the admin API of a running server and prints the answer.

use super::{ApiArgs, say};
use anyhow::{Context, Result, bail};
use std::io::Read;

/// Sends one request.
///
/// # Errors
/// When there is no answer, or the answer is an error: its code, message and hint are shown.
pub async fn call(args: ApiArgs) -> Result<()> {
    let method: reqwest::Method = args.method.to_uppercase().parse().context("the method is GET, POST or PUT")?;
    let url = format!("{}{}", args.server.trim_end_matches('/'), args.path);
    let mut request = reqwest::Client::new().request(method, &url).bearer_auth(args.token.trim());
    if let Some(body) = args.body {
        let text = if body == "-" { read_stdin()? } else { body };
        let value: serde_json::Value = serde_json::from_str(&text).context("the body is not JSON")?;
        request = request.json(&value);
    }
    let response = request.send().await.with_context(|| format!("{url}: no answer"))?;
    let status = response.status();
    let text = response.text().await?;
    if !status.is_success() {
        bail!("{status}: {text}");
    }
    match serde_json::from_str::<serde_json::Value>(&text) {
        Ok(value) => say(&serde_json::to_string_pretty(&value)?),
        Err(_) => say(&text),
    }
    Ok(())
}

/// All of standard input.
///
/// # Errors
/// When it cannot be read or is no text.
pub fn read_stdin() -> Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    Ok(text)
}
