//! Small random decoders with a tokenizer of bytes, as files that a test can count and compute by hand.

use flywheel_inference::codec;
use flywheel_inference::gguf::{self, Array, TensorData, TensorSpec, TensorType, Value};
use std::path::Path;

/// Values of a head.
const HEAD: u64 = 16;
/// Bytes and three special tokens.
pub const VOCAB: u64 = 259;
const TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + \
    '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Sizes of a model.
#[derive(Clone, Copy)]
pub struct Tiny {
    pub layers: u64,
    pub width: u64,
    pub ffn: u64,
    pub seed: u64,
    pub pre: &'static str,
}

impl Default for Tiny {
    fn default() -> Self {
        Self { layers: 2, width: 64, ffn: 256, seed: 1, pre: "gpt-2" }
    }
}

/// The characters that byte-level vocabularies write bytes as.
pub fn byte_tokens() -> Vec<String> {
    let plain = |b: &u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut other = 256u32;
    let mut of = |b: u32| {
        if plain(&b) {
            return b;
        }
        other += 1;
        other - 1
    };
    (0..256).map(|b| char::from_u32(of(b)).unwrap().to_string()).collect()
}

impl Tiny {
    /// Name, shape and type of every tensor, in order.
    pub fn specs(&self) -> Vec<TensorSpec> {
        let spec = |name: &str, dims: &[u64]| TensorSpec {
            name: name.to_owned(),
            dims: dims.to_vec(),
            ty: if dims.len() > 1 { TensorType::F16 } else { TensorType::F32 },
        };
        let (w, f) = (self.width, self.ffn);
        let mut out = vec![spec("token_embd.weight", &[w, VOCAB]), spec("output_norm.weight", &[w])];
        for i in 0..self.layers {
            let parts: [(&str, &[u64]); 9] = [
                ("attn_norm", &[w]),
                ("attn_q", &[w, w]),
                ("attn_k", &[w, w / 2]),
                ("attn_v", &[w, w / 2]),
                ("attn_output", &[w, w]),
                ("ffn_norm", &[w]),
                ("ffn_gate", &[w, f]),
                ("ffn_up", &[w, f]),
                ("ffn_down", &[f, w]),
            ];
            out.extend(parts.iter().map(|(part, dims)| spec(&format!("blk.{i}.{part}.weight"), dims)));
        }
        out
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let number = |v: u64| Value::U32(v as u32);
        let heads = self.width / HEAD;
        let sizes = [
            ("block_count", self.layers),
            ("context_length", 1024),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", heads),
            ("attention.head_count_kv", heads / 2),
        ];
        let mut out = vec![("general.architecture".to_owned(), Value::from("llama"))];
        out.extend(sizes.map(|(key, v)| (format!("llama.{key}"), number(v))));
        out.push(("llama.attention.layer_norm_rms_epsilon".into(), 1e-5f32.into()));
        out.push(("llama.rope.freq_base".into(), 10_000f32.into()));
        let special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"].map(str::to_owned);
        let tokens: Vec<String> = byte_tokens().into_iter().chain(special).collect();
        let kinds = [vec![1; 256], vec![3; 3]].concat();
        for (key, value) in [
            ("tokenizer.ggml.model", Value::from("gpt2")),
            ("tokenizer.ggml.pre", Value::from(self.pre)),
            ("tokenizer.ggml.tokens", Value::Array(Array::String(tokens))),
            ("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))),
            ("tokenizer.ggml.merges", Value::Array(Array::String(Vec::new()))),
            ("tokenizer.ggml.eos_token_id", number(257)),
            ("tokenizer.chat_template", Value::from(TEMPLATE)),
        ] {
            out.push((key.to_owned(), value));
        }
        out
    }

    /// Values of a tensor: even noise, so large that the layers matter.
    pub fn values(&self, spec: &TensorSpec) -> Vec<f32> {
        let n: u64 = spec.dims.iter().product();
        let key = spec.name.bytes().fold(self.seed, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let mut state = key.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        match spec.dims.len() {
            1 => (0..n).map(|_| 1.0 + 0.3 * draw()).collect(),
            _ if spec.name.starts_with("token_embd") => (0..n).map(|_| draw()).collect(),
            _ => {
                let scale = 2.0 / (spec.dims[0] as f32).sqrt();
                (0..n).map(|_| scale * draw()).collect()
            }
        }
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) {
        let tensors = self.specs().into_iter().map(|spec| {
            let bytes = codec::quantize(spec.ty, &self.values(&spec), spec.dims[0] as usize, None).unwrap();
            (spec, TensorData::Bytes(bytes.into()))
        });
        gguf::write(path, &self.metadata(), tensors).unwrap();
    }

    /// Weights of the whole model.
    pub fn weights(&self) -> u64 {
        self.specs().iter().map(|s| s.dims.iter().product::<u64>()).sum()
    }
}

/// A text of so many bytes in which some letters follow others.
pub fn prose(bytes: usize) -> String {
    let words = ["the", "river", "carries", "small", "stones", "and", "letters", "home", "before", "winter", "1842"];
    let mut out = String::new();
    let mut state = 7u32;
    while out.len() < bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        out += words[(state >> 16) as usize % words.len()];
        out.push(if state >> 29 == 0 { '\n' } else { ' ' });
    }
    out.truncate(bytes);
    out
}
