//! Saved and built-in views as tables.

use super::format::{NONE, count};
use super::page::{PageError, PageResult, Visitor, html};
use crate::http::error::{ApiError, PathParams};
use crate::server::Server;
use askama::Template;
use axum::extract::State;
use flywheel_lake::{SqlLimits, SqlResult, built_in};
use flywheel_types::{Error, Role};
use serde_json::Value;
use std::sync::Arc;

/// Rows shown of a view; `/v1/sql` has more.
const ROWS: usize = 200;
/// Longest text of one cell, characters.
const CELL: usize = 200;

#[derive(Template)]
#[template(path = "views.html")]
struct List {
    app: String,
    built_in: Vec<Entry>,
    saved: Vec<Entry>,
    may_read_saved: bool,
}

struct Entry {
    name: String,
    description: String,
}

#[derive(Template)]
#[template(path = "view.html")]
struct Page {
    app: String,
    name: String,
    description: String,
    query: String,
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    truncated: bool,
    shown: usize,
}

#[derive(Clone)]
struct Column {
    name: String,
    class: &'static str,
}

struct Cell {
    column: Column,
    text: String,
}

/// `GET /views`.
pub async fn list(State(server): State<Arc<Server>>, Visitor(who): Visitor) -> PageResult {
    let own = built_in().iter().map(|v| Entry { name: v.name.to_owned(), description: v.description.to_owned() });
    let saved = server.store.view_list(&who.app).await?;
    html(&List {
        built_in: own.collect(),
        saved: saved.into_iter().map(|v| Entry { name: v.name, description: v.description }).collect(),
        may_read_saved: who.require(Role::Operator).is_ok(),
        app: who.app.to_string(),
    })
}

/// `GET /views/{name}`. A saved view may show (masked) texts of people, as SQL may, so it needs the same role.
pub async fn show(
    State(server): State<Arc<Server>>,
    Visitor(who): Visitor,
    name: Result<PathParams<String>, ApiError>,
) -> PageResult {
    let PathParams(name) = name.map_err(|e| PageError(e.0))?;
    let own = built_in().iter().find(|v| v.name == name).map(|v| (v.description.to_owned(), v.query.clone()));
    let (description, query) = match own {
        Some(found) => found,
        None => {
            who.require(Role::Operator)?;
            let saved = server.store.view_list(&who.app).await?.into_iter().find(|v| v.name == name);
            let saved =
                saved.ok_or_else(|| Error::not_found("view_not_found", format!("there is no view `{name}`")))?;
            (saved.description, saved.query)
        }
    };
    let limits = SqlLimits { max_rows: ROWS, ..SqlLimits::default() };
    let result = server.lake.view(server.query_scope(&who.app).await?, &name, &limits).await?;
    let (columns, rows) = table(&result)?;
    html(&Page {
        app: who.app.to_string(),
        name,
        description,
        query,
        columns,
        shown: rows.len(),
        rows,
        truncated: result.truncated,
    })
}

/// Columns and cells of a result.
fn table(result: &SqlResult) -> Result<(Vec<Column>, Vec<Vec<Cell>>), Error> {
    let fields = result.schema.fields();
    let class =
        |f: &str| if f.starts_with("Int") || f.starts_with("UInt") || f.starts_with("Float") { "num" } else { "long" };
    let columns: Vec<Column> =
        fields.iter().map(|f| Column { name: f.name().clone(), class: class(&f.data_type().to_string()) }).collect();
    let cells = |row: Value| columns.iter().map(|c| Cell { column: c.clone(), text: cell(row.get(&c.name)) }).collect();
    let rows = result.to_json()?.into_iter().map(cells).collect();
    Ok((columns, rows))
}

/// A value as people read it.
fn cell(value: Option<&Value>) -> String {
    let text = match value {
        None | Some(Value::Null) => return NONE.into(),
        Some(Value::Number(n)) => match (n.as_u64(), n.as_f64()) {
            (Some(whole), _) => return count(whole),
            (None, Some(real)) if real.fract() != 0.0 => return format!("{real:.4}"),
            _ => n.to_string(),
        },
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let cut = text.chars().count() > CELL;
    text.chars().take(CELL).chain(cut.then_some('…')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn cells_read_as_people_write_them() {
        let got = [json!(null), json!(12_345), json!(-7), json!(0.25), json!(2.0), json!("a"), json!([1, "b"])]
            .map(|v| cell(Some(&v)));
        assert_eq!(got, [NONE, "12,345", "-7", "0.2500", "2.0", "a", "[1,\"b\"]"]);
        assert_eq!(cell(None), NONE);
        assert_eq!(cell(Some(&json!("x".repeat(300)))).chars().count(), CELL + 1);
    }
}
