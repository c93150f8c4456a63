//! libFuzzer driver of `flywheel_fuzz::imatrix::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::imatrix::run(data));
