#!/usr/bin/env python3
"""Reads the lake with the ADBC driver for Flight SQL, which is not ours, and holds its rows against POST /v1/sql.

  flight_sql.py --flight grpc://HOST:PORT --http http://HOST:PORT --token T --other-app T --viewer T

Prints one JSON line. Needs adbc-driver-flightsql, adbc-driver-manager and pyarrow (PyPI).
"""
import argparse
import datetime
import json
import threading
import time
import urllib.request

QUERIES = [
    "SELECT count(*) AS n, sum(ttft_ms) AS total FROM interactions",
    "SELECT interaction_id, template_id, ttft_ms, input_tokens, received_at, chunk_ids, question_text"
    " FROM interactions ORDER BY interaction_id",
    "SELECT trust, count(*) AS n, avg(ttft_ms) AS mean FROM interactions GROUP BY trust ORDER BY trust",
    "SELECT interaction_id FROM interactions WHERE false",
    "SELECT CAST(1 AS INT) AS i, true AS b, CAST(NULL AS VARCHAR) AS s, DATE '2026-03-02' AS d",
]
# never true, and asked of more than 10^12 pairs
SLOW = "WITH x AS (SELECT a.ttft_ms + b.ttft_ms + c.ttft_ms AS t FROM interactions a, interactions b, interactions c" \
       " WHERE c.interaction_id < 'i-11') SELECT count(*) FROM x JOIN x AS y ON x.t + y.t < 0"


def over_http(a, query):
    body = json.dumps({"query": query}).encode()
    headers = {"authorization": f"Bearer {a.token}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{a.http}/v1/sql", body, headers)) as answer:
        return json.load(answer)["rows"]


def plain(value, like):
    """A Python value of Arrow as JSON would have it."""
    if isinstance(value, datetime.datetime):
        # RFC 3339 has one instant in several spellings
        return like if datetime.datetime.fromisoformat(like.replace("Z", "+00:00")) == value else value.isoformat()
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value


def rows_of(cursor, query, expected):
    cursor.execute(query)
    table = cursor.fetch_arrow_table()
    rows = list(zip(*[column.to_pylist() for column in table.columns]))
    assert len(rows) == len(expected), (query, rows, expected)
    return [[plain(v, like) for v, like in zip(row, want)] for row, want in zip(rows, expected)]


def code_of(action):
    """The status that a call fails with."""
    import adbc_driver_manager

    try:
        action()
    except adbc_driver_manager.Error as e:
        return e.status_code.name
    return "OK"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["flight", "http", "token", "other-app", "viewer"]:
        p.add_argument(f"--{name}", required=True)
    a = p.parse_args()
    import adbc_driver_flightsql.dbapi as flight_sql
    from adbc_driver_flightsql import DatabaseOptions

    def connect(token, **more):
        kwargs = {DatabaseOptions.AUTHORIZATION_HEADER.value: f"Bearer {token}"} if token else {}
        return flight_sql.connect(a.flight, db_kwargs=kwargs | more, autocommit=True)

    def count(connection):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM interactions")
            return cursor.fetchone()[0]

    out = {"same": 0}
    with connect(a.token) as connection, connection.cursor() as cursor:
        for query in QUERIES:
            expected = over_http(a, query)
            found = rows_of(cursor, query, expected)
            assert found == expected, (query, found, expected)
            out["same"] += 1
        out["ids"] = [row[0] for row in over_http(a, QUERIES[1])]
        schema = cursor.adbc_prepare("SELECT interaction_id FROM interactions ORDER BY 1")
        out["prepared_parameters"] = None if schema is None else len(schema)
        cursor.execute("SELECT interaction_id FROM interactions ORDER BY 1")
        out["prepared"] = [row[0] for row in cursor.fetchall()]
        objects = connection.adbc_get_objects(depth="all").read_all().to_pylist()
        out["catalogs"] = [c["catalog_name"] for c in objects]
        out["schemas"] = [s["db_schema_name"] for s in objects[0]["catalog_db_schemas"]]
        tables = objects[0]["catalog_db_schemas"][0]["db_schema_tables"]
        out["tables"] = sorted(t["table_name"] for t in tables)
        listed = next(t for t in tables if t["table_name"] == "interactions")
        cursor.execute("SELECT * FROM interactions LIMIT 0")
        selected = cursor.fetch_arrow_table().schema
        assert [c["column_name"] for c in listed["table_columns"]] == selected.names
        assert connection.adbc_get_table_schema("interactions").equals(selected)
        out["columns"] = len(selected.names)
        out["table_types"] = connection.adbc_get_table_types()
        out["server"] = connection.adbc_get_info()["vendor_name"]
        out["insert"] = code_of(lambda: cursor.execute("INSERT INTO interactions SELECT * FROM interactions"))
        out["too_many_rows"] = code_of(
            lambda: (cursor.execute("SELECT a.interaction_id FROM interactions a, interactions b, interactions c"),
                     cursor.fetch_arrow_table()))

    with connect(None, username="anybody", password=a.token) as connection:
        out["with_password"] = count(connection)
    with connect(a.other_app) as connection:
        out["other_app"] = count(connection)
    out["wrong_token"] = code_of(lambda: count(connect("wrong")))
    out["wrong_password"] = code_of(lambda: count(connect(None, username="anybody", password="wrong")))
    out["viewer"] = code_of(lambda: count(connect(a.viewer)))

    with connect(a.token) as connection, connection.cursor() as cursor:
        began = []

        def cancel():
            began.append(time.monotonic())
            cursor.adbc_cancel()

        timer = threading.Timer(1.0, cancel)
        timer.start()
        out["cancelled"] = code_of(lambda: (cursor.execute(SLOW), cursor.fetch_arrow_table()))
        out["cancelled_after_s"] = time.monotonic() - began[0]
        timer.join()
    print(json.dumps(out))


main()
