//! libFuzzer driver of `flywheel_fuzz::onnx::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::onnx::run(data));
