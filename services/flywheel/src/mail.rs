//! Sends what waits in the mail outbox: one message per recipient, a stable Message-ID, and our own time-out
//! around every send, because an SMTP server that accepts and stays silent would hang the library for ever.

use crate::config::MailConfig;
use flywheel_types::Error;
use lettre::message::Mailbox;
use lettre::transport::smtp::AsyncSmtpTransport;
use lettre::{AsyncTransport, Message, Tokio1Executor};
use std::time::Duration;

/// A configured SMTP connection.
#[derive(Clone)]
pub struct Mailer {
    transport: AsyncSmtpTransport<Tokio1Executor>,
    from: Mailbox,
    timeout: Duration,
}

/// One message to one person.
#[derive(Debug, Clone)]
pub struct Mail<'a> {
    /// Stable over retries, so that a receiver can drop a second copy.
    pub message_id: &'a str,
    pub to: &'a str,
    pub subject: &'a str,
    pub body: &'a str,
}

impl Mailer {
    /// # Errors
    /// When the URL or the sender address cannot be used; the message says which.
    pub fn new(config: &MailConfig) -> Result<Self, Error> {
        let bad = |what: &str, e: &dyn std::fmt::Display| {
            Error::invalid(
                "bad_mail_config",
                format!("mail.{what} cannot be used: {e}"),
                "correct it in the configuration",
            )
        };
        let transport = AsyncSmtpTransport::<Tokio1Executor>::from_url(&config.smtp_url)
            .map_err(|e| bad("smtp_url", &e))?
            .timeout(Some(Duration::from_secs(config.timeout_s)))
            .build();
        let from = config.from.parse().map_err(|e| bad("from", &e))?;
        Ok(Self { transport, from, timeout: Duration::from_secs(config.timeout_s) })
    }

    /// Sends one message.
    ///
    /// # Errors
    /// `Invalid` when the address cannot be parsed (no retry helps), `Unavailable` for everything an SMTP server
    /// or the network did, a time-out included.
    pub async fn send(&self, mail: &Mail<'_>) -> Result<(), Error> {
        let to: Mailbox = mail.to.parse().map_err(|e| {
            Error::invalid("bad_recipient", format!("`{}` is not a mail address: {e}", mail.to), "correct mail.to")
        })?;
        let message = Message::builder()
            .from(self.from.clone())
            .to(to)
            .subject(mail.subject)
            .message_id(Some(mail.message_id.to_owned()))
            .body(mail.body.to_owned())
            .map_err(|e| Error::internal(format!("cannot build mail: {e}")))?;
        let unavailable = |inside: String| {
            Error::new(
                flywheel_types::ErrorKind::Unavailable,
                "mail_not_sent",
                "the mail server did not take the message",
                "it stays in the outbox and is tried again",
            )
            .with_inside(inside)
        };
        match tokio::time::timeout(self.timeout, self.transport.send(message)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(unavailable(e.to_string())),
            Err(_) => Err(unavailable(format!("no answer within {:?}", self.timeout))),
        }
    }
}

#[cfg(test)]
pub mod smtp_server;
#[cfg(test)]
mod tests;
