//! libFuzzer driver of `flywheel_fuzz::otlp::traces_json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::otlp::traces_json(data));
