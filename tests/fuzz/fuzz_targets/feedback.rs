//! libFuzzer driver of `flywheel_fuzz::telemetry::feedback`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::telemetry::feedback(data));
