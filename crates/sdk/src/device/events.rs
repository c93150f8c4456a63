//! What happens while the app runs: answers, feedback, crashes. Everything is durable before a call returns.

use super::Device;
use crate::error::SdkError;
use chrono::{DateTime, Utc};
use flywheel_types::wire::{ContentV1, DeviceEventKind, EventV1, FeedbackV1, InteractionV1, RetrievedV1};
use flywheel_types::{InteractionId, LabelKind, TemplateId};

/// What the app knows about one answer; the core adds id, time, bundle and arm.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub template_id: TemplateId,
    /// Rank order, hidden hits included ([`crate::IndexSnapshot::candidates`] gives them).
    pub retrieval: Vec<RetrievedV1>,
    /// Version of the index the retrieval used.
    pub index_version: Option<u64>,
    pub ttft_ms: Option<f64>,
    pub ttfv_ms: Option<f64>,
    pub decode_tokens_per_s: Option<f64>,
    pub input_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
    pub peak_memory_bytes: Option<u64>,
    /// `rss`, `pss` or `phys_footprint`.
    pub memory_metric: Option<String>,
    pub energy_mj: Option<f64>,
    /// Only when the user agreed to send it.
    pub content: Option<ContentV1>,
}

impl Answer {
    /// An answer about which only the template is known.
    #[must_use]
    pub fn new(template_id: TemplateId) -> Self {
        Self {
            template_id,
            retrieval: Vec::new(),
            index_version: None,
            ttft_ms: None,
            ttfv_ms: None,
            decode_tokens_per_s: None,
            input_tokens: None,
            output_tokens: None,
            peak_memory_bytes: None,
            memory_metric: None,
            energy_mj: None,
            content: None,
        }
    }
}

impl Device {
    /// Stores one answer and returns its id, which later feedback names.
    ///
    /// # Errors
    /// [`SdkError::Usage`] when no bundle is active, else file errors.
    pub fn record_interaction(&mut self, answer: Answer) -> Result<InteractionId, SdkError> {
        let now = self.now();
        let bundle = self
            .active_bundle()
            .ok_or_else(|| SdkError::Usage("no bundle is active, so there is no answer to record".to_owned()))?;
        let interaction_id = self.new_interaction_id(now)?;
        let event = EventV1::Interaction(InteractionV1 {
            interaction_id: interaction_id.clone(),
            at: now,
            template_id: answer.template_id,
            bundle,
            assignment: self.state.arm.clone(),
            retrieval: answer.retrieval,
            index_version: answer.index_version,
            ttft_ms: answer.ttft_ms,
            ttfv_ms: answer.ttfv_ms,
            decode_tokens_per_s: answer.decode_tokens_per_s,
            input_tokens: answer.input_tokens,
            output_tokens: answer.output_tokens,
            peak_memory_bytes: answer.peak_memory_bytes,
            memory_metric: answer.memory_metric,
            energy_mj: answer.energy_mj,
            user_id: self.user.clone(),
            content: answer.content,
        });
        self.queue.append(std::slice::from_ref(&event), 0)?;
        self.count_generation(now)?;
        Ok(interaction_id)
    }

    /// The bake period goes on in memory; only its end is stored, so that an answer costs no state write.
    fn count_generation(&mut self, now: DateTime<Utc>) -> Result<(), SdkError> {
        let mut probe = match &self.state.active {
            Some(slot) if slot.confirmed_at.is_some() && !slot.baked => self.state.clone(),
            _ => return Ok(()),
        };
        if probe.generated(now) {
            self.transition(|s| {
                s.generated(now);
            })
        } else {
            self.state = probe;
            Ok(())
        }
    }

    /// Says who uses the app now, by the app's own id; `None` after a log-out. The server stores a keyed digest of it, and can
    /// then erase what belongs to a person. Not kept over a restart.
    pub fn set_user(&mut self, user: Option<String>) {
        self.user = user;
    }

    /// Stores a person's judgement about an earlier answer.
    ///
    /// # Errors
    /// File errors.
    pub fn record_feedback(
        &mut self,
        interaction_id: InteractionId,
        label: LabelKind,
        reason: Option<String>,
    ) -> Result<(), SdkError> {
        let event =
            EventV1::Feedback(FeedbackV1 { interaction_id, at: self.now(), label, reason, user_id: self.user.clone() });
        self.queue.append(std::slice::from_ref(&event), 0)
    }

    /// Stores a crash or memory kill outside the load window, as the app's crash handler found it. It is reported and
    /// never leads to a fall-back by itself.
    ///
    /// # Errors
    /// File errors.
    pub fn record_crash(&mut self, out_of_memory: bool, reason: Option<String>) -> Result<(), SdkError> {
        let (now, bundle) = (self.now(), self.active_bundle());
        let event = if out_of_memory { DeviceEventKind::OutOfMemory } else { DeviceEventKind::Crashed };
        self.transition(|s| s.report(now, event, bundle, reason))
    }

    /// A UUIDv7 from the given clock and generator, so that a simulated device makes the same ids again.
    fn new_interaction_id(&mut self, now: DateTime<Utc>) -> Result<InteractionId, SdkError> {
        let mut random = [0u8; 10];
        self.env.rng.fill_bytes(&mut random);
        let ms = u64::try_from(now.timestamp_millis()).unwrap_or(0);
        let id = uuid::Builder::from_unix_timestamp_millis(ms, &random).into_uuid();
        InteractionId::new(id.to_string()).map_err(|e| SdkError::Usage(e.to_string()))
    }
}
