//! libFuzzer driver of `flywheel_fuzz::telemetry::inflate_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::telemetry::inflate_body(data));
