//! Sending to a real SMTP server over a socket: what arrives, and what each way of failing becomes.

use super::smtp_server::{Mode, Received, SmtpServer};
use super::{Mail, Mailer};
use crate::config::MailConfig;
use flywheel_types::{Error, ErrorKind};
use std::time::{Duration, Instant};

const ID: &str = "<0123456789abcdef@flywheel.invalid>";

fn mailer(url: String) -> Mailer {
    let config = MailConfig {
        smtp_url: url,
        from: "Flywheel <flywheel@example.com>".into(),
        to: vec!["ops@example.com".into()],
        timeout_s: 1,
    };
    Mailer::new(&config).unwrap()
}

fn mail(body: &str) -> Mail<'_> {
    Mail { message_id: ID, to: "ops@example.com", subject: "[shop] rollout r-1 is rolling back", body }
}

async fn send(mode: Mode) -> (Result<(), Error>, Vec<Received>, Duration) {
    let server = SmtpServer::start(mode).await;
    let start = Instant::now();
    let result = mailer(server.url()).send(&mail("It failed.")).await;
    (result, server.received(), start.elapsed())
}

#[tokio::test]
async fn a_message_arrives_with_its_id_and_its_dots() {
    let server = SmtpServer::start(Mode::Takes).await;
    let mailer = mailer(server.url());
    mailer.send(&mail("first\n.\n..hidden\nlast")).await.unwrap();
    mailer.send(&mail("first\n.\n..hidden\nlast")).await.unwrap();
    let got = server.received();
    assert_eq!(got.len(), 2);
    assert_eq!(got[0].from, "flywheel@example.com");
    assert_eq!(got[0].to, ["ops@example.com"]);
    assert_eq!(got[0].header("Subject"), Some("[shop] rollout r-1 is rolling back"));
    // the same for both, so that a receiver can drop the second copy
    assert!(got.iter().all(|m| m.header("Message-ID") == Some(ID)), "{got:?}");
    assert!(got[0].data.ends_with("\r\n\r\nfirst\r\n.\r\n..hidden\r\nlast\r\n"), "{}", got[0].data);
}

#[tokio::test]
async fn letters_outside_ascii_are_encoded() {
    let server = SmtpServer::start(Mode::Takes).await;
    let text = format!("Größe – 3 % über dem Limit\n{}", "a long line = one that must be broken ".repeat(9));
    mailer(server.url()).send(&mail(&text)).await.unwrap();
    let got = server.received();
    assert!(got[0].data.is_ascii() && got[0].data.lines().all(|l| l.len() <= 78), "{}", got[0].data);
    assert_eq!(got[0].body().trim_end(), text.trim_end());
}

#[tokio::test]
async fn a_server_that_accepts_and_stays_silent_is_given_up_in_time() {
    for mode in [Mode::SilentFromStart, Mode::SilentAfterData] {
        let (result, received, took) = send(mode).await;
        assert_eq!(result.unwrap_err().kind, ErrorKind::Unavailable, "{mode:?}");
        assert!(took < Duration::from_secs(10), "{mode:?}: {took:?}");
        assert!(received.is_empty());
    }
}

#[tokio::test]
async fn what_the_server_refuses_is_for_the_log_only() {
    let (result, received, _) = send(Mode::RefusesRecipient).await;
    let e = result.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Unavailable);
    assert!(e.inside.as_deref().unwrap().contains("no such mailbox"), "{e:?}");
    assert!(!e.to_string().contains("mailbox"), "{e}");
    assert!(received.is_empty());
    let (result, ..) = send(Mode::Busy).await;
    assert_eq!(result.unwrap_err().kind, ErrorKind::Unavailable);
}

#[tokio::test]
async fn no_server_and_no_address_are_told_apart() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mailer = mailer(format!("smtp://{free}"));
    assert_eq!(mailer.send(&mail("x")).await.unwrap_err().kind, ErrorKind::Unavailable);
    let wrong = Mail { to: "nobody", ..mail("x") };
    assert_eq!(mailer.send(&wrong).await.unwrap_err().kind, ErrorKind::Invalid);
}
