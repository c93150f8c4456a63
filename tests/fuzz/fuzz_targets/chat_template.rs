//! libFuzzer driver of `flywheel_fuzz::text::chat_template`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::text::chat_template(data));
