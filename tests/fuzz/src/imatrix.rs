//! Importance matrices: llama.cpp's GGUF form and the older `imatrix.dat`.

use crate::scratch::Scratch;
use flywheel_inference::quantize::Imatrix;

/// The bytes as a file of importance: what is accepted can be used, and our writer gives it back.
pub fn run(data: &[u8]) {
    let Ok(read) = Imatrix::from_bytes(data.to_vec()) else { return };
    let mut values = 0;
    for name in read.tensors() {
        // a tensor that was never called has no importance
        let Some(importance) = read.get(name) else { continue };
        values += importance.len();
        let bad = importance.iter().find(|v| !(v.is_finite() && **v >= 0.0));
        assert_eq!(bad, None, "importance of `{name}` is finite and not negative");
    }
    assert!(values * 4 <= data.len(), "every value lies in the file");
    let scratch = Scratch::empty();
    let path = scratch.path().join("again.gguf");
    // names of the older form may be longer than a GGUF file allows
    if read.write(&path).is_ok() {
        let again = Imatrix::read(&path).expect("what our writer wrote can be read");
        assert_eq!(again, read);
    }
}
