//! libFuzzer driver of `flywheel_fuzz::bundle::metadata::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::bundle::metadata::run(data));
