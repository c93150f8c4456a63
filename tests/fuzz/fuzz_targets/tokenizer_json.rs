//! libFuzzer driver of `flywheel_fuzz::hf::tokenizer_json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::hf::tokenizer_json(data));
