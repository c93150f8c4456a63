//! What was answered and received in the last day, from the built-in views of the same names, for the overview.

use crate::server::Server;
use flywheel_lake::SqlLimits;
use flywheel_types::{AppId, Error, TrustClass};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Answers of one template by one bundle on one class of devices.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Rate {
    pub template_id: Option<String>,
    pub bundle: Option<String>,
    pub device_class: Option<String>,
    trust: TrustClass,
    pub answers: u64,
    pub rejected: u64,
}

impl Rate {
    /// Share of the answers that people rejected.
    pub fn share(&self) -> Option<f64> {
        (self.answers > 0).then(|| self.rejected as f64 / self.answers as f64)
    }
}

/// Received items that ended alike.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Intake {
    pub kind: String,
    pub disposition: String,
    pub reason: Option<String>,
    pub items: u64,
}

/// The last day.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Of senders that proved who they are, most rejected first.
    pub rates: Vec<Rate>,
    /// Most items first.
    pub intake: Vec<Intake>,
}

impl Traffic {
    /// Share of a bundle's answers that people rejected.
    pub fn rejection_rate(&self, bundle: &str) -> Option<f64> {
        let of = self.rates.iter().filter(|r| r.bundle.as_deref() == Some(bundle));
        let (answers, rejected) = of.fold((0, 0), |(a, r), rate| (a + rate.answers, r + rate.rejected));
        (answers > 0).then(|| rejected as f64 / answers as f64)
    }
}

/// Reads the views; `None` when the telemetry cannot be read, which must not hide the rest of the page.
pub async fn load(server: &Server, app: &AppId) -> Option<Traffic> {
    let read = async {
        Ok::<_, Error>((rows(server, app, "rejection_rate_24h").await?, rows(server, app, "intake_24h").await?))
    };
    match read.await {
        Ok((rates, intake)) => Some(arrange(rates, intake)),
        Err(e) => {
            tracing::error!(code = e.code, inside = e.inside, "the traffic of the last day cannot be read");
            None
        }
    }
}

async fn rows<T: DeserializeOwned>(server: &Server, app: &AppId, view: &str) -> Result<Vec<T>, Error> {
    let scope = server.query_scope(app).await?;
    let found = server.lake.view(scope, view, &SqlLimits::default()).await?.to_json()?;
    found.into_iter().map(|row| serde_json::from_value(row).map_err(Error::internal)).collect()
}

/// Template, bundle, device class.
type Group = (Option<String>, Option<String>, Option<String>);

fn arrange(rates: Vec<Rate>, intake: Vec<Intake>) -> Traffic {
    // keyed and attested senders count alike
    let mut proven: BTreeMap<Group, Rate> = BTreeMap::new();
    for rate in rates.into_iter().filter(|r| r.trust != TrustClass::Anonymous) {
        let key = (rate.template_id.clone(), rate.bundle.clone(), rate.device_class.clone());
        let sum = proven.entry(key).or_insert_with(|| Rate { answers: 0, rejected: 0, ..rate.clone() });
        sum.answers += rate.answers;
        sum.rejected += rate.rejected;
    }
    let mut rates: Vec<Rate> = proven.into_values().collect();
    rates.sort_by_key(|r| std::cmp::Reverse((r.rejected, r.answers)));
    // the same item comes from several sources
    let mut ended: BTreeMap<(String, String, Option<String>), u64> = BTreeMap::new();
    for i in intake {
        *ended.entry((i.disposition, i.kind, i.reason)).or_default() += i.items;
    }
    let mut intake: Vec<Intake> = ended
        .into_iter()
        .map(|((disposition, kind, reason), items)| Intake { kind, disposition, reason, items })
        .collect();
    intake.sort_by_key(|i| std::cmp::Reverse(i.items));
    Traffic { rates, intake }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(bundle: &str, class: &str, trust: TrustClass, answers: u64, rejected: u64) -> Rate {
        Rate {
            template_id: None,
            bundle: Some(bundle.into()),
            device_class: Some(class.into()),
            trust,
            answers,
            rejected,
        }
    }

    #[test]
    fn proven_senders_are_added_up_and_the_others_left_out() {
        let item = |kind: &str, items| Intake { kind: kind.into(), disposition: "stored".into(), reason: None, items };
        let got = arrange(
            vec![
                rate("a", "low", TrustClass::Keyed, 10, 1),
                rate("a", "low", TrustClass::Attested, 30, 2),
                rate("a", "high", TrustClass::Keyed, 60, 7),
                rate("b", "high", TrustClass::Anonymous, 5, 5),
            ],
            vec![item("interaction", 3), item("metric", 9), item("interaction", 4)],
        );
        let shown: Vec<(u64, u64)> = got.rates.iter().map(|r| (r.answers, r.rejected)).collect();
        assert_eq!(shown, [(60, 7), (40, 3)]);
        assert_eq!((got.rejection_rate("a"), got.rejection_rate("b")), (Some(0.1), None));
        assert_eq!(got.intake, [item("metric", 9), item("interaction", 7)]);
    }
}
