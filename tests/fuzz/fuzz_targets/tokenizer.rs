//! libFuzzer driver of `flywheel_fuzz::text::tokenizer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::text::tokenizer(data));
