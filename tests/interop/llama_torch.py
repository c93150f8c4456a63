"""A GGUF file of architecture llama as a model of transformers, in F32."""

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}


def halves(weight, heads):
    """Rows 2 i and 2 i + 1 of a head are a rotated pair in the file; transformers has it in rows i and i + half."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def load(path):
    reader = GGUFReader(path)

    def value(key, default=None):
        field = reader.get_field(f"llama.{key}")
        return default if field is None else field.contents()

    tensors = {t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type) for t in reader.tensors}
    heads = value("attention.head_count")
    kv_heads = value("attention.head_count_kv", heads)
    config = transformers.LlamaConfig(
        vocab_size=tensors["token_embd"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base", 10000.0),
        tie_word_embeddings="output" not in tensors,
        use_cache=False,
    )
    state = {}
    for name, weight in tensors.items():
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                weight = halves(weight, heads if part == "attn_q" else kv_heads)
            to = f"model.layers.{layer}.{MODULES[part]}.weight"
        else:
            to = "lm_head.weight" if name == "output" else f"model.{TOP[name]}.weight"
        state[to] = torch.from_numpy(np.array(weight, dtype=np.float32))
    if "output" not in tensors:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.tie_weights()
    return model.float()
