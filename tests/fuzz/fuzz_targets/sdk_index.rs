//! libFuzzer driver of `flywheel_fuzz::sdk::index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::sdk::index(data));
