-- Erasure of people: the secret that makes user keys, who asked to be forgotten and what was done, and on whose records there
-- is a hold. The subject of an erasure is kept only until it is done; its digest stays for the receipt.

CREATE TABLE salts (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE erasures (
    app_id         TEXT NOT NULL,
    erasure_id     TEXT NOT NULL,
    subject_kind   TEXT NOT NULL,
    subject        TEXT,
    subject_digest TEXT NOT NULL,
    reason         TEXT NOT NULL,
    requested_by   TEXT NOT NULL,
    state          TEXT NOT NULL,
    progress       TEXT NOT NULL,
    receipt        TEXT,
    requested_at   INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    PRIMARY KEY (app_id, erasure_id)
) STRICT;
CREATE INDEX erasures_open ON erasures (app_id, state);

CREATE TABLE legal_holds (
    app_id       TEXT NOT NULL,
    name         TEXT NOT NULL,
    subject_kind TEXT NOT NULL,
    subject      TEXT NOT NULL,
    reason       TEXT NOT NULL,
    created_by   TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (app_id, name)
) STRICT;
