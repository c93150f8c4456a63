#!/usr/bin/env python3
"""Reads a Delta table of the lake with engines we did not write: DuckDB and Polars over its Parquet files.

  read_table.py FOLDER [--sum COLUMN]...

The Delta log is replayed here (checkpoint, then the entries after it), so that nothing of ours is involved. Prints one JSON
line: rows, distinct ids and sums as each engine sees them. Needs duckdb and polars (PyPI).
"""
import argparse
import json
import pathlib
import urllib.parse


def active_files(table):
    """Paths of the files of the newest version."""
    import duckdb

    log = table / "_delta_log"
    files, after = set(), -1
    last = log / "_last_checkpoint"
    if last.exists():
        after = json.loads(last.read_text())["version"]
        parts = [str(p) for p in log.glob(f"{after:020}.checkpoint*.parquet")]
        rows = duckdb.sql(f"SELECT add.path FROM read_parquet({parts}) WHERE add.path IS NOT NULL").fetchall()
        files = {row[0] for row in rows}
    for entry in sorted(log.glob("*.json")):
        if int(entry.stem) <= after:
            continue
        for line in entry.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                files.add(action["add"]["path"])
            elif "remove" in action:
                files.discard(action["remove"]["path"])
    return [str(table / urllib.parse.unquote(f)) for f in sorted(files)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", type=pathlib.Path)
    p.add_argument("--sum", action="append", default=[])
    a = p.parse_args()
    import duckdb
    import polars

    files = active_files(a.table)
    sums = "".join(f", sum({c})" for c in a.sum)
    query = f"SELECT count(*), count(DISTINCT interaction_id){sums} FROM read_parquet({files}, hive_partitioning = true)"
    duck = duckdb.sql(query).fetchall()[0]
    lazy = polars.scan_parquet(files)
    columns = [polars.len(), polars.col("interaction_id").n_unique().alias("ids")]
    columns += [polars.col(c).sum().alias(f"sum_{c}") for c in a.sum]
    pol = lazy.select(columns).collect(engine="streaming").row(0)
    print(json.dumps({"files": len(files), "duckdb": list(duck), "polars": list(pol)}))


main()
