//! Corrections by annotators. Two people with the same text (or one trusted) make a correction a training
//! candidate; different texts make it disputed.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody, Params};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::corrections::{CorrectionRow, CorrectionState, NewCorrection};
use flywheel_types::{ChunkId, Digest, Error, InteractionId, Role, TemplateId};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;

/// Longest prompt or answer, bytes.
const MAX_TEXT: usize = 32 << 10;

#[derive(Debug, Deserialize)]
pub struct Correction {
    interaction_id: InteractionId,
    #[serde(default)]
    template_id: Option<TemplateId>,
    /// The whole prompt that the model saw, so that training sees it too.
    prompt: String,
    #[serde(default)]
    chunk_ids: Vec<ChunkId>,
    wrong_answer: String,
    corrected_answer: String,
}

/// `POST /v1/corrections`: one vote of this annotator. The same annotator voting again replaces the vote.
pub async fn submit(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Correction>,
) -> ApiResult<Json<CorrectionRow>> {
    who.require(Role::Annotator)?;
    check(&body)?;
    let masked = |text: &str| server.ingest.mask(text);
    let new = NewCorrection {
        correction_id: Digest::of(body.interaction_id.as_str().as_bytes()).to_hex()[..24].to_owned(),
        interaction_id: body.interaction_id,
        install_id: None,
        template_id: body.template_id,
        prompt: masked(&body.prompt),
        chunk_ids: body.chunk_ids,
        wrong_answer: masked(&body.wrong_answer),
        corrected_answer: masked(&body.corrected_answer),
        annotator: who.token_id.clone(),
        trusted: who.role == Role::Admin,
    };
    let spans = flywheel_attribution::diff::diff(&new.wrong_answer, &new.corrected_answer)
        .map_err(|e| Error::invalid("no_span_diff", e.to_string(), "shorten the texts"))?;
    let mut tx = server.begin().await?;
    let row = tx.correction_submit(&who.app, &new).await?;
    tx.correction_spans_set(&who.app, &row.correction_id, &json!(spans)).await?;
    if row.state == CorrectionState::Accepted {
        crate::pipeline::build_dataset::enqueue(&mut tx, &who.app, server.now()).await?;
    }
    // the log cannot forget, so it does not name the interaction
    let detail = json!({ "state": row.state });
    tx.audit_append(&who.app, &who.name, "correction.submit", &row.correction_id, &detail).await?;
    tx.commit().await?;
    Ok(Json(row))
}

fn check(c: &Correction) -> Result<(), Error> {
    for (field, text) in
        [("prompt", &c.prompt), ("wrong_answer", &c.wrong_answer), ("corrected_answer", &c.corrected_answer)]
    {
        if text.trim().is_empty() {
            return Err(Error::invalid("empty_field", format!("`{field}` is empty"), "send its text"));
        }
        if text.len() > MAX_TEXT {
            return Err(Error::invalid(
                "field_too_long",
                format!("`{field}` has {} bytes", text.len()),
                format!("the limit is {MAX_TEXT} bytes"),
            ));
        }
    }
    Ok(())
}

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<CorrectionState>,
}

/// `GET /v1/corrections`.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<CorrectionRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.correction_list(&who.app, q.state, 1000).await?))
}
