//! `eval`, `chat` and `prune`: figures that the library computes too, or that follow from how the models were made.

use super::Place;
use super::tiny::Tiny;
use flywheel_inference::eval::perplexity;
use flywheel_inference::model::{Decoder, GenerateOptions};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::process::Stdio;

#[test]
fn perplexity_and_divergence_are_those_of_the_library() {
    let place = Place::new(Tiny::default());
    let seen = place.ok("eval base.gguf --text text.txt --window 128 --json").json();
    let base = place.open("base.gguf");
    let tokenizer = Tokenizer::from_gguf(&base).unwrap();
    let tokens = tokenizer.encode(&fs::read_to_string(place.at("text.txt")).unwrap(), false);
    let decoder = Decoder::load(&base).unwrap();
    let want = perplexity(&decoder, &tokens, 128, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(seen["perplexity"], json!(want));
    assert_eq!(want.tokens, 62 * 64);

    let itself = place.ok("eval base.gguf --base base.gguf --text text.txt --window 128 --json").json();
    let d = &itself["divergence"];
    assert_eq!((d["kld"].clone(), d["top1"].clone(), d["dp_rms"].clone()), (json!(0.0), json!(1.0), json!(0.0)));
    place.ok("quantize base.gguf q4.gguf --profile q4_0");
    let live = place.ok("eval q4.gguf --base base.gguf --text text.txt --window 128 --json").json();
    place.ok("eval base.gguf --record base.predictions --text text.txt --window 128");
    let kept = place.ok("eval q4.gguf --base base.predictions --text text.txt --window 128 --json").json();
    let kld = |v: &Value| v["divergence"]["kld"].as_f64().unwrap();
    assert!(kld(&live) > 1e-3 && (kld(&live) - kld(&kept)).abs() < 1e-5, "{live} {kept}");
    let interval = &live["divergence"]["intervals"]["kld"];
    assert!(interval["low"].as_f64().unwrap() < kld(&live) && kld(&live) < interval["high"].as_f64().unwrap());
    place.fails(1, "eval q4.gguf --base base.predictions --text text.txt --window 64", "recorded in windows of 128");
    let shown = place.ok("eval q4.gguf --base base.gguf --text text.txt --window 128").out;
    assert!(shown.contains(&format!("KLD mean {:.6}", kld(&live))), "{shown}");
}

#[test]
fn an_engine_that_is_not_in_the_build_says_how_to_get_it() {
    let place = Place::new(Tiny::default());
    let eval = "eval base.gguf --text text.txt --window 128";
    let [own, default] = ["--engine own --json", "--json"].map(|how| place.ok(&format!("{eval} {how}")).json());
    assert_eq!(own, default);
    place.fails(2, &format!("{eval} --engine llama-cpp"), "--features llama-cpp");
    place.fails(2, &format!("{eval} --engine llama-cpp --ladder"), "--ladder");
}

#[test]
fn sets_are_asked_and_judged() {
    let place = Place::new(Tiny::default());
    // " a" against the same with a tail that a model of noise finds much less likely
    let choice =
        |right: usize| json!({ "prompt": "one two", "options": [" a", " a and then far too much"], "right": right });
    fs::write(place.at("choices.jsonl"), format!("{}\n{}\n", choice(0), choice(1))).unwrap();
    let seen = place.ok("eval base.gguf --choices choices.jsonl --json").json();
    let result = |i: usize| &seen["choices"]["results"][i];
    assert_eq!(
        (result(0)["chosen"].clone(), result(0)["right"].clone(), result(1)["right"].clone()),
        (json!(0), json!(true), json!(false))
    );
    let sums = result(0)["log_likelihoods"].as_array().unwrap();
    assert!(sums[0].as_f64().unwrap() > sums[1].as_f64().unwrap());
    assert_eq!(seen["choices"]["right"]["value"], 0.5);
    let gsm = json!({ "question": "How many?", "answer": "six and six\n#### 12" });
    fs::write(place.at("gsm.jsonl"), format!("{gsm}\n{gsm}\n")).unwrap();
    assert_eq!(place.ok("eval base.gguf --choices gsm.jsonl --limit 1 --json").json()["choices"]["items"], 1);
    fs::write(place.at("bad.jsonl"), "{\"prompt\": \"x\"}\n").unwrap();
    place.fails(1, "eval base.gguf --choices bad.jsonl", "bad.jsonl, line 1");

    let answer = place.ok("chat base.gguf --prompt hello --max-tokens 48").out;
    let expected = answer.trim_end_matches('\n').trim().to_owned();
    let set = json!({ "items": [{ "prompt": "hello", "expect": expected }, { "prompt": "hello", "expect": "no such words" }] });
    fs::write(place.at("set.json"), set.to_string()).unwrap();
    let asked = place.ok("eval base.gguf --questions set.json --rule whole --json").json();
    let results = asked["questions"]["results"].as_array().unwrap();
    assert_eq!(results[0]["answer"], json!(expected));
    assert_eq!((results[0]["right"].clone(), results[1]["right"].clone()), (json!(true), json!(false)), "{asked}");

    let safe = place.ok("eval base.gguf --safety --limit 3 --json").json();
    assert_eq!(safe["safety"]["results"].as_array().unwrap().len(), 3);
    assert_eq!(safe["safety"]["refusal_rate"]["value"], 0.0, "noise refuses nothing: {safe}");
    let speed = place.ok("eval base.gguf --speed --prompt-tokens 16 --new-tokens 8 --json").json();
    for figure in ["prefill_tokens_per_s", "decode_tokens_per_s", "first_token_ms", "peak_rss_bytes"] {
        assert!(speed["speed"][figure].as_f64().unwrap() > 0.0, "{figure}: {speed}");
    }
}

#[test]
fn the_ladder_is_written_as_table_figures_and_plot() {
    let place = Place::new(Tiny::default());
    place.ok("quantize base.gguf other.gguf --profile q4_1");
    let run = "eval base.gguf --ladder --text text.txt --window 128 --prompt-tokens 16 --new-tokens 8 --save l --file Q4_1=other.gguf";
    let shown = place.ok(&format!("{run} --stock s=other.gguf")).out;
    assert_eq!(shown.trim_end(), fs::read_to_string(place.at("l.md")).unwrap().trim_end());
    let whole: Value = serde_json::from_slice(&place.bytes("l.json")).unwrap();
    let rows = whole["rows"].as_array().unwrap();
    let labels: Vec<&str> = rows.iter().map(|r| r["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["F16", "s", "Q8_0", "Q4_0", "Q4_1"]);
    let kld: Vec<f64> = rows.iter().map(|r| r["divergence"]["kld"].as_f64().unwrap()).collect();
    assert!(kld[0] == 0.0 && kld[2] < 0.1 * kld[3].min(kld[4]) && kld[1] == kld[4], "{kld:?}");
    assert_eq!(rows[0]["file_bytes"], json!(fs::metadata(place.at("base.gguf")).unwrap().len()));
    assert_eq!(rows[4]["against_stock"][0], "s", "compared with the file that is not smaller");
    let svg = fs::read_to_string(place.at("l.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains(">Q4_0<") && svg.contains(">stock<"), "{svg}");
    assert_eq!(shown.lines().filter(|l| l.starts_with("| ")).count(), 1 + 5, "{shown}");
    place.fails(1, "eval other.gguf --ladder --text text.txt --window 128", "already Q4_1");
    let again = place
        .ok("eval other.gguf --ladder --text text.txt --window 128 --allow-requantize --profile q4_0 --json")
        .json();
    assert_eq!(again["rows"][0]["label"], "Q4_1");
}

/// What the library answers greedily.
fn greedy(place: &Place, messages: &[Message<'_>], max_new_tokens: usize) -> String {
    let base = place.open("base.gguf");
    let (tokenizer, template) = (Tokenizer::from_gguf(&base).unwrap(), ChatTemplate::from_gguf(&base).unwrap());
    let prompt = tokenizer.encode_chat(&template, messages, true).unwrap();
    let options = GenerateOptions { max_new_tokens, stop_ids: tokenizer.special().ends.clone(), ..Default::default() };
    let made = Decoder::load(&base).unwrap().generate_batch(&[prompt], &options).unwrap();
    let mut stream = tokenizer.stream();
    let mut text: String = made[0].tokens.iter().map(|t| stream.push(*t)).collect();
    text += &stream.finish();
    text
}

#[test]
fn a_conversation_streams_what_the_library_generates() {
    let place = Place::new(Tiny::default());
    let one = place.ok("chat base.gguf --prompt hello --system briefly --max-tokens 24");
    let want = greedy(&place, &[Message::system("briefly"), Message::user("hello")], 24);
    assert_eq!(one.out, format!("{want}\n"));
    assert!(one.err.contains(" tokens read, ") && one.err.contains("tokens/s"), "{one:?}");
    let drawn = |seed: u32| {
        place
            .ok(&format!("chat base.gguf --prompt hello --max-tokens 24 --temperature 1.5 --top-p 0.95 --seed {seed}"))
            .out
    };
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));

    let mut child = place
        .command("chat base.gguf --max-tokens 12")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n\nand then?\n").unwrap();
    let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let first = greedy(&place, &[Message::user("hello")], 12);
    let second = greedy(&place, &[Message::user("hello"), Message::assistant(&first), Message::user("and then?")], 12);
    assert_eq!(out, format!("{first}\n{second}\n"), "the second answer knows the first");
}

#[test]
fn parts_are_measured_and_left_out() {
    let model = Tiny { layers: 3, ..Tiny::default() };
    let place = Place::new(model);
    let seen = place.ok("prune base.gguf --text text.txt --window 64 --max-tokens 640 --json").json();
    let parts = seen["damage"]["parts"].as_array().unwrap();
    assert_eq!(parts.len(), 3 + 3 * 2, "layers, and head groups of each");
    let damage: Vec<f64> = parts.iter().map(|p| p["divergence"]["kld"].as_f64().unwrap()).collect();
    assert!(damage.windows(2).all(|w| w[0] <= w[1]) && damage[0] > 0.0, "{damage:?}");
    place.ok("prune base.gguf --text text.txt --window 64 --max-tokens 640 --report damage.md --drop-layers 1 --drop-groups 1 --out small.gguf");
    assert!(fs::read_to_string(place.at("damage.md")).unwrap().contains("head group 1"));
    let small = place.ok("inspect small.gguf --json").json();
    assert_eq!(
        (small["model"]["layers"].clone(), small["model"]["heads"].clone(), small["model"]["kv_heads"].clone()),
        (json!(2), json!(2), json!(1))
    );
    place.ok("eval small.gguf --base base.gguf --text text.txt --window 64 --max-tokens 640");
    place.fails(
        1,
        "prune base.gguf --text text.txt --window 64 --max-tokens 640 --drop-layers 3 --out x.gguf",
        "leaving out 3 of 3 layers",
    );
    place.fails(2, "prune base.gguf --text text.txt --out x.gguf", "--drop-layers");
    assert!(!place.at("x.gguf").exists());
}
