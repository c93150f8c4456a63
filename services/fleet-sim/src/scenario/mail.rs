//! What the mail server of the demo took, read from its Maildir.

use anyhow::{Context, Result};
use std::path::Path;

/// Subjects of the messages that name `what`.
pub fn subjects(maildir: &Path, what: &str) -> Result<Vec<String>> {
    let folder = maildir.join("new");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("no mail arrived in {}", folder.display()))? {
        let text = std::fs::read_to_string(entry?.path())?;
        if let Some(subject) = subject(&text).filter(|s| s.contains(what)) {
            found.push(subject);
        }
    }
    found.sort();
    Ok(found)
}

/// The unfolded subject (RFC 5322, 2.2.3).
fn subject(message: &str) -> Option<String> {
    let mut lines = message.lines().take_while(|l| !l.is_empty());
    let first = lines.find_map(|l| l.strip_prefix("Subject: "))?;
    let more = lines.take_while(|l| l.starts_with([' ', '\t'])).map(str::trim_start);
    Some(std::iter::once(first).chain(more).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::subject;

    #[test]
    fn a_folded_subject_is_one_line() {
        let text = "From: a@b\r\nSubject: [shop] rollout\r\n r-1 is rolling back\r\nTo: c@d\r\n\r\nSubject: no\r\n";
        assert_eq!(subject(text).as_deref(), Some("[shop] rollout r-1 is rolling back"));
        assert_eq!(subject("To: c@d\n\nSubject: no\n"), None);
    }
}
