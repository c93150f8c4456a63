//! The tidy rules: arrows between crates, who may name which dependency, a `//!` line on every file, and size
//! budgets. Data-driven, so that the table here is the table in ARCHITECTURE.md.

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, MetadataCommand, Package};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Workspace arrows: member → members it may use (DESIGN.md 3).
const ARROWS: &[(&str, &[&str])] = &[
    ("flywheel-types", &[]),
    ("flywheel-inference", &["flywheel-types"]),
    ("flywheel-attribution", &["flywheel-types"]),
    ("flywheel-experiment", &["flywheel-types"]),
    ("flywheel-bundle", &["flywheel-types"]),
    ("flywheel-sdk", &["flywheel-types", "flywheel-bundle"]),
    ("flywheel-store", &["flywheel-types"]),
    ("flywheel-telemetry", &["flywheel-types"]),
    ("flywheel-jobs", &["flywheel-store", "flywheel-types"]),
    ("flywheel-lake", &["flywheel-telemetry", "flywheel-types"]),
    (
        "flywheel",
        &[
            "flywheel-types",
            "flywheel-inference",
            "flywheel-attribution",
            "flywheel-experiment",
            "flywheel-bundle",
            "flywheel-store",
            "flywheel-telemetry",
            "flywheel-lake",
            "flywheel-jobs",
        ],
    ),
    ("fleet-sim", &["flywheel-sdk", "flywheel-inference", "flywheel-types"]),
];

/// Members outside the tiers: they may use everything.
const FREE: &[&str] = &["flywheel-tests", "flywheel-fuzz", "xtask"];

/// Dependency (exact, or a family with a trailing `-`) → the only members that may name it outside tests.
const NAMED_BY: &[(&str, &[&str])] = &[
    ("arrow", &["flywheel-telemetry", "flywheel-lake"]),
    // Flight SQL (docs/adr/009): its messages and its encoder; the rows stay the lake's.
    ("arrow-flight", &["flywheel"]),
    ("tonic", &["flywheel"]),
    ("arrow-", &["flywheel-telemetry", "flywheel-lake"]),
    ("parquet", &["flywheel-telemetry", "flywheel-lake"]),
    ("datafusion", &["flywheel-lake"]),
    ("datafusion-", &["flywheel-lake"]),
    ("deltalake", &["flywheel-lake"]),
    ("deltalake-", &["flywheel-lake"]),
    ("sqlx", &["flywheel-store"]),
    ("axum", &["flywheel"]),
    ("lettre", &["flywheel"]),
    ("llama-cpp-2", &["flywheel-inference"]),
];

/// Hard cap of a source file, lines.
const MAX_LINES: usize = 800;
/// Budget of the median source file, lines.
const MEDIAN_LINES: usize = 150;

/// All problems of the workspace at `root`, each one sentence.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let meta = MetadataCommand::new()
        .current_dir(root)
        .no_deps()
        .other_options(vec!["--offline".into()])
        .exec()
        .context("cargo metadata failed")?;
    let deps: BTreeMap<String, BTreeSet<String>> =
        meta.packages.iter().map(|p| (p.name.to_string(), normal_dependencies(p))).collect();
    let mut problems = arrow_problems(&deps);
    problems.extend(naming_problems(&deps));
    problems.extend(file_problems(root)?);
    problems.extend(crate::docs::stale(root));
    Ok(problems)
}

fn normal_dependencies(package: &Package) -> BTreeSet<String> {
    package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development).map(|d| d.name.clone()).collect()
}

fn arrow_problems(deps: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut out = Vec::new();
    for (member, uses) in deps {
        if FREE.contains(&member.as_str()) {
            continue;
        }
        let Some((_, allowed)) = ARROWS.iter().find(|(m, _)| m == member) else {
            out.push(format!("member `{member}` has no row in the arrow table (xtask/src/tidy.rs)"));
            continue;
        };
        for used in uses.iter().filter(|u| deps.contains_key(*u)) {
            if !allowed.contains(&used.as_str()) {
                out.push(format!("`{member}` must not depend on `{used}` (DESIGN: arrows)"));
            }
        }
    }
    out
}

fn naming_problems(deps: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut out = Vec::new();
    for (member, uses) in deps {
        for used in uses {
            let rule =
                NAMED_BY.iter().find(|(name, _)| *name == used || (name.ends_with('-') && used.starts_with(name)));
            if let Some((_, allowed)) = rule
                && !allowed.contains(&member.as_str())
            {
                out.push(format!("only {} may name `{used}`, but `{member}` does", allowed.join(", ")));
            }
        }
    }
    out
}

fn file_problems(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for top in ["crates", "services", "tests", "xtask"] {
        collect(&root.join(top), &mut files)?;
    }
    let (mut out, mut sizes) = (Vec::new(), Vec::new());
    for path in files {
        let text = fs::read_to_string(&path)?;
        let shown = path.strip_prefix(root).unwrap_or(&path).display();
        let lines = text.lines().count();
        sizes.push(lines);
        if !text.starts_with("//!") {
            out.push(format!("{shown}: the first line is not a `//!` that says what the file is for"));
        }
        if lines > MAX_LINES {
            out.push(format!("{shown}: {lines} lines, the cap is {MAX_LINES}"));
        }
    }
    sizes.sort_unstable();
    let median = sizes.get(sizes.len() / 2).copied().unwrap_or(0);
    if median > MEDIAN_LINES {
        out.push(format!("the median file has {median} lines, the budget is {MEDIAN_LINES}"));
    }
    Ok(out)
}

fn collect(dir: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|n| n != "target") {
                collect(&path, out)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &[&str])]) -> BTreeMap<String, BTreeSet<String>> {
        edges.iter().map(|(m, u)| ((*m).to_owned(), u.iter().map(|x| (*x).to_owned()).collect())).collect()
    }

    #[test]
    fn the_workspace_is_tidy() {
        let problems = check(&crate::process::root()).unwrap();
        assert!(problems.is_empty(), "{problems:#?}");
    }

    #[test]
    fn a_broken_arrow_is_found() {
        let ok = graph(&[("flywheel-types", &[]), ("flywheel-store", &["flywheel-types", "sqlx"])]);
        assert!(arrow_problems(&ok).is_empty());
        let broken =
            graph(&[("flywheel-types", &[]), ("flywheel-store", &[]), ("flywheel-experiment", &["flywheel-store"])]);
        assert_eq!(
            arrow_problems(&broken),
            ["`flywheel-experiment` must not depend on `flywheel-store` (DESIGN: arrows)"]
        );
    }

    #[test]
    fn a_new_member_needs_a_row() {
        assert_eq!(arrow_problems(&graph(&[("flywheel-common", &[])])).len(), 1);
    }

    #[test]
    fn a_dependency_in_the_wrong_crate_is_found() {
        let g = graph(&[("flywheel-attribution", &["arrow-array"]), ("flywheel-lake", &["arrow-array"])]);
        assert_eq!(
            naming_problems(&g),
            ["only flywheel-telemetry, flywheel-lake may name `arrow-array`, but `flywheel-attribution` does"]
        );
    }

    #[test]
    fn an_undocumented_file_and_a_huge_file_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let src = dir.path().join("crates/x/src");
        fs::create_dir_all(&src).unwrap();
        fs::write(src.join("a.rs"), "fn a() {}\n").unwrap();
        fs::write(src.join("b.rs"), format!("//! b\n{}", "\n".repeat(MAX_LINES))).unwrap();
        let problems = file_problems(dir.path()).unwrap();
        assert!(problems.iter().any(|p| p.contains("a.rs: the first line")), "{problems:?}");
        assert!(problems.iter().any(|p| p.contains("b.rs: 801 lines")), "{problems:?}");
    }
}
