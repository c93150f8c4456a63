//! libFuzzer driver of `flywheel_fuzz::otlp::metrics_proto`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::otlp::metrics_proto(data));
