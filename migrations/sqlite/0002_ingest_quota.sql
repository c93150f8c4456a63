-- Events that one ingest key may send in a minute; NULL is no quota.
ALTER TABLE ingest_keys ADD COLUMN events_per_minute INTEGER;
