//! Who asks: the tokens of the HTTP API, as a bearer token with each call, or as the password of a handshake that hands the token
//! back as a bearer token. Drivers use either.

use super::status::refusal;
use crate::http::auth::{Principal, principal};
use crate::server::Server;
use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flywheel_types::{Error, ErrorKind, Role};
use tonic::Status;
use tonic::metadata::MetadataMap;

/// The caller of any call but the handshake. The tables may hold (masked) text of people, so this needs an operator.
pub async fn caller(server: &Server, metadata: &MetadataMap) -> Result<Principal, Status> {
    admitted(server, &metadata.clone().into_headers()).await.map_err(|e| refusal(&e))
}

async fn admitted(server: &Server, headers: &HeaderMap) -> Result<Principal, Error> {
    let who = principal(server, headers).await?;
    who.require(Role::Operator)?;
    Ok(who)
}

/// `Bearer <token>` for the password of a handshake, when it is a token that may ask.
pub async fn handshake(server: &Server, metadata: &MetadataMap) -> Result<HeaderValue, Status> {
    let mut headers = metadata.clone().into_headers();
    let bearer = match headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(password) {
        Some(password) => HeaderValue::try_from(format!("Bearer {password}")).map_err(|_| refusal(&bad_basic()))?,
        None => headers.get(header::AUTHORIZATION).cloned().ok_or_else(|| refusal(&bad_basic()))?,
    };
    headers.insert(header::AUTHORIZATION, bearer.clone());
    admitted(server, &headers).await.map_err(|e| refusal(&e))?;
    Ok(bearer)
}

/// Password of `Basic <base64 of user:password>`; the user may be any word, the token says who it is.
fn password(value: &str) -> Option<String> {
    let pair = STANDARD.decode(value.strip_prefix("Basic ")?.trim()).ok()?;
    let pair = String::from_utf8(pair).ok()?;
    pair.split_once(':').map(|(_, password)| password.to_owned())
}

fn bad_basic() -> Error {
    Error::new(
        ErrorKind::Unauthenticated,
        "no_valid_token",
        "the handshake carries no password",
        "send any user name and a token as the password, or `authorization: Bearer <token>` with each call",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_what_follows_the_first_colon() {
        let basic = |text: &str| password(&format!("Basic {}", STANDARD.encode(text)));
        assert_eq!(basic("shop:fw_abc:d").as_deref(), Some("fw_abc:d"));
        assert_eq!(basic(":t").as_deref(), Some("t"));
        assert_eq!(basic("nothing"), None);
        assert_eq!((password("Basic ***"), password("Bearer x")), (None, None));
    }
}
