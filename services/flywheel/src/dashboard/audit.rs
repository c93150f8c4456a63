//! The audit log by pages, newest first, and the check of its hash chain.

use super::format::{json, short, time};
use super::page::{PageError, PageResult, Visitor, html};
use crate::server::Server;
use askama::Template;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use flywheel_store::audit::{AuditCheck, AuditRow};
use flywheel_types::{Error, Role};
use serde::Deserialize;
use std::sync::Arc;

/// Entries on a page.
const PAGE: u32 = 100;
/// Longest detail shown at once and unfolded, characters; the API has all of it.
const SHORT: usize = 160;
const DETAIL: usize = 4000;

#[derive(Debug, Deserialize)]
pub struct Which {
    before: Option<i64>,
    /// Recompute the chain.
    #[serde(default)]
    check: bool,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct Page {
    app: String,
    entries: Vec<Entry>,
    /// Number to go on before, when there is more.
    older: Option<i64>,
    paged: bool,
    may_check: bool,
    check: Option<Check>,
}

struct Entry {
    seq: i64,
    at: String,
    actor: String,
    action: String,
    subject: String,
    /// Its start; the whole is there when this is not all of it.
    detail: String,
    whole: Option<String>,
    hash: String,
}

struct Check {
    intact: bool,
    text: String,
}

/// `GET /audit`.
pub async fn show(
    State(server): State<Arc<Server>>,
    Visitor(who): Visitor,
    which: Result<Query<Which>, QueryRejection>,
) -> PageResult {
    let Query(which) = which.map_err(|e| {
        PageError(Error::invalid("bad_query", e.body_text(), "use the links on the page of the audit log"))
    })?;
    let rows = server.store.audit_list(&who.app, which.before, PAGE).await?;
    let older = rows.last().map(|r| r.seq).filter(|s| *s > 1 && rows.len() == PAGE as usize);
    let check = if which.check {
        who.require(Role::Operator)?;
        Some(check(&server.store.audit_verify(&who.app).await?))
    } else {
        None
    };
    html(&Page {
        app: who.app.to_string(),
        entries: rows.into_iter().map(entry).collect(),
        older,
        paged: which.before.is_some(),
        may_check: who.require(Role::Operator).is_ok(),
        check,
    })
}

fn entry(r: AuditRow) -> Entry {
    let (detail, whole) = (json(&r.detail, SHORT), json(&r.detail, DETAIL));
    Entry {
        seq: r.seq,
        at: time(r.at),
        actor: r.actor,
        action: r.action,
        subject: r.subject,
        whole: (whole != detail).then_some(whole),
        detail,
        hash: short(&r.hash.to_hex()),
    }
}

fn check(found: &AuditCheck) -> Check {
    match found {
        AuditCheck::Intact { entries, head } => Check {
            intact: true,
            text: format!("All {entries} entries fit together. Note the newest hash outside from time to time: {head}"),
        },
        AuditCheck::Broken { seq, reason } => {
            let text = format!("Entry {seq} does not fit: {reason}. The log was changed outside of this program.");
            Check { intact: false, text }
        }
    }
}
