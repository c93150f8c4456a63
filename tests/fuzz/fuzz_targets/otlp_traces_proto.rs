//! libFuzzer driver of `flywheel_fuzz::otlp::traces_proto`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::otlp::traces_proto(data));
