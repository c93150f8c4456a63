//! Named SELECTs that a query uses like tables: those that come with the program, and those that people saved. They stand on
//! the tables of the caller's app and are planned anew for every query that names them, so a view can show nothing that the
//! same text as a query could not. A saved view may name tables and built-in views, no other saved one: there are no cycles.

use crate::error::LakeError;
use crate::lake::{Inner, Lake};
use crate::provider::{Scope, session};
use crate::query::guarded;
use crate::sql::{SqlLimits, SqlResult, plan, plan_error, statement};
use chrono::{DateTime, Utc};
use datafusion::catalog::view::ViewTable;
use datafusion::error::DataFusionError;
use datafusion::execution::session_state::SessionState;
use datafusion::optimizer::Analyzer;
use datafusion::optimizer::analyzer::type_coercion::TypeCoercion;
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error};
use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

/// Whose rows a query sees, and what it may name beside the tables.
#[derive(Debug, Clone)]
pub struct QueryScope {
    pub app: AppId,
    /// What `now()` is; without it the function, and every view that uses it, is refused.
    pub now: Option<DateTime<Utc>>,
    /// Saved views of the app.
    pub views: Vec<SavedView>,
}

impl From<&AppId> for QueryScope {
    fn from(app: &AppId) -> Self {
        Self { app: app.clone(), now: None, views: Vec::new() }
    }
}

/// A SELECT that somebody saved under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedView {
    pub name: String,
    pub query: String,
}

/// A column of a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewColumn {
    pub name: String,
    /// Arrow's name of the type.
    pub kind: String,
}

/// A view that comes with the program.
#[derive(Debug)]
pub struct BuiltInView {
    pub name: &'static str,
    pub description: &'static str,
    pub query: String,
}

/// Longest name of a saved view.
const NAME: usize = 63;
/// Longest text of a saved view, bytes.
const TEXT: usize = 8 << 10;

/// Rows received in the last day. The date prunes the partitions; the moment has exactly the type of the column, so that it
/// prunes files as well.
const LAST_DAY: &str = "received_date >= CAST(now() - INTERVAL '1 day' AS DATE) AND \
                        received_at > arrow_cast(now() - INTERVAL '1 day', 'Timestamp(Microsecond, Some(\"UTC\"))')";
/// Labels of the last day's interactions: a label may come up to 14 days before its interaction.
const LABELS_OF_LAST_DAY: &str = "received_date >= CAST(now() - INTERVAL '15 days' AS DATE) AND \
                                  interaction_at > arrow_cast(now() - INTERVAL '1 day', 'Timestamp(Microsecond, Some(\"UTC\"))')";

static BUILT_IN: LazyLock<[BuiltInView; 4]> = LazyLock::new(|| {
    [
        BuiltInView {
            name: "rejection_rate_24h",
            description: "Answers of the last day and how many of them people rejected, edited, corrected or reported, by \
                          template, bundle, device class and trust class.",
            query: format!(
                "SELECT template_id, bundle, device_class, trust, sum(answers) AS answers, sum(rejected) AS rejected, \
                 CAST(sum(rejected) AS DOUBLE) / nullif(sum(answers), 0) AS rejection_rate \
                 FROM (SELECT template_id, bundle, device_class, trust, count(*) AS answers, 0 AS rejected \
                 FROM interactions WHERE {LAST_DAY} GROUP BY template_id, bundle, device_class, trust \
                 UNION ALL SELECT template_id, bundle, device_class, trust, 0 AS answers, count(*) AS rejected \
                 FROM outcomes WHERE {LABELS_OF_LAST_DAY} AND label IN ('rejected', 'edited', 'corrected', 'reported') \
                 GROUP BY template_id, bundle, device_class, trust) \
                 GROUP BY template_id, bundle, device_class, trust"
            ),
        },
        BuiltInView {
            name: "latency_24h",
            description: "Times to the first token of the last day's answers, by bundle, device class and trust class.",
            query: format!(
                "SELECT bundle, device_class, trust, count(*) AS answers, count(ttft_ms) AS measured, \
                 approx_percentile_cont(0.5) WITHIN GROUP (ORDER BY ttft_ms) AS ttft_p50_ms, \
                 approx_percentile_cont(0.95) WITHIN GROUP (ORDER BY ttft_ms) AS ttft_p95_ms \
                 FROM interactions WHERE {LAST_DAY} GROUP BY bundle, device_class, trust"
            ),
        },
        BuiltInView {
            name: "intake_24h",
            description: "What became of everything that was received in the last day, by source, kind and reason.",
            query: format!(
                "SELECT source, kind, disposition, reason, sum(items) AS items, max(received_at) AS latest \
                 FROM dispositions WHERE {LAST_DAY} GROUP BY source, kind, disposition, reason"
            ),
        },
        BuiltInView {
            name: "metrics_24h",
            description: "Metrics of the last day: data points, senders, and the values of gauges and sums.",
            query: format!(
                "SELECT name, kind, unit, device_class, count(*) AS points, count(DISTINCT install_id) AS installs, \
                 avg(value) AS mean, min(value) AS lowest, max(value) AS highest \
                 FROM (SELECT name, kind, unit, device_class, install_id, \
                 coalesce(value_double, CAST(value_int AS DOUBLE)) AS value FROM metrics WHERE {LAST_DAY}) \
                 GROUP BY name, kind, unit, device_class"
            ),
        },
    ]
});

/// The views that come with the program.
#[must_use]
pub fn built_in() -> &'static [BuiltInView] {
    BUILT_IN.as_slice()
}

impl Lake {
    /// All rows of one view, up to the caps.
    ///
    /// # Errors
    /// `NotFound` for an unknown view; those of [`Lake::sql`].
    pub async fn view(&self, scope: impl Into<QueryScope>, name: &str, limits: &SqlLimits) -> Result<SqlResult, Error> {
        let scope = scope.into();
        if !built_in().iter().any(|v| v.name == name) && !scope.views.iter().any(|v| v.name == name) {
            return Err(Error::not_found("view_not_found", format!("there is no view `{name}`")));
        }
        self.sql(scope, &format!("SELECT * FROM \"{}\"", name.replace('"', "")), limits).await
    }

    /// Whether `query` can be saved as the view `name`: it is planned over the tables and the built-in views, and not run.
    /// Answers its columns.
    ///
    /// # Errors
    /// `Invalid` for a name that is taken or not allowed, a text that is too long, and anything but one valid SELECT.
    pub async fn check_view(&self, scope: impl Into<QueryScope>, view: &SavedView) -> Result<Vec<ViewColumn>, Error> {
        check_name(&view.name)?;
        if view.query.len() > TEXT {
            return Err(bad_view(format!("its text has {} bytes, {TEXT} is the limit", view.query.len())));
        }
        let (inner, scope, view) = (Arc::clone(&self.inner), scope.into(), view.clone());
        let columns = async move {
            let state = open(&inner, &scope).await?;
            // a word of SQL would have to be quoted in every query
            let usable = names(&state, &format!("SELECT * FROM {}", view.name)).is_ok_and(|n| n.contains(&view.name));
            if !usable {
                return Err(bad_name(&view.name, "is a word of SQL"));
            }
            add_built_in(&state, &names(&state, &view.query)?).await?;
            let table = planned(&state, &view.query).await?;
            let fields = datafusion::catalog::TableProvider::schema(&table);
            let columns: Vec<_> = fields.fields().iter().map(column).collect();
            match columns.iter().enumerate().find(|(i, c)| columns[..*i].iter().any(|d| d.name == c.name)) {
                Some((_, twice)) => Err(bad_view(format!("two columns are called `{}`", twice.name))),
                None => Ok(columns),
            }
        };
        guarded(&self.inner, SqlLimits::default().timeout, columns).await
    }
}

fn column(field: &Arc<arrow::datatypes::Field>) -> ViewColumn {
    ViewColumn { name: field.name().clone(), kind: field.data_type().to_string() }
}

/// Lower-case words, so that nobody has to quote them.
fn check_name(name: &str) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty()
        || name.len() > NAME
        || !name.chars().all(plain)
        || name.starts_with(|c: char| c.is_ascii_digit())
    {
        let shown: String = name.chars().take(NAME).collect();
        return Err(bad_name(&shown, "is no such name"));
    }
    if Table::from_name(name).is_some() || built_in().iter().any(|v| v.name == name) {
        return Err(bad_name(name, "is a table or a built-in view"));
    }
    Ok(())
}

fn bad_name(name: &str, why: &str) -> Error {
    let hint = format!("use 1 to {NAME} lower-case letters, digits and `_`, no digit first, and no word that is taken");
    Error::invalid("bad_view_name", format!("a view cannot be called `{name}`: it {why}"), hint)
}

fn bad_view(message: String) -> Error {
    Error::invalid(
        "bad_view",
        message,
        "save one SELECT over the tables and the built-in views, with a name for each column",
    )
}

/// A session of the app in which time stands still.
pub(crate) async fn open(inner: &Inner, scope: &QueryScope) -> Result<SessionState, LakeError> {
    let mut state = session(inner, &scope.app, Scope::Now, &Table::ALL).await?;
    state.execution_props_mut().query_execution_start_time = scope.now;
    Ok(state)
}

/// Adds the views that `query` names. Tables and built-in views cannot be hidden by a saved one.
pub(crate) async fn add(state: &SessionState, query: &str, saved: &[SavedView]) -> Result<(), Error> {
    let mut wanted = names(state, query)?;
    let saved: Vec<&SavedView> =
        saved.iter().filter(|v| wanted.contains(&v.name) && check_name(&v.name).is_ok()).collect();
    for view in &saved {
        wanted.extend(names(state, &view.query).map_err(|e| inside(view, e))?);
    }
    add_built_in(state, &wanted).await?;
    // all are planned before one can be named: a saved view does not see another
    let mut tables = Vec::with_capacity(saved.len());
    for view in saved {
        tables.push((view, planned(state, &view.query).await.map_err(|e| inside(view, e))?));
    }
    for (view, table) in tables {
        register(state, &view.name, table)?;
    }
    Ok(())
}

fn inside(view: &SavedView, mut e: Error) -> Error {
    e.message = format!("the view `{}` does not work any more: {}", view.name, e.message);
    e
}

async fn add_built_in(state: &SessionState, wanted: &HashSet<String>) -> Result<(), Error> {
    for view in built_in().iter().filter(|v| wanted.contains(v.name)) {
        register(state, view.name, planned(state, &view.query).await?)?;
    }
    Ok(())
}

/// What a query names in its FROM clauses and does not define itself.
fn names(state: &SessionState, query: &str) -> Result<HashSet<String>, Error> {
    let found = state.resolve_table_references(&statement(state, query)?).map_err(|e| plan_error(&e))?;
    Ok(found.iter().map(|t| t.table().to_owned()).collect())
}

/// The text as a table. A plan has to have its final types before others build on it.
async fn planned(state: &SessionState, query: &str) -> Result<ViewTable, Error> {
    let plan = plan(state, query).await?;
    let coercion = Analyzer::with_rules(vec![Arc::new(TypeCoercion::new())]);
    let plan = coercion.execute_and_check(plan, state.config_options(), |_, _| {}).map_err(|e| plan_error(&e))?;
    Ok(ViewTable::new(plan, None))
}

fn register(state: &SessionState, name: &str, table: ViewTable) -> Result<(), Error> {
    let done = state.schema_for_ref(name).and_then(|s| s.register_table(name.to_owned(), Arc::new(table)));
    done.map(|_| ()).map_err(|e: DataFusionError| Error::internal(e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flywheel_types::LabelKind;

    #[test]
    fn names_are_words_that_are_free() {
        for good in ["a", "slow_bundles", "x9", &"a".repeat(63)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "9x", "A", "a-b", "a b", "ä", "interactions", "intake_24h", "a\"b", &"a".repeat(64)] {
            assert_eq!(check_name(bad).unwrap_err().code, "bad_view_name", "{bad}");
        }
    }

    #[test]
    fn the_rate_counts_what_is_a_rejection() {
        let text = &built_in()[0].query;
        for label in ["accepted", "rejected", "edited", "corrected", "reported", "refused", "abstained"] {
            let counted = text.contains(&format!("'{label}'"));
            assert_eq!(counted, label.parse::<LabelKind>().unwrap().is_rejection(), "{label}");
        }
    }
}
