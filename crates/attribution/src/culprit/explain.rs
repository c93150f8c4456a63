//! Evidence in plain words, for people who do not read e-values.

use super::report::{CanaryReport, SubjectKind, SuspectReport};

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

fn rate(failures: u64, rows: u64) -> String {
    if rows == 0 { "no data".to_owned() } else { percent(failures as f64 / rows as f64) }
}

/// "1 in N" for an e-value: how often chance alone would give evidence this strong, at most.
fn odds(log_e: f64) -> String {
    if log_e <= 0.0 {
        "no more than chance would give".to_owned()
    } else if log_e > 13.8 {
        "evidence chance would give less than once in a million times".to_owned()
    } else {
        format!("evidence chance would give at most once in {:.0} times", log_e.exp())
    }
}

/// One paragraph about a suspect.
pub(crate) fn suspect(s: &SuspectReport) -> String {
    let what = match s.kind {
        SubjectKind::Chunk => "chunk",
        SubjectKind::Template => "prompt template",
    };
    let mut text = format!(
        "Answers using {what} `{}` failed in {} of {} cases ({}). By itself it turns about {} of otherwise good answers into \
         failures (between {} and {}), all other likely causes taken out. Since it came under suspicion {} people on {} days and {} \
         device classes were counted, each once; without the most incriminating people this is {}.",
        s.name,
        s.failures,
        s.exposures,
        rate(s.failures, s.exposures),
        percent(s.q_hat),
        percent(s.q_low),
        percent(s.q_high),
        s.users,
        s.days,
        s.device_classes,
        odds(s.log_e_trimmed),
    );
    if let Some(b) = s.buddies.first().filter(|b| b.share >= 0.5) {
        text += &format!(" It is retrieved together with `{}` in {} of its cases.", b.name, percent(b.share));
    }
    if !s.not_separable.is_empty() {
        text += &format!(
            " It is never retrieved apart from `{}`, so nobody can tell which of them is the cause.",
            s.not_separable.join("`, `")
        );
    }
    if s.confounded_with_topic {
        text += " There are too few answers on its topic without it to tell a bad chunk from a hard topic; only a canary can.";
    }
    if !s.only_under.is_empty() {
        text += &format!(" {}", limited(s));
    }
    if s.confounded_with_template {
        text += " Nearly all its answers come from a prompt template that fails as a whole; only a canary can tell them apart.";
    }
    if let Some(c) = &s.canary {
        text += &format!(" {}", canary(c));
    }
    text
}

/// One sentence about a chunk that fails under some templates only.
pub(crate) fn limited(s: &SuspectReport) -> String {
    let under = |inside: bool| {
        let of = s.by_template.iter().filter(|t| s.only_under.contains(&t.template) == inside);
        of.fold((0, 0), |sum, t| (sum.0 + t.failures, sum.1 + t.exposures))
    };
    let ((failed, rows), (other_failed, other_rows)) = (under(true), under(false));
    format!(
        "Chunk `{}` fails only under prompt template `{}` ({failed} of {rows} answers, {}) and not under others ({other_failed} \
         of {other_rows}, {}), so the template is the likely cause and the chunk stays in use.",
        s.name,
        s.only_under.join("`, `"),
        rate(failed, rows),
        rate(other_failed, other_rows),
    )
}

/// One sentence about a canary.
pub(crate) fn canary(c: &CanaryReport) -> String {
    format!(
        "Canary: {} of {} people who saw it had a failure ({}), {} of {} of those from whom it was hidden ({}).",
        c.shown_failures,
        c.shown,
        rate(c.shown_failures, c.shown),
        c.hidden_failures,
        c.hidden,
        rate(c.hidden_failures, c.hidden),
    )
}
