//! What every device did inside one rollout: the input of the gates.

use super::columns::Columns;
use super::{Identity, Labels, parked, time};
use crate::error::LakeError;
use crate::lake::Lake;
use crate::versions::Versions;
use arrow::array::RecordBatch;
use chrono::{DateTime, Utc};
use flywheel_telemetry::Table;
use flywheel_types::assign::Arm;
use flywheel_types::rows::{DeviceHistory, Response};
use flywheel_types::wire::DeviceEventKind;
use flywheel_types::{AppId, Error, LabelKind, RolloutId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// One sign that a device was in the rollout.
struct Sign {
    at: i64,
    arm: Arm,
    phase: u32,
    class: String,
    locale: String,
}

#[derive(Default)]
struct Device {
    signs: Vec<Sign>,
    arms: BTreeSet<Arm>,
    failures: Vec<i64>,
    confirmed_at: Option<i64>,
    /// (receipt, interaction id, detected refusal, ttft).
    responses: Vec<(i64, String, bool, Option<f64>)>,
}

const FAILURES: [DeviceEventKind; 4] =
    [DeviceEventKind::LoadFailed, DeviceEventKind::Crashed, DeviceEventKind::OutOfMemory, DeviceEventKind::FellBack];

impl Lake {
    /// History of every identity that reported anything with an arm of `rollout`, ordered by install and trust class.
    /// Arm, phase, device class and locale are those of the first report by receipt (intention to treat); an answer
    /// counts once however often it was sent; its label is the first feedback of the same identity.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub async fn device_histories(
        &self,
        app: &AppId,
        rollout: &RolloutId,
        as_of: Option<&Versions>,
    ) -> Result<Vec<DeviceHistory>, Error> {
        let mut devices: BTreeMap<Identity, Device> = BTreeMap::new();
        let common = "coalesce(install_id, '') AS install, trust, arm, phase, device_class, locale, received_at";
        let query = format!("SELECT event, {common} FROM device_events WHERE rollout_id = '{rollout}'");
        for batch in self.rows(app, as_of, &[Table::DeviceEvents], &query).await? {
            read_events(&batch, &mut devices)?;
        }
        let query = format!(
            "SELECT interaction_id, detected, ttft_ms, {common} FROM interactions WHERE rollout_id = '{rollout}'"
        );
        for batch in self.rows(app, as_of, &[Table::Interactions], &query).await? {
            read_responses(&batch, &mut devices)?;
        }
        devices.retain(|_, d| !d.signs.is_empty());
        let Some(start) = devices.values().flat_map(|d| d.signs.iter().map(|s| s.at)).min() else {
            return Ok(Vec::new());
        };
        let labels = Labels::load(self, app, as_of, parked(time(start)), DateTime::<Utc>::MAX_UTC).await?;
        let first_seen = self.identities_first_seen(app, as_of).await?;
        Ok(devices.into_iter().filter_map(|(who, d)| history(who, d, &labels, &first_seen)).collect())
    }

    /// First receipt of anything, per identity.
    async fn identities_first_seen(
        &self,
        app: &AppId,
        as_of: Option<&Versions>,
    ) -> Result<HashMap<Identity, i64>, LakeError> {
        let part = |t: &str| {
            format!("SELECT coalesce(install_id, '') AS install, trust, min(received_at) AS at FROM {t} GROUP BY 1, 2")
        };
        let query = format!(
            "SELECT install, trust, min(at) AS at FROM ({} UNION ALL {} UNION ALL {}) GROUP BY install, trust",
            part("interactions"),
            part("feedback"),
            part("device_events")
        );
        let mut out = HashMap::new();
        let tables = [Table::Interactions, Table::Feedback, Table::DeviceEvents];
        for batch in self.rows(app, as_of, &tables, &query).await? {
            let c = Columns::new(&batch);
            let (installs, trust, at) = (c.text("install")?, c.words("trust")?, c.micros("at")?);
            for i in 0..batch.num_rows() {
                if let (Some(trust), Some(at)) = (trust[i], at[i]) {
                    out.insert((installs.get(i).to_owned(), trust), at);
                }
            }
        }
        Ok(out)
    }
}

fn arm(word: &str) -> Option<Arm> {
    [Arm::Control, Arm::Treatment].into_iter().find(|a| a.as_str() == word)
}

/// Visits rows that carry an identity and a receipt, noting the sign of each.
fn each(
    batch: &RecordBatch,
    devices: &mut BTreeMap<Identity, Device>,
    mut visit: impl FnMut(usize, i64, &mut Device),
) -> Result<(), LakeError> {
    let c = Columns::new(batch);
    let (installs, trust, at) = (c.text("install")?, c.words("trust")?, c.micros("received_at")?);
    let (arms, phases, classes, locales) =
        (c.text("arm")?, c.ints("phase")?, c.text("device_class")?, c.text("locale")?);
    for i in 0..batch.num_rows() {
        let (Some(trust), Some(at)) = (trust[i], at[i]) else {
            continue;
        };
        let device = devices.entry((installs.get(i).to_owned(), trust)).or_default();
        if let Some(arm) = arm(arms.get(i)) {
            device.arms.insert(arm);
            device.signs.push(Sign {
                at,
                arm,
                phase: phases[i].and_then(|p| u32::try_from(p).ok()).unwrap_or(0),
                class: classes.get(i).to_owned(),
                locale: locales.get(i).to_owned(),
            });
        }
        visit(i, at, device);
    }
    Ok(())
}

fn read_events(batch: &RecordBatch, devices: &mut BTreeMap<Identity, Device>) -> Result<(), LakeError> {
    let events = Columns::new(batch).text("event")?;
    each(batch, devices, |i, at, device| {
        if FAILURES.iter().any(|f| f.as_str() == events.get(i)) {
            device.failures.push(at);
        }
        if events.get(i) == DeviceEventKind::Confirmed.as_str() {
            device.confirmed_at = Some(device.confirmed_at.map_or(at, |t| t.min(at)));
        }
    })
}

fn read_responses(batch: &RecordBatch, devices: &mut BTreeMap<Identity, Device>) -> Result<(), LakeError> {
    let c = Columns::new(batch);
    let (ids, detected, ttft) = (c.text("interaction_id")?, c.text("detected")?, c.doubles("ttft_ms")?);
    each(batch, devices, |i, at, device| {
        let refused = detected.get(i) == LabelKind::Refused.as_str();
        device.responses.push((at, ids.get(i).to_owned(), refused, ttft[i]));
    })
}

fn history(
    who: Identity,
    mut d: Device,
    labels: &Labels,
    first_seen: &HashMap<Identity, i64>,
) -> Option<DeviceHistory> {
    // Ties by arm: control first, so that the order of rows never matters.
    let first = d.signs.iter().min_by_key(|s| (s.at, s.arm, s.phase, &s.class, &s.locale))?;
    let known = |f: fn(&Sign) -> &String| {
        let mut all: Vec<(i64, &String)> =
            d.signs.iter().map(|s| (s.at, f(s))).filter(|(_, v)| !v.is_empty()).collect();
        all.sort();
        all.first().map(|(_, v)| (*v).clone()).unwrap_or_default()
    };
    let (device_class, locale) = (known(|s| &s.class), known(|s| &s.locale));
    d.responses.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let mut seen = HashSet::new();
    let responses = d.responses.iter().filter(|r| seen.insert(r.1.clone())).map(|(at, id, refused, ttft_ms)| {
        let found = labels.get(id, &who, i64::MAX);
        let label = found.map(|(l, ..)| l);
        Response {
            at: time(*at),
            label,
            label_at: found.map(|(_, label_at, _)| time(label_at)),
            refused: *refused || label == Some(LabelKind::Refused),
            ttft_ms: *ttft_ms,
        }
    });
    let responses = responses.collect();
    d.failures.sort_unstable();
    let seen_at = first_seen.get(&who).copied().unwrap_or(first.at);
    Some(DeviceHistory {
        first_seen: time(seen_at),
        device_class,
        locale,
        arm: first.arm,
        phase: first.phase,
        exposed_at: time(first.at),
        crossed_over: d.arms.len() > 1,
        responses,
        failures: d.failures.iter().map(|t| time(*t)).collect(),
        confirmed_at: d.confirmed_at.map(time),
        trust: who.1,
        install: who.0,
    })
}
