//! Writes the seed corpus: for every target a few inputs that reach deep, made by the crates' own encoders where they
//! have one. `cargo run --bin seeds -- FOLDER`; the committed folder is `corpus`.

mod hf;
mod metrics;
mod model;
mod onnx;
mod otlp;
mod stored;

// an instrumented build needs what libFuzzer defines for its counters
#[cfg(feature = "libfuzzer")]
use libfuzzer_sys as _;

use flywheel_bundle::tuf::Role;
use flywheel_fuzz::bundle::repository::GENUINE;
use flywheel_fuzz::join_pieces;
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;

const BATCH: &str = include_str!("../../../../../crates/types/golden/event_batch_v1.json");

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
    import(&corpus("import_lines"));
    inflate(&corpus("inflate"));
    otlp::json_bodies(&corpus("otlp_traces_json"), &corpus("otlp_logs"));
    otlp::proto_bodies(&corpus("otlp_traces_proto"), &corpus("otlp_logs"));
    metrics::json_bodies(&corpus("otlp_metrics_json"));
    metrics::proto_bodies(&corpus("otlp_metrics_proto"));
    stored::wal(&corpus("wal"));
    model::gguf(&corpus("gguf"));
    model::imatrix(&corpus("imatrix"));
    hf::safetensors(&corpus("safetensors"));
    hf::tokenizer_json(&corpus("tokenizer_json"));
    onnx::onnx(&corpus("onnx"));
    tokenizer(&corpus("tokenizer"));
    chat_template(&corpus("chat_template"));
    dataset(&corpus("dataset"));
    stored::sdk(&corpus("sdk_queue"), &corpus("sdk_index"));
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

/// Lines of history: an answer, a device event and feedback, with the times that only history may give.
fn import(out: &Corpus) {
    let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
    let mut lines = Vec::new();
    for event in value["events"].as_array().expect("it has events") {
        let mut event = event.clone();
        event["received_at"] = json!("2026-02-01T10:00:04Z");
        lines.push(event.to_string());
    }
    let all = lines.join("\n");
    out.add_with(0, "plain", &all);
    out.add_with(0b01_1001, "gzip", format!("{all}\n\n \nnot json\n"));
    out.add_with(0b10_0010, "zstd", format!("{all}\r\n{{}}"));
    out.add_with(0b101, "gzip_raw", flywheel_fuzz::telemetry::gzip(all.as_bytes()));
    out.add_with(0b110, "zstd_raw", flywheel_fuzz::telemetry::zstd(all.as_bytes()));
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
