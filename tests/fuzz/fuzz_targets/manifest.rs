//! libFuzzer driver of `flywheel_fuzz::bundle::manifest::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::bundle::manifest::run(data));
