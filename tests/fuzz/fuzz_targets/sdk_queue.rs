//! libFuzzer driver of `flywheel_fuzz::sdk::queue`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::sdk::queue(data));
