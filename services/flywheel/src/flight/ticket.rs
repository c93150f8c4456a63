//! What a client carries from one call to the next: the query itself and the app it was planned for. The server keeps nothing, so
//! nothing of it can be lost, leak or pile up; a ticket gives no rights, each call is checked and planned anew.

use crate::http::auth::Principal;
use flywheel_types::{AppId, Error};
use serde::{Deserialize, Serialize};

/// A query of one app: ticket and handle of prepared statements.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ticket {
    v: u32,
    app: AppId,
    query: String,
}

/// Version of the form.
const VERSION: u32 = 1;

impl Ticket {
    pub fn encode(who: &Principal, query: &str) -> Result<Vec<u8>, Error> {
        let ticket = Self { v: VERSION, app: who.app.clone(), query: query.to_owned() };
        serde_json::to_vec(&ticket).map_err(Error::internal)
    }

    /// The query, when it is one of the caller's app.
    pub fn query(who: &Principal, bytes: &[u8]) -> Result<String, Error> {
        let ticket: Self = serde_json::from_slice(bytes).map_err(|_| bad_ticket("it is none of ours"))?;
        if ticket.v != VERSION {
            return Err(bad_ticket("it comes from another version of the server"));
        }
        if ticket.app != who.app {
            return Err(Error::not_found("ticket_not_found", "no such ticket"));
        }
        Ok(ticket.query)
    }
}

fn bad_ticket(why: &str) -> Error {
    Error::invalid("bad_ticket", format!("the ticket or handle cannot be read: {why}"), "send the query again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flywheel_types::{ErrorKind, Role};

    fn who(app: &str) -> Principal {
        Principal { app: AppId::new(app).unwrap(), role: Role::Operator, name: "n".into(), token_id: "t".into() }
    }

    #[test]
    fn a_ticket_is_good_for_its_app_only() {
        let ticket = Ticket::encode(&who("shop"), "SELECT 1").unwrap();
        assert_eq!(ticket, br#"{"v":1,"app":"shop","query":"SELECT 1"}"#, "the form of version 1");
        assert_eq!(Ticket::query(&who("shop"), &ticket).unwrap(), "SELECT 1");
        assert_eq!(Ticket::query(&who("rival"), &ticket).unwrap_err().kind, ErrorKind::NotFound);
        for bad in [&b"x"[..], br#"{"v":2,"app":"shop","query":"SELECT 1"}"#, br#"{"v":1,"app":"","query":"q"}"#] {
            assert_eq!(Ticket::query(&who("shop"), bad).unwrap_err().code, "bad_ticket");
        }
    }
}
