//! Canonical JSON: one byte string per value, so that digests and signatures are well defined.
//!
//! Two flavours that differ only for control characters inside strings. TUF signatures cover the OLPC form
//! (<http://wiki.laptop.org/go/Canonical_JSON>), which writes them raw and is then not JSON; documents that are
//! stored and parsed again use the JSON-safe form, which escapes them. Neither normalises Unicode (the
//! reference implementation, securesystemslib, does not either), and neither allows fractions.

use serde_json::Value;

/// Why a value has no canonical form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CanonicalError {
    #[error("`{0}` is not an integer; canonical JSON has no fractions: use an integer in a smaller unit")]
    Fraction(String),
    #[error("value cannot be written as JSON: {0}")]
    Serialize(String),
}

#[derive(Clone, Copy, PartialEq)]
enum Flavour {
    Olpc,
    JsonSafe,
}

/// The bytes a TUF signature covers: keys sorted by code point, no white space, only `"` and `\` escaped.
///
/// # Errors
/// [`CanonicalError`] when the value holds a fraction.
pub fn olpc_bytes(value: &Value) -> Result<Vec<u8>, CanonicalError> {
    let mut out = Vec::with_capacity(512);
    write(value, Flavour::Olpc, &mut out)?;
    Ok(out)
}

/// The same order and spacing, but always valid JSON: control characters are escaped (`\n`, `\u0001`).
/// Equal to [`olpc_bytes`] for values without control characters.
///
/// # Errors
/// [`CanonicalError`] when the value holds a fraction or cannot be serialised.
pub fn json_bytes<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, CanonicalError> {
    let value = serde_json::to_value(value).map_err(|e| CanonicalError::Serialize(e.to_string()))?;
    let mut out = Vec::with_capacity(512);
    write(&value, Flavour::JsonSafe, &mut out)?;
    Ok(out)
}

fn write(value: &Value, flavour: Flavour, out: &mut Vec<u8>) -> Result<(), CanonicalError> {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(b) => out.extend_from_slice(if *b { b"true" } else { b"false" }),
        Value::Number(n) if n.is_i64() || n.is_u64() => out.extend_from_slice(n.to_string().as_bytes()),
        Value::Number(n) => return Err(CanonicalError::Fraction(n.to_string())),
        Value::String(s) => write_string(s, flavour, out),
        Value::Array(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write(item, flavour, out)?;
            }
            out.push(b']');
        }
        Value::Object(map) => {
            // Sorted here because another crate of the build may switch serde_json to insertion order.
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_unstable();
            out.push(b'{');
            for (i, key) in keys.into_iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write_string(key, flavour, out);
                out.push(b':');
                write(&map[key], flavour, out)?;
            }
            out.push(b'}');
        }
    }
    Ok(())
}

fn write_string(text: &str, flavour: Flavour, out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0..=0x1f if flavour == Flavour::JsonSafe => match byte {
                b'\n' => out.extend_from_slice(b"\\n"),
                b'\r' => out.extend_from_slice(b"\\r"),
                b'\t' => out.extend_from_slice(b"\\t"),
                _ => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            },
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn olpc(v: Value) -> String {
        String::from_utf8(olpc_bytes(&v).unwrap()).unwrap()
    }

    /// Values from securesystemslib tests/test_formats.py, `test_encode_canonical`.
    #[test]
    fn reference_values() {
        assert_eq!(olpc(json!([1, 2, 3])), "[1,2,3]");
        assert_eq!(olpc(json!([])), "[]");
        assert_eq!(olpc(json!({})), "{}");
        assert_eq!(olpc(json!({"A": [99]})), r#"{"A":[99]}"#);
        assert_eq!(olpc(json!({"A": true})), r#"{"A":true}"#);
        assert_eq!(olpc(json!({"B": false})), r#"{"B":false}"#);
        assert_eq!(olpc(json!({"y": 2, "x": 3})), r#"{"x":3,"y":2}"#);
        assert_eq!(olpc(json!({"x": 3, "y": null})), r#"{"x":3,"y":null}"#);
        assert!(olpc_bytes(&json!(8.5)).is_err());
    }

    #[test]
    fn control_characters_are_the_only_difference() {
        let v = json!({"b": "a\n\"\\\u{1}é", "a": -1});
        assert_eq!(olpc(v.clone()), "{\"a\":-1,\"b\":\"a\n\\\"\\\\\u{1}é\"}");
        let safe = json_bytes(&v).unwrap();
        assert_eq!(safe, "{\"a\":-1,\"b\":\"a\\n\\\"\\\\\\u0001é\"}".as_bytes());
        assert_eq!(serde_json::from_slice::<Value>(&safe).unwrap(), v);
    }
}
