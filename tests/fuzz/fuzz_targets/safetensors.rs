//! libFuzzer driver of `flywheel_fuzz::hf::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| flywheel_fuzz::hf::safetensors(data));
