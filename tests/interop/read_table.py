#!/usr/bin/env python3
"""Reads a Delta table of the lake with engines we did not write.

  read_table.py FOLDER [--sum COLUMN]... [--profile]

DuckDB reads the Parquet files that a replay of the Delta log names (checkpoint, then the entries after it; done here, so that
nothing of ours is involved). Polars reads the table through `deltalake` where that is installed, else the same files. Prints one
JSON line: `files`, and as each engine sees it rows, distinct ids and sums, or with --profile a few numbers for every column:

  number    values, sum, least, greatest
  flag      values, how many are true
  time, day values, first, last (microseconds, days since 1970)
  text      values, bytes
  list      lists, elements, sum or bytes of the elements
  map       maps, entries, bytes of keys and values

A NULL is no value. Needs duckdb and polars (PyPI).
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


def with_duckdb(files):
    import duckdb

    types = "{'app': VARCHAR, 'received_date': DATE}"
    source = f"read_parquet({files}, hive_partitioning = true, hive_types = {types}, union_by_name = true)"
    return lambda columns: duckdb.sql(f"SELECT {', '.join(columns)} FROM {source}")


def duckdb_columns(ask):
    """Name and kind of every column."""
    out = []
    for name, kind in zip((r := ask(["*"])).columns, map(str, r.types)):
        if kind.endswith("[]"):
            kind = "text_list" if kind == "VARCHAR[]" else "number_list"
        elif kind.startswith("MAP"):
            kind = "map"
        else:
            words = {"VARCHAR": "text", "BOOLEAN": "flag", "DATE": "day"}
            kind = words.get(kind, "time" if kind.startswith("TIMESTAMP") else "number")
        out.append((name, kind))
    return out


def duckdb_profile(name, kind):
    c = f'"{name}"'
    strings = lambda list_: f"coalesce(sum(list_sum(list_transform({list_}, lambda x: strlen(x)))), 0)::BIGINT"
    more = {
        "number": [f"sum({c})", f"min({c})", f"max({c})"],
        "flag": [f"coalesce(count_if({c}), 0)"],
        "time": [f"epoch_us(min({c}))", f"epoch_us(max({c}))"],
        "day": [f"datediff('day', DATE '1970-01-01', {f}({c}))" for f in ("min", "max")],
        "text": [f"coalesce(sum(strlen({c})), 0)::BIGINT"],
        "text_list": [f"coalesce(sum(len({c})), 0)::BIGINT", strings(c)],
        "number_list": [
            f"coalesce(sum(len({c})), 0)::BIGINT",
            f"coalesce(sum(list_sum(list_transform({c}, lambda x: x::DOUBLE))), 0)",
        ],
        "map": [
            f"coalesce(sum(cardinality({c})), 0)::BIGINT",
            f"{strings(f'map_keys({c})')} + {strings(f'map_values({c})')}",
        ],
    }
    return [f"count({c})", *more[kind]]


def with_polars(table, files):
    import polars

    try:
        import deltalake  # noqa: F401
    except ImportError:
        return polars.scan_parquet(files, hive_partitioning=True)
    return polars.scan_delta(str(table))


def polars_profile(name, kind):
    import polars

    c = polars.col(name)
    inner = c.explode()
    bytes_ = lambda e: e.str.len_bytes().cast(polars.Int64).sum()
    length = c.list.len().cast(polars.Int64).sum()
    pairs = c.cast(polars.List(polars.Struct({"key": polars.String, "value": polars.String})))
    field = lambda n: bytes_(pairs.explode().struct.field(n))
    more = {
        "number": [c.sum(), c.min(), c.max()],
        "flag": [c.cast(polars.Int64).sum()],
        "time": [c.dt.epoch("us").min(), c.dt.epoch("us").max()],
        "day": [c.cast(polars.Int32).min(), c.cast(polars.Int32).max()],
        "text": [bytes_(c)],
        "text_list": [length, bytes_(inner)],
        "number_list": [length, inner.cast(polars.Float64).sum()],
        "map": [pairs.list.len().cast(polars.Int64).sum(), field("key") + field("value")],
    }
    return [c.count(), *more[kind]]


def profile(ask, lazy):
    """The numbers of every column: by DuckDB, by Polars."""
    import polars

    kinds = duckdb_columns(ask)
    duck = {name: list(ask(duckdb_profile(name, kind)).fetchall()[0]) for name, kind in kinds}
    narrow = {n: polars.Int64 for n, t in lazy.collect_schema().items() if t.is_integer()}
    lazy, pol = lazy.cast(narrow), {}
    for name, kind in kinds:
        wanted = [e.alias(str(i)) for i, e in enumerate(polars_profile(name, kind))]
        found = list(lazy.select(wanted).collect().row(0))
        # a sum over no values is NULL elsewhere
        pol[name] = [found[0], None, *found[2:]] if kind == "number" and found[0] == 0 else found
    return {"kinds": dict(kinds), "duckdb": duck, "polars": pol}


def summary(ask, lazy, sums):
    """Rows, distinct ids and sums."""
    import polars

    duck = ask(["count(*)", "count(DISTINCT interaction_id)", *(f"sum({c})" for c in sums)]).fetchall()[0]
    columns = [polars.len(), polars.col("interaction_id").n_unique().alias("ids")]
    columns += [polars.col(c).sum().alias(f"sum_{c}") for c in sums]
    return {"duckdb": list(duck), "polars": list(lazy.select(columns).collect(engine="streaming").row(0))}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", type=pathlib.Path)
    p.add_argument("--sum", action="append", default=[])
    p.add_argument("--profile", action="store_true")
    a = p.parse_args()
    files = active_files(a.table)
    out = {"files": len(files)}
    if files:
        ask, lazy = with_duckdb(files), with_polars(a.table, files)
        out |= profile(ask, lazy) if a.profile else summary(ask, lazy, a.sum)
    print(json.dumps(out, default=float))


main()
