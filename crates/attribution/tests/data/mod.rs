//! Finds the optional public data sets and reads their simple formats. Tests skip, visibly, when they are absent.
#![allow(dead_code, clippy::print_stdout, reason = "every test file uses its own part; a skipped test says so")]

use std::path::PathBuf;

/// `FLYWHEEL_DATA/<part>` or `../shared/data/<part>` beside the workspace; `None` prints the skip.
pub fn folder(part: &str) -> Option<PathBuf> {
    let root = std::env::var_os("FLYWHEEL_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"), PathBuf::from);
    let path = root.join(part);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: no data at {part} (set FLYWHEEL_DATA)");
    None
}

/// RFC 4180 fields.
pub fn csv(text: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                field.push('"');
                chars.next();
            }
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(std::mem::take(&mut field)),
            '\n' if !quoted => {
                row.push(std::mem::take(&mut field));
                rows.push(std::mem::take(&mut row));
            }
            '\r' if !quoted => {}
            c => field.push(c),
        }
    }
    if !field.is_empty() || !row.is_empty() {
        row.push(field);
        rows.push(row);
    }
    rows
}
