//! The fleet as it is: what each device runs, how fast answers are, and what people rejected.

use super::columns::Columns;
use super::{Labels, parked, received_after, time};
use crate::error::LakeError;
use crate::lake::Lake;
use crate::versions::Versions;
use chrono::{DateTime, Utc};
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error, LabelKind, TrustClass};
use std::collections::{BTreeMap, HashSet};

/// One device.
#[derive(Debug, Clone, PartialEq)]
pub struct InventoryRow {
    /// Install id, hex; what the sender claimed when `trust` is anonymous.
    pub install: String,
    pub trust: TrustClass,
    /// Bundle of its latest `confirmed` event.
    pub bundle: Option<String>,
    pub confirmed_at: Option<DateTime<Utc>>,
    /// Latest receipt of anything.
    pub last_seen: DateTime<Utc>,
    pub device_class: String,
}

/// A rejected answer for an annotator.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectedInteraction {
    pub interaction: String,
    pub install: String,
    pub trust: TrustClass,
    pub received_at: DateTime<Utc>,
    pub template: String,
    pub bundle: String,
    pub locale: String,
    /// `chunk_id@version` in rank order.
    pub chunks: Vec<String>,
    /// Masked.
    pub question: Option<String>,
    /// Masked.
    pub answer: Option<String>,
    pub label: LabelKind,
    pub reason: Option<String>,
}

impl Lake {
    /// Every identity that ever reported, ordered by install and trust class. Anonymous senders without an install id
    /// are left out.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn inventory(&self, app: &AppId, as_of: Option<&Versions>) -> Result<Vec<InventoryRow>, Error> {
        let seen = |t: &str, class: &str| {
            format!(
                "SELECT install_id, trust, max(received_at) AS at, \
                 last_value({class} ORDER BY received_at) FILTER (WHERE {class} IS NOT NULL) AS class \
                 FROM {t} WHERE install_id IS NOT NULL GROUP BY install_id, trust"
            )
        };
        let query = format!(
            "WITH s AS ({} UNION ALL {} UNION ALL SELECT install_id, trust, max(received_at), CAST(NULL AS VARCHAR) \
               FROM feedback WHERE install_id IS NOT NULL GROUP BY install_id, trust), \
             seen AS (SELECT install_id, trust, max(at) AS at, \
               last_value(class ORDER BY at) FILTER (WHERE class IS NOT NULL) AS class FROM s GROUP BY install_id, trust), \
             conf AS (SELECT install_id, trust, max(received_at) AS at, last_value(bundle ORDER BY received_at) AS bundle \
               FROM device_events WHERE event = 'confirmed' AND install_id IS NOT NULL GROUP BY install_id, trust) \
             SELECT seen.install_id AS install, seen.trust AS trust, seen.at AS at, seen.class AS class, \
               conf.bundle AS bundle, conf.at AS confirmed \
             FROM seen LEFT JOIN conf ON seen.install_id = conf.install_id AND seen.trust = conf.trust \
             ORDER BY install, trust",
            seen("interactions", "device_class"),
            seen("device_events", "device_class"),
        );
        let tables = [Table::Interactions, Table::Feedback, Table::DeviceEvents];
        let mut out = Vec::new();
        for batch in self.rows(app, as_of, &tables, &query).await? {
            let c = Columns::new(&batch);
            let (installs, trust, at) = (c.text("install")?, c.words("trust")?, c.micros("at")?);
            let (class, bundle, confirmed) = (c.text("class")?, c.text("bundle")?, c.micros("confirmed")?);
            for i in 0..batch.num_rows() {
                let (Some(trust), Some(at)) = (trust[i], at[i]) else {
                    continue;
                };
                out.push(InventoryRow {
                    install: installs.get(i).to_owned(),
                    trust,
                    bundle: bundle.opt(i).map(str::to_owned),
                    confirmed_at: confirmed[i].map(time),
                    last_seen: time(at),
                    device_class: class.get(i).to_owned(),
                });
            }
        }
        Ok(out)
    }

    /// Times to first token (ms) of answers by `bundle` received after `since`, per device class, ascending. Only
    /// senders that proved their identity count.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn latency_samples(
        &self,
        app: &AppId,
        bundle: &flywheel_types::Digest,
        since: DateTime<Utc>,
        as_of: Option<&Versions>,
    ) -> Result<BTreeMap<String, Vec<f64>>, Error> {
        let query = format!(
            "SELECT coalesce(device_class, '') AS class, ttft_ms FROM interactions WHERE bundle = '{bundle}' \
             AND {} AND ttft_ms IS NOT NULL AND trust <> 'anonymous' ORDER BY class, ttft_ms",
            received_after(since)
        );
        let mut out: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for batch in self.rows(app, as_of, &[Table::Interactions], &query).await? {
            let c = Columns::new(&batch);
            let (class, ttft) = (c.text("class")?, c.doubles("ttft_ms")?);
            for (i, value) in ttft.into_iter().enumerate() {
                out.entry(class.get(i).to_owned()).or_default().extend(value);
            }
        }
        Ok(out)
    }

    /// Answers people rejected among those received after `since`, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn rejected_interactions(
        &self,
        app: &AppId,
        since: DateTime<Utc>,
        limit: usize,
        as_of: Option<&Versions>,
    ) -> Result<Vec<RejectedInteraction>, Error> {
        let labels = Labels::load(self, app, as_of, parked(since), DateTime::<Utc>::MAX_UTC).await?;
        let query = format!(
            "SELECT interaction_id, coalesce(install_id, '') AS install, trust, received_at, template_id, bundle, \
             locale, chunk_ids, chunk_versions, question_text, answer_text FROM interactions \
             WHERE {} ORDER BY received_at, install, interaction_id",
            received_after(since)
        );
        let (mut out, mut seen) = (Vec::new(), HashSet::new());
        for batch in self.rows(app, as_of, &[Table::Interactions], &query).await? {
            rejected(&batch, &labels, &mut seen, &mut out)?;
        }
        out.truncate(limit);
        Ok(out)
    }
}

fn rejected(
    batch: &arrow::array::RecordBatch,
    labels: &Labels,
    seen: &mut HashSet<(String, String, TrustClass)>,
    out: &mut Vec<RejectedInteraction>,
) -> Result<(), LakeError> {
    let c = Columns::new(batch);
    let (ids, installs, trust, at) =
        (c.text("interaction_id")?, c.text("install")?, c.words("trust")?, c.micros("received_at")?);
    let (templates, bundles, locales) = (c.text("template_id")?, c.text("bundle")?, c.text("locale")?);
    let (chunks, versions) = (c.text_lists("chunk_ids")?, c.int_lists("chunk_versions")?);
    let (questions, answers) = (c.text("question_text")?, c.text("answer_text")?);
    for i in 0..batch.num_rows() {
        let (Some(trust), Some(at)) = (trust[i], at[i]) else {
            continue;
        };
        let who = (installs.get(i).to_owned(), trust);
        let Some((label, _, reason)) = labels.get(ids.get(i), &who, i64::MAX) else {
            continue;
        };
        if !label.is_rejection() || !seen.insert((ids.get(i).to_owned(), who.0.clone(), trust)) {
            continue;
        }
        let versions = versions[i].iter().copied().chain(std::iter::repeat(0));
        out.push(RejectedInteraction {
            interaction: ids.get(i).to_owned(),
            install: who.0,
            trust,
            received_at: time(at),
            template: templates.get(i).to_owned(),
            bundle: bundles.get(i).to_owned(),
            locale: locales.get(i).to_owned(),
            chunks: chunks[i].iter().zip(versions).map(|(id, v)| format!("{id}@{v}")).collect(),
            question: questions.opt(i).map(str::to_owned),
            answer: answers.opt(i).map(str::to_owned),
            label,
            reason: reason.map(str::to_owned),
        });
    }
    Ok(())
}
