//! Writes the seed corpus: for every target a few inputs that reach deep, made by the crates' own encoders where they
//! have one. `cargo run --bin seeds -- FOLDER`; the committed folder is `corpus`.

#[cfg(feature = "libfuzzer")]
use libfuzzer_sys as _;

use flywheel_bundle::tuf::Role;
use flywheel_fuzz::bundle::repository::{GENUINE, app};
use flywheel_fuzz::join_pieces;
use flywheel_fuzz::text::{Metadata, bpe, spm};
use flywheel_telemetry::ingest::Recovery;
use flywheel_telemetry::wal::LogConfig;
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestRequest, Settings};
use serde_json::json;
use std::future::Future;
use std::io::Write as _;
use std::path::PathBuf;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

const BATCH: &str = include_str!("../../../../crates/types/golden/event_batch_v1.json");

/// Seeds of one target.
struct Corpus {
    folder: PathBuf,
}

impl Corpus {
    fn add(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::create_dir_all(&self.folder).expect("the corpus folder can be made");
        std::fs::write(self.folder.join(name), bytes).expect("a seed can be written");
    }
    /// With the byte that chooses a variant in front.
    fn add_with(&self, choice: u8, name: &str, bytes: impl AsRef<[u8]>) {
        self.add(name, [&[choice], bytes.as_ref()].concat());
    }
}

fn main() {
    let root = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "corpus".into()));
    let corpus = |name: &str| Corpus { folder: root.join(name) };
    bundles(&corpus("manifest"), &corpus("tuf_metadata"), &corpus("tuf_client"));
    events(&corpus("events"), &corpus("feedback"));
    inflate(&corpus("inflate"));
    otlp_json(&corpus("otlp_traces_json"), &corpus("otlp_logs"));
    otlp_proto(&corpus("otlp_traces_proto"), &corpus("otlp_logs"));
    wal(&corpus("wal"));
    gguf(&corpus("gguf"));
    tokenizer(&corpus("tokenizer"));
    chat_template(&corpus("chat_template"));
    dataset(&corpus("dataset"));
    sdk(&corpus("sdk_queue"), &corpus("sdk_index"));
}

fn bundles(manifest: &Corpus, metadata: &Corpus, client: &Corpus) {
    manifest.add("weights", GENUINE.manifest.to_bytes().expect("the manifest is valid"));
    let mut bare = GENUINE.manifest.clone();
    (bare.base, bare.tokenizer, bare.chat_template, bare.evaluation) = (None, None, None, None);
    bare.health.probe = None;
    manifest.add("bare", bare.to_bytes().expect("the manifest is valid"));
    for (role, n) in Role::ALL.iter().zip(0u8..) {
        metadata.add_with(n, role.as_str(), GENUINE.file(*role));
        let signed = serde_json::to_vec(&GENUINE.signed(*role)).expect("metadata is JSON");
        client.add_with(n, role.as_str(), &signed);
        client.add_with(n | 8, &format!("{role}_later"), &signed);
    }
    metadata.add_with(0, "paths", "bundles/*/*/manifest.json\nbundles/support-answers/7/manifest.json");
    let mut root = GENUINE.signed(Role::Root);
    root["version"] = json!(2);
    client.add_with(8, "next_root", root.to_string());
    client.add_with(6, "assignment", GENUINE.assignment());
    client.add_with(6 | 8 | 16, "assignment_later", GENUINE.assignment());
    let files = [Role::Timestamp, Role::Snapshot, Role::Targets, Role::Catalog, Role::Rollout].map(|r| GENUINE.file(r));
    let answers = [GENUINE.file(Role::Root)].into_iter().chain(files).chain([GENUINE.assignment()]);
    client.add_with(7, "raw", join_pieces(answers));
}

fn events(batch: &Corpus, feedback: &Corpus) {
    batch.add_with(0, "golden", BATCH);
    batch.add_with(128, "keyed", BATCH);
    let content = BATCH.replace(
        "\"output_tokens\": 9",
        "\"output_tokens\": 9, \"ttfv_ms\": 900, \"peak_memory_bytes\": 1000, \"memory_metric\": \"rss\", \"energy_mj\": \
         1.5, \"content\": { \"question\": \"mail a@b.example, +49 170 1234567\", \"answer\": \"Sorry, no.\" }",
    );
    batch.add_with(0, "content", content);
    let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
    let lines: Vec<String> = value["events"].as_array().expect("it has events").iter().map(|e| e.to_string()).collect();
    batch.add_with(1, "lines", lines.join("\n"));
    let one =
        r#"{"interaction_id":"0195-a","at":"2026-03-01T10:00:04Z","label":"rejected","reason":"call 0170 1234567"}"#;
    feedback.add_with(0, "one", one);
    feedback.add_with(1, "lines", format!("{one}\n\n{}", one.replace("rejected", "edited")));
    let claimed =
        one.replace('{', r#"{"install_id":"2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae","#);
    feedback.add_with(0, "claimed", claimed);
}

fn inflate(out: &Corpus) {
    let text = b"some words that compress, some words that compress";
    let gzip = |data: &[u8]| {
        let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        e.write_all(data).expect("memory takes it");
        e.finish().expect("memory takes it")
    };
    out.add_with(0b1101, "gzip", gzip(text));
    out.add_with(0b1011, "gzip_two_members", [gzip(text), gzip(b"again")].concat());
    out.add_with(0b1001, "gzip_bomb", gzip(&[0; 20_000]));
    out.add_with(0b1110, "zstd", zstd::encode_all(&text[..], 3).expect("memory takes it"));
    out.add_with(0b1010, "zstd_bomb", zstd::encode_all(&[0u8; 20_000][..], 3).expect("memory takes it"));
    out.add_with(0b0100, "identity", text);
}

fn attribute(key: &str, value: serde_json::Value) -> serde_json::Value {
    json!({ "key": key, "value": value })
}

fn answer_attributes() -> Vec<serde_json::Value> {
    let text = |s: &str| json!({ "stringValue": s });
    vec![
        attribute("gen_ai.operation.name", text("chat")),
        attribute("gen_ai.response.id", text("r-1")),
        attribute("gen_ai.response.time_to_first_chunk", json!({ "doubleValue": 0.8125 })),
        attribute("gen_ai.usage.input_tokens", json!({ "intValue": "120" })),
        attribute("gen_ai.prompt.name", text("faq")),
        attribute("gen_ai.prompt.version", text("3")),
        attribute(
            "gen_ai.input.messages",
            text(r#"[{"role":"user","parts":[{"type":"text","content":"How long?"}]}]"#),
        ),
        attribute(
            "gen_ai.output.messages",
            text(r#"[{"role":"assistant","parts":[{"type":"text","content":"Sorry"}]}]"#),
        ),
        attribute("fleet.bundle.id", text("assistant/180")),
        attribute("fleet.retrieval.chunk_ids", json!({ "arrayValue": { "values": [text("kb-1@2"), text("kb-9")] } })),
        attribute(
            "fleet.retrieval.scores",
            json!({ "arrayValue": { "values": [{ "doubleValue": 0.9 }, { "doubleValue": "NaN" }] } }),
        ),
        attribute("fleet.energy.millijoules", json!({ "doubleValue": "NaN" })),
        attribute("fleet.refusal", json!({ "boolValue": true })),
        attribute("fleet.rollout.arm", text("canary")),
        attribute("os.name", text("ios")),
        attribute("my.map", json!({ "kvlistValue": { "values": [attribute("a", text("b"))] } })),
        attribute("my.bytes", json!({ "bytesValue": "AAEC" })),
    ]
}

fn otlp_json(traces: &Corpus, logs: &Corpus) {
    let resource = json!({ "attributes": [attribute("service.version", json!({ "stringValue": "5.2.0" }))] });
    let trace_id = "01".repeat(16);
    let documents = r#"[{"id":"kb-4","score":0.7},{"id":"kb-5"}]"#;
    let retrieval = json!({ "traceId": trace_id, "spanId": "0202020202020202", "attributes": [
        attribute("gen_ai.operation.name", json!({ "stringValue": "retrieval" })),
        attribute("gen_ai.retrieval.documents", json!({ "stringValue": documents })),
    ] });
    let feedback = json!({ "name": "gen_ai.evaluation.result", "timeUnixNano": "1772359200000000000", "attributes": [
        attribute("gen_ai.evaluation.name", json!({ "stringValue": "user_feedback" })),
        attribute("gen_ai.evaluation.score.label", json!({ "stringValue": "regenerated" })),
        attribute("gen_ai.response.id", json!({ "stringValue": "r-7" })),
    ] });
    let chat = json!({ "traceId": trace_id, "spanId": "0303030303030303", "name": "chat",
        "startTimeUnixNano": "1772359200000000000", "endTimeUnixNano": 1_772_359_201_000_000_000u64,
        "attributes": [
            attribute("gen_ai.operation.name", json!({ "stringValue": "chat" })),
            attribute("gen_ai.response.id", json!({ "stringValue": "r-7" })),
        ], "events": [feedback.clone()] });
    let spans = json!({ "resourceSpans": [{ "resource": resource, "scopeSpans": [{ "spans": [retrieval, chat] }] }] });
    traces.add("spans", spans.to_string());
    let full = json!({ "traceId": trace_id, "spanId": "0404040404040404", "attributes": answer_attributes() });
    traces.add("answer", json!({ "resourceSpans": [{ "scopeSpans": [{ "spans": [full] }] }] }).to_string());
    let record = |name: &str, attributes: serde_json::Value| {
        let log = json!({ "eventName": name, "timeUnixNano": "1772359200000000000", "attributes": attributes });
        json!({ "resourceLogs": [{ "resource": resource, "scopeLogs": [{ "logRecords": [log] }] }] }).to_string()
    };
    logs.add_with(1, "answer_json", record("gen_ai.client.inference.operation.details", answer_attributes().into()));
    logs.add_with(1, "feedback_json", record("gen_ai.evaluation.result", feedback["attributes"].clone()));
    logs.add_with(
        1,
        "device_json",
        record("fleet.device", json!([attribute("fleet.device.event", json!({ "stringValue": "confirmed" }))])),
    );
}

/// Writers of protobuf fields.
mod proto {
    pub fn varint(mut v: u64, out: &mut Vec<u8>) {
        while v >= 0x80 {
            out.push(v as u8 | 0x80);
            v >>= 7;
        }
        out.push(v as u8);
    }
    pub fn bytes(number: u64, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3 | 2, &mut out);
        varint(content.len() as u64, &mut out);
        out.extend_from_slice(content);
        out
    }
    pub fn int(number: u64, v: u64) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3, &mut out);
        varint(v, &mut out);
        out
    }
    pub fn fixed64(number: u64, v: u64) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3 | 1, &mut out);
        out.extend_from_slice(&v.to_le_bytes());
        out
    }
}

/// `AnyValue` of a ProtoJSON value.
fn any(value: &serde_json::Value) -> Vec<u8> {
    let values = |v: &serde_json::Value| v["values"].as_array().cloned().unwrap_or_default();
    let (kind, v) = value.as_object().and_then(|o| o.iter().next()).expect("a value has one kind");
    match kind.as_str() {
        "stringValue" => proto::bytes(1, v.as_str().unwrap_or_default().as_bytes()),
        "boolValue" => proto::int(2, u64::from(v == true)),
        "intValue" => proto::int(3, v.as_str().and_then(|s| s.parse().ok()).unwrap_or(0)),
        "doubleValue" => proto::fixed64(4, v.as_f64().unwrap_or(f64::NAN).to_bits()),
        "arrayValue" => proto::bytes(5, &values(v).iter().flat_map(|i| proto::bytes(1, &any(i))).collect::<Vec<_>>()),
        "kvlistValue" => proto::bytes(6, &values(v).iter().flat_map(|p| pair(1, p)).collect::<Vec<_>>()),
        _ => proto::bytes(7, &[0, 1, 2]),
    }
}

/// `KeyValue` in field `number`.
fn pair(number: u64, pair: &serde_json::Value) -> Vec<u8> {
    let key = proto::bytes(1, pair["key"].as_str().unwrap_or_default().as_bytes());
    proto::bytes(number, &[key, proto::bytes(2, &any(&pair["value"]))].concat())
}

fn otlp_proto(traces: &Corpus, logs: &Corpus) {
    let all = answer_attributes();
    let pairs = |number, of: &[serde_json::Value]| of.iter().flat_map(|p| pair(number, p)).collect::<Vec<u8>>();
    let wrap = |record: Vec<u8>| {
        let resource = proto::bytes(1, &pairs(1, &[attribute("service.version", json!({ "stringValue": "5.2.0" }))]));
        let scope = proto::bytes(2, &proto::bytes(2, &record));
        proto::bytes(1, &[resource, scope].concat())
    };
    let ids = [proto::bytes(1, &[1; 16]), proto::bytes(2, &[2; 8])].concat();
    let time = proto::fixed64(7, 1_772_359_200_000_000_000);
    let event = proto::bytes(11, &[proto::bytes(2, b"gen_ai.evaluation.result"), pairs(3, &all[..3])].concat());
    let span = [ids, proto::bytes(5, b"chat"), time, pairs(9, &all), event].concat();
    traces.add("span", wrap(span));
    traces.add("bare_span", wrap([proto::bytes(1, &[1; 16]), pairs(9, &all[..2])].concat()));
    let name = proto::bytes(12, b"gen_ai.client.inference.operation.details");
    let log = [proto::fixed64(1, 1_772_359_200_000_000_000), pairs(6, &all), name].concat();
    logs.add_with(0, "log_proto", wrap(log));
}

/// Runs a future that another thread completes.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return out;
        }
        std::thread::yield_now();
    }
}

fn wal(out: &Corpus) {
    let folder = std::env::temp_dir().join(format!("flywheel-seeds-{}", std::process::id()));
    let recovery = Recovery::open(LogConfig::new(&folder)).expect("an empty log opens");
    let ingest = recovery.start(Settings::default(), 0).expect("the log starts");
    let events: Vec<String> = {
        let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
        value["events"].as_array().expect("it has events").iter().map(ToString::to_string).collect()
    };
    for (i, body) in events.into_iter().enumerate() {
        let headers = IngestHeaders {
            content_type: Some("application/x-ndjson".into()),
            idempotency_key: Some(format!("k{i}")),
            ..IngestHeaders::default()
        };
        let now = "2026-03-01T10:00:06Z".parse().expect("a valid time");
        let request = IngestRequest {
            app: app(),
            ingest_key: "key".into(),
            endpoint: Endpoint::Events,
            headers,
            body: body.into(),
            now,
        };
        wait(ingest.ingest(request)).expect("the event is stored");
    }
    drop(ingest);
    let segment = std::fs::read_dir(&folder)
        .expect("the log folder is there")
        .filter_map(|e| e.ok().map(|e| e.path()))
        .find(|p| p.extension().is_some_and(|e| e == "log"))
        .and_then(|p| std::fs::read(p).ok())
        .expect("the log has a segment");
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    let payloads = payloads(&segment);
    for (i, payload) in payloads.iter().enumerate() {
        out.add_with(1, &format!("payload_{i}"), join_pieces([payload.as_slice()]));
    }
    // the smallest record once more as a whole segment, and one cut short
    let smallest = payloads.iter().min_by_key(|p| p.len()).expect("there are records");
    let (whole, _) = flywheel_fuzz::wal::framed(&join_pieces([smallest.as_slice()]));
    out.add_with(0, "segment", &whole);
    out.add_with(2, "torn", &whole[..whole.len() - 9]);
    out.add_with(1, "keys_only", join_pieces([&keys(&[(3, 1), (3, 2), (3, 9)])[..], &[1], &[99, 1, 2]]));
    let install = [
        &7u64.to_le_bytes()[..],
        &1u64.to_le_bytes(),
        &[3; 16],
        &5u64.to_le_bytes(),
        &[1],
        &8u64.to_le_bytes(),
        &9u64.to_le_bytes(),
    ];
    out.add_with(4, "duplicates", install.concat());
}

/// A payload with batch identities only.
fn keys(of: &[(u8, u64)]) -> Vec<u8> {
    let entry = |(scope, seq): &(u8, u64)| [&[1][..], &[*scope; 16], &seq.to_le_bytes(), &[0; 4]].concat();
    let all: Vec<u8> = of.iter().flat_map(entry).collect();
    [&[1, 16][..], &(all.len() as u32).to_le_bytes(), &all].concat()
}

/// Payloads of a segment, in order.
fn payloads(segment: &[u8]) -> Vec<Vec<u8>> {
    let (mut rest, mut out) = (&segment[16..], Vec::new());
    while rest.len() > 24 {
        let len = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
        out.push(rest[24..24 + len].to_vec());
        rest = &rest[24 + len..];
    }
    out
}

fn gguf(out: &Corpus) {
    out.add("empty", padded(Metadata::default().head(0)));
    let mut scalars = Metadata::default();
    scalars.string("general.name", "tiny");
    scalars.u32("general.alignment", 64);
    scalars.f32("x.f32", 1.5);
    scalars.i32s("x.i32", &[1, 2, 3]);
    scalars.strings("x.strings", &["a".into(), "b".into()]);
    out.add("metadata", padded(scalars.head(0)));
    out.add("spm", padded(spm().head(0)));
    out.add("bpe", padded(bpe("qwen2").head(0)));
    out.add(
        "tensors",
        tensors(
            Metadata::default(),
            &[("a", &[32, 2], 2), ("b", &[256], 14), ("c", &[4, 1, 1, 2], 0), ("d", &[3], 30)],
        ),
    );
    out.add("adapter", adapter());
    out.add("model", model());
}

fn padded(mut file: Vec<u8>) -> Vec<u8> {
    file.resize(file.len().next_multiple_of(32), 0);
    file
}

/// Bytes of a tensor: (weights per block, bytes per block) by type id.
fn data_len(dims: &[u64], ty: u32) -> usize {
    let (weights, bytes) = match ty {
        0 => (1, 4),
        1 | 30 => (1, 2),
        2 => (32, 18),
        8 => (32, 34),
        14 => (256, 210),
        other => unreachable!("type {other} is not used here"),
    };
    dims.iter().product::<u64>() as usize / weights * bytes
}

/// A file with these tensors (name, shape, type id), filled with a pattern of small values.
fn tensors(metadata: Metadata, of: &[(&str, &[u64], u32)]) -> Vec<u8> {
    let mut file = metadata.head(of.len() as u64);
    let mut offset = 0usize;
    for (name, dims, ty) in of {
        file.extend_from_slice(&(name.len() as u64).to_le_bytes());
        file.extend_from_slice(name.as_bytes());
        file.extend_from_slice(&(dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| file.extend_from_slice(&d.to_le_bytes()));
        file.extend_from_slice(&ty.to_le_bytes());
        file.extend_from_slice(&(offset as u64).to_le_bytes());
        offset = (offset + data_len(dims, *ty)).next_multiple_of(32);
    }
    let mut file = padded(file);
    for (_, dims, ty) in of {
        // 0x3c00 is 1.0 as f16 and a small number as f32: finite under every type
        file.extend(
            std::iter::repeat_n([0x00, 0x3c], data_len(dims, *ty).div_ceil(2)).flatten().take(data_len(dims, *ty)),
        );
        file = padded(file);
    }
    file
}

fn adapter() -> Vec<u8> {
    let mut m = Metadata::default();
    m.string("general.type", "adapter");
    m.string("adapter.type", "lora");
    m.string("general.architecture", "llama");
    m.f32("adapter.lora.alpha", 16.0);
    tensors(m, &[("blk.0.attn_q.weight.lora_a", &[8, 2], 0), ("blk.0.attn_q.weight.lora_b", &[2, 8], 0)])
}

/// A decoder of one layer with 32 values and 8 tokens.
fn model() -> Vec<u8> {
    let mut m = Metadata::default();
    m.string("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        m.u32(&format!("llama.{key}"), value);
    }
    m.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    m.f32("llama.rope.freq_base", 10_000.0);
    m.strings("tokenizer.ggml.tokens", &["a", "b", "c", "d", "e", "f", "g", "h"].map(str::to_owned));
    tensors(
        m,
        &[
            ("token_embd.weight", &[32, 8], 8),
            ("output_norm.weight", &[32], 0),
            ("blk.0.attn_norm.weight", &[32], 0),
            ("blk.0.attn_q.weight", &[32, 32], 8),
            ("blk.0.attn_k.weight", &[32, 16], 8),
            ("blk.0.attn_v.weight", &[32, 16], 8),
            ("blk.0.attn_output.weight", &[32, 32], 8),
            ("blk.0.ffn_norm.weight", &[32], 0),
            ("blk.0.ffn_gate.weight", &[32, 32], 2),
            ("blk.0.ffn_up.weight", &[32, 32], 2),
            ("blk.0.ffn_down.weight", &[32, 32], 2),
        ],
    )
}

fn tokenizer(out: &Corpus) {
    let text = "How long's the WARRANTY?\r\n  你好，1234 é́ \u{200d}👩‍👩‍👧 <|im_start|>the <user defined>\t";
    for (n, name) in (0u8..).zip(["gpt2", "smollm", "qwen2", "r1", "llama", "deepseek_llm", "deepseek_coder", "spm"]) {
        out.add_with(n, name, text);
    }
    out.add_with(128, "own_bpe", "a\nb\nab\nc\nabc\0a b\nab c\0abcab");
    out.add_with(128 | 1, "own_bpe_kinds", "a\nb\nab\n<s>\0a b\0ab<s>ab");
    out.add_with(128 | 2, "own_spm", "a\nb\nab\n▁\n▁ab\n<0x41>\0\0ab abA");
    out.add_with(128 | 16, "own_llama", "a\nb\nab\0a b\0abab ab");
}

fn chat_template(out: &Corpus) {
    let talk = "\0sBe brief.\0uHow long?\0a<think>hm</think>24 months\0uThanks <|im_end|>";
    let templates = [
        ("chatml", "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"),
        (
            "chatml_default",
            "{% if not system %}<|im_start|>system\nYou are helpful<|im_end|>\n{% endif %}<|im_start|></think>",
        ),
        ("deepseek", "<｜User｜>{{x}}<｜Assistant｜><think>\n</think><｜end▁of▁sentence｜>"),
        ("llama3", "<|start_header_id|>{{role}}<|end_header_id|>\n\n{{content}}<|eot_id|>"),
    ];
    for (name, template) in templates {
        out.add(name, format!("{template}{talk}"));
    }
}

fn dataset(out: &Corpus) {
    let correction = |id: &str, person: &str, corrected: &str| {
        json!({ "interaction_id": id, "person": person, "trusted": true, "system": "Answer from the manual.",
            "question": "How long is the warranty?", "output": "The warranty is 12 months.", "corrected": corrected,
            "chunks": ["kb-1"], "group": "template-1" })
        .to_string()
    };
    let lines = [
        correction("i-1", "p-1", "The warranty is 24 months."),
        correction("i-1", "p-2", "The  warranty is 24 months."),
        correction("i-2", "p-1", ""),
        correction("i-3", "p-3", "The 保修期 is two years, is the warranty."),
    ];
    out.add("corrections", lines.join("\n"));
    let parsed: Vec<_> = lines.iter().map(|l| serde_json::from_str(l).expect("a correction")).collect();
    let policy = flywheel_attribution::dataset::DatasetPolicyV1 {
        people_needed: 1,
        max_person_share: 1.0,
        ..Default::default()
    };
    let built = flywheel_attribution::dataset::build(&policy, &parsed, &Default::default()).expect("a set");
    out.add("samples", &built.jsonl);
}

/// A record of the SDK's queue: tag, numbers, rest.
fn record(tag: u8, numbers: &[u64], rest: &[u8]) -> Vec<u8> {
    let numbers: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    [&[tag], &numbers[..], rest].concat()
}

fn sdk(queue: &Corpus, index: &Corpus) {
    let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
    let event = |i: usize| value["events"][i].to_string();
    let base = record(1, &[], br#"{"next_seq":4,"next_event":9,"last_report":2,"dropped":{}}"#);
    let interaction = record(2, &[9, 0], &[&[1], event(0).as_bytes()].concat());
    let device = record(2, &[10, 3], &[&[0], event(2).as_bytes()].concat());
    let list = |numbers: &[u64], rest: &[u8]| {
        let all: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        [&(numbers.len() as u32).to_le_bytes()[..], &all, rest].concat()
    };
    let batch = record(3, &[4], &list(&[9], value.to_string().as_bytes()));
    let acked = record(4, &[4], &[]);
    let refused = record(5, &[4], br#"{"http_400":1}"#);
    let split = record(6, &[4], &[]);
    let dropped = record(7, &[], &list(&[10], br#"{"queue_full":1}"#));
    let pieces = |all: &[&Vec<u8>]| join_pieces(all.iter().map(|r| r.as_slice()));
    let queued = pieces(&[&base, &interaction, &device]);
    queue.add_with(1, "queued", &queued);
    queue.add_with(0, "raw", flywheel_fuzz::sdk::framed(&queued));
    queue.add_with(1 | 2, "acked", pieces(&[&base, &interaction, &batch, &acked, &device]));
    queue.add_with(1 | 8, "split", pieces(&[&base, &interaction, &device, &batch, &split]));
    queue.add_with(1 | 16, "refused", pieces(&[&base, &interaction, &batch, &refused]));
    queue.add_with(1 | 24, "in_flight", pieces(&[&base, &interaction, &batch, &dropped]));
    let state = json!({ "v": 1, "active": null, "previous": null, "off": false, "loading": null, "failures_in_a_row": 0,
        "verdicts": [], "arm": null, "exposures": [], "joined": [], "next_install_no": 1, "next_report": 5,
        "reports": [{ "no": 4, "event": { "at": "2026-03-01T10:00:01Z", "event": "confirmed" } }],
        "next_poll_at": "2026-03-01T11:00:00Z", "epoch_floor": 1, "last_refusal": null });
    queue.add_with(4, "state", state.to_string());
    let chunk = |id: &str, state: &str| {
        json!({ "chunk_id": id, "version": 1, "state": state, "text": "24 months", "embedding": "AACAPwAAAAA=",
            "hide": { "salt": "s", "share_ppm": 500_000, "shown": true } })
    };
    let first = json!({ "index_version": 2, "changes": [chunk("a", "active"), chunk("b", "frozen")] }).to_string();
    let second = json!({ "index_version": 3, "changes": [chunk("a", "retired")] }).to_string();
    index.add("two_answers", join_pieces([first.as_bytes(), second.as_bytes()]));
}
