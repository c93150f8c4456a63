//! Checks of rows that came as columns: what live telemetry is checked for while it is decoded.

use super::columns::{Mapped, Mapping};
use super::{History, Refusal};
use crate::column::Text;
use crate::decode::{Context, Decoded, content, short, user_key};
use crate::disposition::Kind;
use crate::rows::{DeviceEventRow, FeedbackRow, InteractionRow, Table};
use crate::user::{PRIVATE_NAMES, USER_NAMES, UserKeys};
use arrow::array::{Array as _, ArrayRef, RecordBatch};
use flywheel_types::wire::DeviceEventKind;
use flywheel_types::{ChunkId, InteractionId, LabelKind};

/// Rows of a batch; `first` is the number of its first row in the file, counted from 1.
#[must_use]
pub fn decode<'a>(ctx: &Context<'a>, mapping: &Mapping, mapped: &'a Mapped, first: usize) -> Decoded<'a> {
    let mut out = Decoded::default();
    let batch = Batch { ctx, mapped, first };
    match mapping.table {
        Table::Feedback => out.feedback = batch.rows(&mut out, Kind::Feedback, FeedbackRow::read, feedback),
        Table::DeviceEvents => out.device_events = batch.rows(&mut out, Kind::Device, DeviceEventRow::read, device),
        _ => out.interactions = batch.rows(&mut out, Kind::Interaction, InteractionRow::read, interaction),
    }
    out
}

struct Batch<'c, 'a> {
    ctx: &'c Context<'a>,
    mapped: &'a Mapped,
    first: usize,
}

/// Checks one row of a batch and finishes it.
type Check<'a, R> = fn(&Batch<'_, 'a>, &mut R, usize) -> Result<(), Refusal>;

impl<'a> Batch<'_, 'a> {
    fn rows<R: History<'a>>(
        &self,
        out: &mut Decoded<'a>,
        kind: Kind,
        read: fn(&'a RecordBatch, usize) -> R,
        check: Check<'a, R>,
    ) -> Vec<R> {
        let rows = &self.mapped.rows;
        let received = rows.column_by_name("received_at");
        let occurred = rows.column_by_name("occurred_at");
        let mut kept = Vec::with_capacity(rows.num_rows());
        for i in 0..rows.num_rows() {
            let mut row = read(rows, i);
            let has = |column: Option<&ArrayRef>| column.is_some_and(|c| c.is_valid(i));
            let (at, happened) = row.given();
            let (at, happened) = (has(received).then_some(at), has(occurred).then_some(happened));
            let fate = match self.mapped.bad.get(&i) {
                Some(detail) => Err(("bad_value", detail.clone())),
                None => row.settle(self.ctx, at, happened).and_then(|()| check(self, &mut row, i)),
            };
            match fate {
                Ok(()) => kept.push(row),
                Err((reason, detail)) => out.quarantine(kind, reason, format!("row {}: {detail}", self.first + i)),
            }
        }
        kept
    }

    /// Attributes of the file and its further columns, within the limits.
    fn attrs(&self, row: &mut InteractionRow<'a>, i: usize) {
        let limits = self.ctx.limits;
        let further = self.mapped.extra.iter().filter(|(_, values)| values.is_valid(i));
        let further = further.map(|(name, values)| (Text::from(name.as_str()), Text::from(values.value(i))));
        let all: Vec<_> = std::mem::take(&mut row.attrs.0).into_iter().chain(further).collect();
        for (key, value) in all {
            if USER_NAMES.contains(&key.as_ref()) {
                row.user_key = user_key(self.ctx, Some(&value));
                continue;
            }
            if PRIVATE_NAMES.contains(&key.as_ref()) {
                continue;
            }
            let fits = value.len() <= limits.attribute_bytes && row.attrs.0.len() < limits.extra_attributes;
            match short(key).filter(|_| fits) {
                Some(key) => {
                    row.attrs.0.retain(|(k, _)| *k != key);
                    row.attrs.0.push((key, self.ctx.masks.apply(value)));
                }
                None => row.dropped_attrs += 1,
            }
        }
    }
}

/// A key of this installation as it is; anything else is the app's own user id.
fn owner<'a>(ctx: &Context<'_>, given: Option<Text<'a>>) -> Option<Text<'a>> {
    given.and_then(|text| if UserKeys::is_key(&text) { Some(text) } else { user_key(ctx, Some(&text)) })
}

fn named(id: &str) -> Result<(), Refusal> {
    if id.is_empty() {
        return Err(("no_interaction_id", "interaction_id is missing".to_owned()));
    }
    InteractionId::new(id).map(|_| ()).map_err(|e| ("bad_interaction_id", e.to_string()))
}

fn interaction<'a>(batch: &Batch<'_, 'a>, row: &mut InteractionRow<'a>, i: usize) -> Result<(), Refusal> {
    named(&row.interaction_id)?;
    chunks(row, batch.ctx.limits.chunks)?;
    row.nonfinite_fields += batch.mapped.nonfinite[i];
    row.user_key = owner(batch.ctx, row.user_key.take());
    row.arm = row.arm.take().filter(|arm| matches!(arm.as_ref(), "control" | "treatment"));
    if let Some(word) = &row.detected
        && word.parse::<LabelKind>().is_err()
    {
        return Err(("unknown_label", format!("detected is `{word}`")));
    }
    if let Some(answer) = &row.answer_text
        && row.detected.is_none()
    {
        row.detected = batch.ctx.classify.and_then(|f| f(answer)).map(|l| l.as_str().into());
    }
    for (text, what) in [(&mut row.question_text, "the question"), (&mut row.answer_text, "the answer")] {
        *text = text.take().map(|t| content(t, what, batch.ctx)).transpose().map_err(|e| ("text_too_long", e))?;
    }
    batch.attrs(row, i);
    Ok(())
}

/// The four lists are parallel; those that are missing are filled up.
fn chunks(row: &mut InteractionRow<'_>, limit: usize) -> Result<(), Refusal> {
    let n = row.chunk_ids.len();
    if n > limit {
        return Err(("too_many_chunks", format!("{n} retrieved chunks, {limit} is the limit")));
    }
    if let Some(e) = row.chunk_ids.iter().find_map(|id| ChunkId::new(id.as_ref()).err()) {
        return Err(("bad_chunk_id", e.to_string()));
    }
    let lengths = [row.chunk_versions.len(), row.chunk_scores.len(), row.chunk_hidden.len()];
    if lengths.into_iter().any(|m| m != 0 && m != n) {
        return Err(("chunk_lists_differ", format!("{n} chunk_ids beside lists of {lengths:?} elements")));
    }
    row.chunk_versions.resize(n, 0);
    row.chunk_scores.resize(n, 0.0);
    row.chunk_hidden.resize(n, false);
    for score in row.chunk_scores.iter_mut().filter(|s| !s.is_finite()) {
        *score = 0.0;
    }
    Ok(())
}

fn feedback<'a>(batch: &Batch<'_, 'a>, row: &mut FeedbackRow<'a>, i: usize) -> Result<(), Refusal> {
    named(&row.interaction_id)?;
    if row.label.parse::<LabelKind>().is_err() {
        return Err(("unknown_label", format!("label is `{}`", short(row.label.clone()).unwrap_or_default())));
    }
    row.reason = row.reason.take().map(|r| batch.ctx.masks.apply(r)).map(|r| cut(r, batch.ctx.limits.attribute_bytes));
    row.nonfinite_fields += batch.mapped.nonfinite[i];
    row.user_key = owner(batch.ctx, row.user_key.take());
    Ok(())
}

/// Text of at most `limit` bytes.
fn cut(text: Text<'_>, limit: usize) -> Text<'_> {
    if text.len() <= limit {
        return text;
    }
    let end = (0..=limit).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    Text::Owned(text[..end].to_owned())
}

fn device<'a>(batch: &Batch<'_, 'a>, row: &mut DeviceEventRow<'a>, i: usize) -> Result<(), Refusal> {
    if serde_json::from_value::<DeviceEventKind>(row.event.as_ref().into()).is_err() {
        let word = short(row.event.clone()).unwrap_or_default();
        return Err(("unknown_device_event", format!("event is `{word}`")));
    }
    row.reason = row.reason.take().and_then(short);
    row.arm = row.arm.take().filter(|arm| matches!(arm.as_ref(), "control" | "treatment"));
    row.nonfinite_fields += batch.mapped.nonfinite[i];
    Ok(())
}
