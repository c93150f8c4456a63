//! libFuzzer driver of `flywheel_fuzz::import::lines`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::import::lines(data));
