-- SELECTs that people of an app saved under a name.
CREATE TABLE saved_views (
    app_id      TEXT NOT NULL,
    name        TEXT NOT NULL,
    query       TEXT NOT NULL,
    description TEXT NOT NULL,
    created_by  TEXT NOT NULL,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    PRIMARY KEY (app_id, name)
) STRICT;
