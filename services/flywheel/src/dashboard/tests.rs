//! The pages as a browser without JavaScript gets them, over a socket.

use crate::server::testing::{Client, TestServer, now};
use flywheel_attribution::culprit::{Proposal, SubjectKind, Transition};
use flywheel_experiment::gate::{
    BaselineV1, GateKind, GateReportV1, GateResult, GateSpecV1, Method, PhaseCounts, SrmReport,
};
use flywheel_experiment::planner::{PlanV1, RolloutDraft, RolloutPolicyV1};
use flywheel_store::findings::{FindingKind, NewFinding};
use flywheel_store::rollout_requests::RequestVerb;
use flywheel_store::rollouts::{NewRollout, VerdictRow};
use flywheel_types::{Digest, FindingId, Role, RolloutId, Verdict};
use serde_json::json;
use std::collections::BTreeMap;

/// A browser after its login.
async fn browser(t: &TestServer, role: Role) -> Client {
    let mut client = t.client().await;
    let token = t.token(Some("shop"), role).await;
    let answer = client.form("/login", &format!("token={token}&app=")).await;
    assert_eq!((answer.status, answer.location()), (303, "/"), "{}", answer.text);
    let pairs: Vec<String> = answer.cookies().iter().map(|c| c.split(';').next().unwrap().to_owned()).collect();
    client.cookie = Some(pairs.join("; "));
    client
}

#[tokio::test]
async fn login_keeps_the_token_from_scripts_and_other_sites() {
    let t = TestServer::start(None).await;
    let client = t.client().await;
    for page in ["/", "/findings", "/audit", "/views", "/views/intake_24h", "/rollouts/r-1"] {
        let answer = client.get(page).await;
        assert_eq!((answer.status, answer.location()), (303, "/login"), "{page}");
    }
    assert!(client.get("/login").await.text.contains("name=\"token\" type=\"password\""));
    let wrong = client.form("/login", "token=fwt_wrong").await;
    assert_eq!(wrong.status, 401);
    assert!(wrong.text.contains("unknown, expired or revoked") && wrong.cookies().is_empty(), "{}", wrong.text);
    let token = t.token(Some("shop"), Role::Viewer).await;
    let right = client.form("/login", &format!("token={token}")).await;
    let cookies = right.cookies();
    assert!(cookies[0].starts_with(&format!("flywheel_token={token}; ")), "{cookies:?}");
    assert!(cookies.iter().all(|c| c.contains("; HttpOnly; SameSite=Strict")), "{cookies:?}");
    let out = client.form("/logout", "").await;
    assert!(out.cookies()[0].contains("flywheel_token=; Path=/; Max-Age=0"), "{:?}", out.cookies());
}

#[tokio::test]
async fn a_token_for_all_apps_chooses_one_and_a_signer_sees_nothing() {
    let t = TestServer::start(None).await;
    let client = t.client().await;
    let token = t.token(None, Role::Viewer).await;
    let asked = client.form("/login", &format!("token={token}")).await;
    assert_eq!(asked.status, 400);
    assert!(asked.text.contains("fill in which one to show"), "{}", asked.text);
    assert_eq!(client.form("/login", &format!("token={token}&app=other")).await.status, 404);
    let done = client.form("/login", &format!("token={token}&app=shop")).await;
    assert!(done.cookies()[1].starts_with("flywheel_app=shop; "), "{:?}", done.cookies());
    let signer = t.token(Some("shop"), Role::Signer).await;
    assert_eq!(client.form("/login", &format!("token={signer}")).await.status, 403);
}

#[tokio::test]
async fn every_page_is_bound_by_its_headers_and_needs_no_script() {
    let t = TestServer::start(None).await;
    let client = browser(&t, Role::Viewer).await;
    for page in
        ["/", "/findings", "/audit", "/login", "/rollouts/none", "/views", "/views/intake_24h", "/assets/style.css"]
    {
        let answer = client.get(page).await;
        let header = |name: &str| answer.headers.get(name).map_or("", |v| v.to_str().unwrap()).to_owned();
        assert!(
            header("content-security-policy").contains("default-src 'self'; script-src 'self'; style-src 'self'"),
            "{page}"
        );
        assert!(header("content-security-policy").contains("frame-ancestors 'none'"), "{page}");
        assert_eq!(header("x-content-type-options"), "nosniff", "{page}");
        assert_eq!(header("referrer-policy"), "no-referrer", "{page}");
        assert!(!answer.text.contains("<script") && !answer.text.contains(" style=\""), "{page}");
        if page != "/assets/style.css" {
            assert_eq!(header("cache-control"), "no-store", "{page}");
        }
    }
}

#[tokio::test]
async fn errors_are_pages_too() {
    let t = TestServer::start(None).await;
    let client = browser(&t, Role::Viewer).await;
    let answer = client.get("/rollouts/none").await;
    assert_eq!(answer.status, 404);
    assert!(answer.text.contains("<h1>This page cannot be shown</h1>") && answer.text.contains("rollout_not_found"));
    let bad = client.get("/rollouts/%ff").await;
    assert_eq!(bad.status, 400);
    assert!(bad.text.contains("<h1>This page cannot be shown</h1>") && bad.text.contains("bad_path"), "{}", bad.text);
    assert_eq!(client.get("/findings?state=asleep").await.status, 400);
    let check = client.get("/audit?check=true").await;
    assert_eq!(check.status, 403);
    assert!(check.text.contains("this needs the role `operator`"), "{}", check.text);
}

fn gate() -> GateResult {
    GateResult {
        name: "rejection <all>".into(),
        kind: GateKind::Rejection,
        required: true,
        verdict: Verdict::Continue,
        word: "COLLECTING".into(),
        method: Method::Asymptotic,
        control_devices: 1200,
        treatment_devices: 1187,
        control_events: 24_000,
        treatment_events: 23_500,
        control_value: Some(0.021),
        treatment_value: Some(0.024),
        difference: Some(0.003),
        lower: Some(-0.004),
        upper: Some(0.01),
        margin: Some(0.005),
        e_value: None,
        p_value: None,
        information_pct: Some(42.0),
        reason: "needs more devices".into(),
        failed_at: None,
    }
}

fn report(verdict: Verdict, word: &str) -> GateReportV1 {
    GateReportV1 {
        v: 1,
        spec: Digest::of(b"spec"),
        now: now(),
        phase: 1,
        verdict,
        word: word.into(),
        reason: "the interval is too wide".into(),
        gates: vec![gate()],
        phases: vec![PhaseCounts {
            phase: 1,
            control_exposed: 1200,
            treatment_exposed: 1187,
            control_closed: 900,
            treatment_closed: 880,
        }],
        srm: SrmReport {
            p_value: Some(0.8),
            expected_treatment: 1193.5,
            observed_treatment: 1187,
            observed_control: 1200,
        },
        exclusions: BTreeMap::from([("first_seen_late".to_owned(), 17)]),
        failed_at: None,
    }
}

/// A rollout as the reconciler stores it: draft, two equal looks, then another answer, and a request.
async fn rollout(t: &TestServer) -> RolloutId {
    let id = RolloutId::new("r-1").unwrap();
    let policy = RolloutPolicyV1::default();
    let spec =
        GateSpecV1::freeze(&BaselineV1 { rejection_rate: 0.02, ttft_ms: BTreeMap::new(), planned_devices: 1000 })
            .unwrap();
    let (new, old) = (Digest::of(b"new"), Digest::of(b"old"));
    let draft = RolloutDraft {
        rollout_id: id.clone(),
        eligible: Vec::new(),
        ring: Vec::new(),
        candidate_bundle: new,
        control_bundle: old,
        created_by: "<b>eve</b>".into(),
    };
    let plan = PlanV1::draft(draft, &policy, &spec, now()).unwrap();
    let row = NewRollout {
        rollout_id: id.clone(),
        candidate_id: None,
        treatment: new,
        control: Some(old),
        policy: json!({}),
        created_by: "<b>eve</b>".into(),
    };
    let mut tx = t.server.begin().await.unwrap();
    tx.rollout_create(&t.app, &row).await.unwrap();
    tx.rollout_plan_append(&t.app, &id, 0, &serde_json::to_value(&plan).unwrap()).await.unwrap();
    let looks =
        [(Verdict::Invalid, "DATA PROBLEM"), (Verdict::Continue, "COLLECTING"), (Verdict::Continue, "COLLECTING")];
    for (look, (verdict, word)) in looks.into_iter().enumerate() {
        let numbers = serde_json::to_value(report(verdict, word)).unwrap();
        let look = i64::try_from(look).unwrap();
        let row = VerdictRow {
            rollout_id: id.clone(),
            look,
            gate: VerdictRow::WHOLE.into(),
            generation: 1,
            verdict,
            numbers,
            at: now(),
        };
        tx.rollout_verdict_append(&t.app, &row).await.unwrap();
    }
    tx.rollout_request_create(&t.app, &id, RequestVerb::Pause, "ann", "<i>wait</i>", &json!(null)).await.unwrap();
    tx.commit().await.unwrap();
    id
}

#[tokio::test]
async fn a_rollout_shows_its_gates_in_pictures_and_numbers() {
    let t = TestServer::start(None).await;
    rollout(&t).await;
    let client = browser(&t, Role::Viewer).await;
    let page = client.get("/rollouts/r-1").await.text;
    assert!(page.contains("COLLECTING") && !page.contains("CONTINUE"), "{page}");
    let title = "rejection &lt;all&gt;: difference +0.30 pp, interval -0.40 to +1.00 pp, margin +0.50 pp";
    assert_eq!(page.matches(title).count(), 2, "the pictures of the gate and of the plan say their numbers: {page}");
    for number in ["2.40 %", "2.10 %", "-0.40 pp to +1.00 pp", "1,187 / 1,200", "23,500 / 24,000", "42 %"] {
        assert!(page.contains(number), "{number}: {page}");
    }
    assert!(page.contains("<td>first seen late</td><td class=\"num\">17</td>"), "{page}");
    assert!(page.contains("3 looks at the data in all"), "{page}");
    assert_eq!(page.matches("DATA PROBLEM").count(), 1, "only in the history");
    // what people typed is text
    assert!(!page.contains("<b>eve") && !page.contains("<i>wait"), "{page}");
    assert!(page.contains("ann") && page.contains("pause"), "{page}");
    let overview = client.get("/").await.text;
    assert!(overview.contains("href=\"/rollouts/r-1\"") && overview.contains("COLLECTING"), "{overview}");
    assert!(overview.contains("recommends; people decide"), "{overview}");
}

#[tokio::test]
async fn a_suspected_cause_shows_what_is_known() {
    let t = TestServer::start(None).await;
    let proposal = Proposal {
        kind: SubjectKind::Chunk,
        name: "returns@3".into(),
        transition: Transition::CanaryFreeze { share_ppm: 100_000 },
        automatic: false,
        reason: "41 of 60 answers with it failed".into(),
    };
    let suspect = json!({ "kind": "chunk", "name": "returns@3", "exposures": 60, "failures": 41,
        "retrieval_share": 0.01, "z": 9.0, "z_offset": 11.0, "q_hat": 0.62, "q_low": 0.5, "q_high": 0.71,
        "since_hour": 1, "users": 38, "days": 4, "device_classes": 3, "locales": 2, "log_e": 9.0,
        "log_e_trimmed": 7.0, "log_e_decision": 6.907755, "significant": true, "community": null,
        "confounded_with_topic": false, "not_separable": ["hours@1"], "buddies": [], "top_traces": [],
        "canary": null, "explanation": "Answers with it fail." });
    let mut tx = t.server.begin().await.unwrap();
    for (id, subject, evidence) in [
        ("f-1", "returns", json!({ "v": 1, "proposal": proposal, "suspect": suspect })),
        ("f-2", "slice", json!({ "v": 9, "other": "form" })),
    ] {
        let finding = NewFinding {
            finding_id: FindingId::new(id).unwrap(),
            kind: FindingKind::Chunk,
            subject: subject.into(),
            version: 3,
            evidence,
        };
        tx.finding_upsert(&t.app, &finding).await.unwrap();
    }
    tx.commit().await.unwrap();
    let client = browser(&t, Role::Viewer).await;
    let page = client.get("/findings?state=open").await.text;
    assert!(page.contains("Suspected causes") && page.contains("returns version 3"), "{page}");
    for text in
        ["41 of 60", "62.00 % (50.00 % to 71.00 %)", "1,000 to 1", "hide it on 10.0 % of the devices", "hours@1"]
    {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(page.contains("&#34;other&#34;") || page.contains("&quot;other&quot;"), "evidence of another form: {page}");
    assert!(!client.get("/findings?state=resolved").await.text.contains("returns"));
}

#[tokio::test]
async fn the_audit_log_is_paged_and_checked() {
    let t = TestServer::start(None).await;
    let client = browser(&t, Role::Operator).await;
    let mut tx = t.server.begin().await.unwrap();
    for i in 0..120 {
        tx.audit_append(&t.app, "test", "test.note", &format!("note-{i}-"), &json!({ "i": i })).await.unwrap();
    }
    tx.commit().await.unwrap();
    let page = client.get("/audit").await.text;
    assert!(page.contains("note-119-") && page.contains("note-20-") && !page.contains("note-19-"), "{page}");
    // 120 notes and one token: the page ends at entry 22
    assert!(page.contains("/audit?before=22"), "{page}");
    assert!(client.get("/audit?before=22").await.text.contains("note-0-"));
    let check = client.get("/audit?check=true").await.text;
    assert!(check.contains("All 121 entries fit together"), "{check}");
}

/// Answers and labels of the last day by one device; every label is derived as the attribution step does it.
async fn telemetry(t: &TestServer) {
    let lines = |kind: &str, of: &[(&str, &str)]| {
        let line = |(id, rest): &(&str, &str)| {
            format!(r#"{{"kind":"{kind}","interaction_id":"{id}","at":"2026-03-01T07:00:00Z",{rest}}}"#)
        };
        of.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    let bundle = format!(r#""template_id":"faq@3","bundle":"{}","ttft_ms":100.0"#, Digest::of(b"new"));
    let answers = lines("interaction", &[("i-1", &bundle), ("i-2", &bundle), ("i-3", &bundle), ("i-4", &bundle)]);
    let labels = lines("feedback", &[("i-1", r#""label":"rejected""#), ("i-2", r#""label":"accepted""#)]);
    let body = format!("{answers}\n{labels}\n{{}}");
    let request = flywheel_telemetry::IngestRequest {
        app: t.app.clone(),
        ingest_key: "k".into(),
        endpoint: flywheel_telemetry::Endpoint::Events,
        headers: flywheel_telemetry::IngestHeaders {
            content_type: Some("application/x-ndjson".into()),
            ..Default::default()
        },
        body: body.into(),
        now: now(),
    };
    t.server.lake.ingestor().ingest(request).await.unwrap();
    let v = t.server.lake.flush_and_watermark().await.unwrap();
    assert_eq!(t.server.lake.outcomes_advance(&t.app, &Default::default(), &v).await.unwrap(), 2);
}

#[tokio::test]
async fn views_are_tables_for_people() {
    let t = TestServer::start(None).await;
    telemetry(&t).await;
    let mut tx = t.server.begin().await.unwrap();
    let view = flywheel_store::views::NewView {
        name: "mine".into(),
        query: "SELECT interaction_id, '<b>' AS mark FROM interactions ORDER BY 1".into(),
        description: "<i>mine</i>".into(),
        created_by: "eve".into(),
    };
    tx.view_put(&t.app, &view).await.unwrap();
    tx.commit().await.unwrap();
    let viewer = browser(&t, Role::Viewer).await;
    let list = viewer.get("/views").await.text;
    assert!(list.contains("href=\"/views/rejection_rate_24h\"") && !list.contains("href=\"/views/mine\""), "{list}");
    assert!(!list.contains("<i>mine") && list.contains("Only operators read saved views"), "{list}");
    let page = viewer.get("/views/rejection_rate_24h").await.text;
    assert!(page.contains("<td data-label=\"answers\" class=\"num\">4</td>"), "{page}");
    assert!(page.contains("0.2500") && page.contains("anonymous") && page.contains("faq@3"), "{page}");
    assert_eq!(viewer.get("/views/mine").await.status, 403);
    assert_eq!(viewer.get("/views/%ff").await.status, 400);
    let operator = browser(&t, Role::Operator).await;
    let page = operator.get("/views/mine").await.text;
    assert!(page.contains("i-4") && page.contains("&#60;b&#62;") && !page.contains("<b>"), "{page}");
    let none = operator.get("/views/none").await;
    assert!(none.status == 404 && none.text.contains("view_not_found"), "{}", none.text);
    let overview = viewer.get("/").await.text;
    assert!(overview.contains("None by devices that proved who they are"), "{overview}");
    for row in [
        "<td>stored</td><td>interaction</td><td></td><td class=\"num\">4</td>",
        "<td>stored</td><td>feedback</td><td></td><td class=\"num\">2</td>",
        "<td>quarantined</td><td>unknown</td><td>bad event</td><td class=\"num\">1</td>",
    ] {
        assert!(overview.contains(row), "{row}: {overview}");
    }
}
