-- Control database, first version. Times are microseconds since the Unix epoch in UTC, flags are 0 or 1,
-- JSON and digests are text. `migrations/sqlite` holds the same tables; only the type names differ.

CREATE TABLE apps (
    app_id     TEXT PRIMARY KEY,
    settings   TEXT NOT NULL,
    version    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
);

CREATE TABLE tokens (
    token_id   TEXT PRIMARY KEY,
    app_id     TEXT REFERENCES apps (app_id),
    name       TEXT NOT NULL,
    role       TEXT NOT NULL,
    secret     TEXT NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT
);

CREATE TABLE ingest_keys (
    key_id     TEXT PRIMARY KEY,
    app_id     TEXT NOT NULL REFERENCES apps (app_id),
    name       TEXT NOT NULL,
    secret     TEXT NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
CREATE INDEX ingest_keys_app ON ingest_keys (app_id);

CREATE TABLE audit_heads (
    app_id TEXT PRIMARY KEY,
    seq    BIGINT NOT NULL,
    hash   TEXT NOT NULL
);

CREATE TABLE audit (
    app_id    TEXT NOT NULL,
    seq       BIGINT NOT NULL,
    at        BIGINT NOT NULL,
    actor     TEXT NOT NULL,
    action    TEXT NOT NULL,
    subject   TEXT NOT NULL,
    detail    TEXT NOT NULL,
    prev_hash TEXT NOT NULL,
    hash      TEXT NOT NULL,
    PRIMARY KEY (app_id, seq)
);
CREATE INDEX audit_subject ON audit (app_id, subject, seq);

CREATE TABLE cursors (
    step          TEXT NOT NULL,
    app_id        TEXT NOT NULL,
    table_name    TEXT NOT NULL,
    delta_version BIGINT NOT NULL,
    updated_at    BIGINT NOT NULL,
    PRIMARY KEY (step, app_id, table_name)
);

CREATE TABLE chunks (
    app_id       TEXT NOT NULL,
    chunk_id     TEXT NOT NULL,
    version      BIGINT NOT NULL,
    state        TEXT NOT NULL,
    collection   TEXT NOT NULL,
    source       TEXT NOT NULL,
    tags         TEXT NOT NULL,
    text         TEXT,
    text_digest  TEXT NOT NULL,
    embedding    TEXT,
    canary_salt  TEXT,
    canary_ppm   BIGINT NOT NULL DEFAULT 0,
    state_since  BIGINT NOT NULL,
    ttl_until    BIGINT,
    finding_id   TEXT,
    created_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL,
    PRIMARY KEY (app_id, chunk_id)
);
CREATE INDEX chunks_state ON chunks (app_id, state);

CREATE TABLE chunk_versions (
    app_id      TEXT NOT NULL,
    chunk_id    TEXT NOT NULL,
    version     BIGINT NOT NULL,
    source      TEXT NOT NULL,
    text        TEXT,
    text_digest TEXT NOT NULL,
    created_at  BIGINT NOT NULL,
    PRIMARY KEY (app_id, chunk_id, version)
);

CREATE TABLE index_heads (
    app_id        TEXT PRIMARY KEY,
    index_version BIGINT NOT NULL
);

CREATE TABLE index_changes (
    app_id        TEXT NOT NULL,
    index_version BIGINT NOT NULL,
    chunk_id      TEXT NOT NULL,
    chunk_version BIGINT NOT NULL,
    state         TEXT NOT NULL,
    collection    TEXT NOT NULL,
    text          TEXT,
    text_digest   TEXT NOT NULL,
    embedding     TEXT,
    canary_salt   TEXT,
    canary_ppm    BIGINT NOT NULL,
    at            BIGINT NOT NULL,
    PRIMARY KEY (app_id, index_version)
);

CREATE TABLE templates (
    app_id      TEXT NOT NULL,
    template_id TEXT NOT NULL,
    version     BIGINT NOT NULL,
    name        TEXT NOT NULL,
    text        TEXT NOT NULL,
    text_digest TEXT NOT NULL,
    tags        TEXT NOT NULL,
    created_at  BIGINT NOT NULL,
    updated_at  BIGINT NOT NULL,
    PRIMARY KEY (app_id, template_id)
);

CREATE TABLE findings (
    app_id      TEXT NOT NULL,
    finding_id  TEXT NOT NULL,
    kind        TEXT NOT NULL,
    subject     TEXT NOT NULL,
    version     BIGINT NOT NULL,
    state       TEXT NOT NULL,
    evidence    TEXT NOT NULL,
    reason      TEXT,
    opened_at   BIGINT NOT NULL,
    state_since BIGINT NOT NULL,
    updated_at  BIGINT NOT NULL,
    PRIMARY KEY (app_id, finding_id),
    UNIQUE (app_id, kind, subject, version)
);
CREATE INDEX findings_state ON findings (app_id, state, opened_at);

CREATE TABLE attribution_state (
    app_id     TEXT PRIMARY KEY,
    blob       TEXT NOT NULL,
    step       BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
);

CREATE TABLE corrections (
    app_id           TEXT NOT NULL,
    correction_id    TEXT NOT NULL,
    interaction_id   TEXT NOT NULL,
    install_id       TEXT,
    template_id      TEXT,
    prompt           TEXT NOT NULL,
    chunk_ids        TEXT NOT NULL,
    wrong_answer     TEXT NOT NULL,
    corrected_answer TEXT NOT NULL,
    state            TEXT NOT NULL,
    spans            TEXT,
    reason           TEXT,
    dataset          TEXT,
    created_at       BIGINT NOT NULL,
    updated_at       BIGINT NOT NULL,
    PRIMARY KEY (app_id, correction_id),
    UNIQUE (app_id, interaction_id)
);
CREATE INDEX corrections_state ON corrections (app_id, state, created_at);

CREATE TABLE correction_votes (
    app_id        TEXT NOT NULL,
    correction_id TEXT NOT NULL,
    annotator     TEXT NOT NULL,
    trusted       BIGINT NOT NULL,
    answer        TEXT NOT NULL,
    at            BIGINT NOT NULL,
    PRIMARY KEY (app_id, correction_id, annotator)
);

CREATE TABLE datasets (
    app_id       TEXT NOT NULL,
    digest       TEXT NOT NULL,
    object_path  TEXT NOT NULL,
    counts       TEXT NOT NULL,
    created_at   BIGINT NOT NULL,
    tombstone_at BIGINT,
    tombstone    TEXT,
    successor    TEXT,
    PRIMARY KEY (app_id, digest)
);

CREATE TABLE candidates (
    app_id       TEXT NOT NULL,
    candidate_id TEXT NOT NULL,
    state        TEXT NOT NULL,
    kind         TEXT NOT NULL,
    base         TEXT,
    artefact     TEXT NOT NULL,
    object_path  TEXT NOT NULL,
    size_bytes   BIGINT NOT NULL,
    dataset      TEXT,
    source       TEXT NOT NULL,
    job_id       TEXT,
    attempt      BIGINT,
    report       TEXT NOT NULL,
    created_by   TEXT NOT NULL,
    reason       TEXT,
    created_at   BIGINT NOT NULL,
    state_since  BIGINT NOT NULL,
    PRIMARY KEY (app_id, candidate_id)
);
CREATE INDEX candidates_state ON candidates (app_id, state, created_at);

CREATE TABLE evaluations (
    app_id        TEXT NOT NULL,
    evaluation_id TEXT NOT NULL,
    candidate_id  TEXT NOT NULL,
    verdict       TEXT NOT NULL,
    spec          TEXT NOT NULL,
    report        TEXT NOT NULL,
    source        TEXT NOT NULL,
    job_id        TEXT,
    attempt       BIGINT,
    created_at    BIGINT NOT NULL,
    PRIMARY KEY (app_id, evaluation_id),
    FOREIGN KEY (app_id, candidate_id) REFERENCES candidates (app_id, candidate_id)
);
CREATE INDEX evaluations_candidate ON evaluations (app_id, candidate_id, created_at);

CREATE TABLE releases (
    app_id         TEXT NOT NULL,
    manifest       TEXT NOT NULL,
    manifest_text  TEXT NOT NULL,
    kind           TEXT NOT NULL,
    candidate_id   TEXT,
    security_epoch BIGINT NOT NULL,
    state          TEXT NOT NULL,
    reason         TEXT,
    decided_by     TEXT,
    requested_at   BIGINT NOT NULL,
    decided_at     BIGINT,
    completed_at   BIGINT,
    PRIMARY KEY (app_id, manifest)
);
CREATE INDEX releases_state ON releases (app_id, state, requested_at);

CREATE TABLE rollouts (
    app_id       TEXT NOT NULL,
    rollout_id   TEXT NOT NULL,
    candidate_id TEXT,
    treatment    TEXT NOT NULL,
    control      TEXT,
    state        TEXT NOT NULL,
    generation   BIGINT NOT NULL,
    policy       TEXT NOT NULL,
    reason       TEXT,
    created_by   TEXT NOT NULL,
    created_at   BIGINT NOT NULL,
    state_since  BIGINT NOT NULL,
    PRIMARY KEY (app_id, rollout_id)
);
CREATE INDEX rollouts_state ON rollouts (app_id, state);

CREATE TABLE rollout_plans (
    app_id     TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    generation BIGINT NOT NULL,
    parent     BIGINT,
    digest     TEXT NOT NULL,
    plan       TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (app_id, rollout_id, generation),
    FOREIGN KEY (app_id, rollout_id) REFERENCES rollouts (app_id, rollout_id)
);

CREATE TABLE rollout_verdicts (
    app_id     TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    look       BIGINT NOT NULL,
    gate       TEXT NOT NULL,
    generation BIGINT NOT NULL,
    verdict    TEXT NOT NULL,
    numbers    TEXT NOT NULL,
    at         BIGINT NOT NULL,
    PRIMARY KEY (app_id, rollout_id, look, gate),
    FOREIGN KEY (app_id, rollout_id) REFERENCES rollouts (app_id, rollout_id)
);

CREATE TABLE rollout_requests (
    app_id     TEXT NOT NULL,
    request_id TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    verb       TEXT NOT NULL,
    who        TEXT NOT NULL,
    reason     TEXT NOT NULL,
    detail     TEXT NOT NULL DEFAULT 'null',
    state      TEXT NOT NULL,
    answer     TEXT,
    created_at BIGINT NOT NULL,
    decided_at BIGINT,
    PRIMARY KEY (app_id, request_id),
    FOREIGN KEY (app_id, rollout_id) REFERENCES rollouts (app_id, rollout_id)
);
CREATE INDEX rollout_requests_open ON rollout_requests (app_id, rollout_id, state);

CREATE TABLE publications (
    app_id     TEXT NOT NULL,
    channel    TEXT NOT NULL,
    version    BIGINT NOT NULL,
    digest     TEXT NOT NULL,
    body       TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (app_id, channel)
);

CREATE TABLE leases (
    name       TEXT PRIMARY KEY,
    owner      TEXT NOT NULL,
    token      BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE TABLE mail_outbox (
    app_id           TEXT NOT NULL,
    mail_id          TEXT PRIMARY KEY,
    dedup_key        TEXT NOT NULL,
    message_id       TEXT NOT NULL UNIQUE,
    recipient        TEXT NOT NULL,
    subject          TEXT NOT NULL,
    body_text        TEXT NOT NULL,
    body_html        TEXT,
    state            TEXT NOT NULL,
    attempt          BIGINT NOT NULL,
    max_attempts     BIGINT NOT NULL,
    run_at           BIGINT NOT NULL,
    lease_owner      TEXT,
    lease_expires_at BIGINT,
    last_error       TEXT,
    created_at       BIGINT NOT NULL,
    sent_at          BIGINT,
    UNIQUE (app_id, dedup_key, recipient)
);
CREATE INDEX mail_ready ON mail_outbox (run_at) WHERE state IN ('queued', 'sending');

CREATE TABLE schedules (
    app_id            TEXT NOT NULL,
    schedule_id       TEXT PRIMARY KEY,
    name              TEXT NOT NULL,
    kind              TEXT NOT NULL,
    payload           TEXT NOT NULL,
    expr              TEXT NOT NULL,
    zone              TEXT NOT NULL,
    enabled           BIGINT NOT NULL,
    missed            TEXT NOT NULL,
    missed_max        BIGINT NOT NULL,
    missed_window_s   BIGINT NOT NULL,
    start_deadline_s  BIGINT,
    overlap           TEXT NOT NULL,
    jitter_s          BIGINT NOT NULL,
    priority          BIGINT NOT NULL,
    max_attempts      BIGINT NOT NULL,
    concurrency_key   TEXT,
    concurrency_limit BIGINT NOT NULL,
    next_slot         BIGINT,
    due_at            BIGINT,
    created_at        BIGINT NOT NULL,
    updated_at        BIGINT NOT NULL,
    UNIQUE (app_id, name)
);
CREATE INDEX schedules_due ON schedules (due_at) WHERE enabled = 1;

CREATE TABLE jobs (
    job_id              TEXT PRIMARY KEY,
    app_id              TEXT NOT NULL,
    kind                TEXT NOT NULL,
    payload             TEXT NOT NULL,
    state               TEXT NOT NULL,
    priority            BIGINT NOT NULL,
    run_at              BIGINT NOT NULL,
    concurrency_key     TEXT,
    concurrency_limit   BIGINT NOT NULL,
    dedup_key           TEXT,
    attempt             BIGINT NOT NULL,
    uncounted           BIGINT NOT NULL,
    max_attempts        BIGINT NOT NULL,
    lease_owner         TEXT,
    lease_expires_at    BIGINT,
    cancel_requested_at BIGINT,
    progress            TEXT,
    checkpoint_uri      TEXT,
    result              TEXT,
    last_error          TEXT,
    schedule_id         TEXT,
    scheduled_for       BIGINT,
    created_at          BIGINT NOT NULL,
    started_at          BIGINT,
    finished_at         BIGINT,
    UNIQUE (schedule_id, scheduled_for)
);
CREATE UNIQUE INDEX jobs_dedup ON jobs (app_id, kind, dedup_key)
    WHERE dedup_key IS NOT NULL AND state IN ('queued', 'running');
CREATE INDEX jobs_ready ON jobs (priority DESC, run_at, job_id) WHERE state = 'queued';
CREATE INDEX jobs_leased ON jobs (lease_expires_at) WHERE state = 'running';
CREATE INDEX jobs_busy_keys ON jobs (concurrency_key)
    WHERE concurrency_key IS NOT NULL AND state = 'running';
CREATE INDEX jobs_open_by_schedule ON jobs (schedule_id)
    WHERE schedule_id IS NOT NULL AND state IN ('queued', 'running');
CREATE INDEX jobs_by_app ON jobs (app_id, created_at);

CREATE TABLE schedule_runs (
    schedule_id   TEXT NOT NULL,
    scheduled_for BIGINT NOT NULL,
    app_id        TEXT NOT NULL,
    outcome       TEXT NOT NULL,
    reason        TEXT NOT NULL,
    job_id        TEXT NOT NULL,
    decided_at    BIGINT NOT NULL,
    PRIMARY KEY (schedule_id, scheduled_for)
);
