//! New identifiers for rows that nobody outside named. UUIDv7: unique without asking, roughly ordered by time.
//! Ids that must be equal when a step runs again after a crash are derived by the caller from its input instead.

/// A fresh id with a prefix that says what it names, for example `job-0198…`.
#[must_use]
pub fn fresh(prefix: &str) -> String {
    format!("{prefix}-{}", uuid::Uuid::now_v7().simple())
}

#[cfg(test)]
mod tests {
    #[test]
    fn fresh_ids_are_legal_and_differ() {
        let a = super::fresh("job");
        assert!(flywheel_types::JobId::new(a.clone()).is_ok());
        assert_ne!(a, super::fresh("job"));
    }
}
