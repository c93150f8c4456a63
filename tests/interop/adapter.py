"""An adapter file in stock llama.cpp: `adapter.py BASE.gguf ADAPTER.gguf MERGED.gguf TOKENS.json`.

Prints as JSON how far the logits of the base with the adapter are from those of the merged file (`merged`), and from those of
the base alone (`base`): largest absolute differences over all positions.
"""

import ctypes as c
import json
import sys

import numpy as np

import referee

FUNCTIONS = {
    "llama_adapter_lora_init": (c.c_void_p, c.c_void_p, c.c_char_p),
    "llama_set_adapters_lora": (
        c.c_int32, c.c_void_p, c.POINTER(c.c_void_p), c.c_size_t, c.POINTER(c.c_float),
    ),
}  # fmt: skip


def logits(llama, path, tokens, adapter=None):
    model = referee.Model(llama, path, len(tokens), 2)
    if adapter:
        loaded = llama.llama_adapter_lora_init(model.model, adapter.encode())
        if not loaded:
            sys.exit(f"stock llama.cpp refuses {adapter}")
        if llama.llama_set_adapters_lora(model.context, (c.c_void_p * 1)(loaded), 1, (c.c_float * 1)(1.0)) != 0:
            sys.exit(f"stock llama.cpp does not apply {adapter}")
    batch = model.batch
    batch.n = len(tokens)
    for j, token in enumerate(tokens):
        batch.token[j], batch.position[j], batch.sequences[j], batch.logits[j] = token, j, 1, True
        batch.sequence[j][0] = 0
    if llama.llama_decode(model.context, batch) != 0:
        sys.exit("stock llama.cpp cannot run the model")
    rows = [llama.llama_get_logits_ith(model.context, j) for j in range(len(tokens))]
    out = np.stack([np.ctypeslib.as_array(row, (model.size,)).copy() for row in rows])
    model.close()
    return out


def main():
    base, adapter, merged, tokens = sys.argv[1:]
    with open(tokens, encoding="utf8") as file:
        tokens = json.load(file)
    llama = referee.library()
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    adapted = logits(llama, base, tokens, adapter)
    worst = {
        "merged": float(np.abs(adapted - logits(llama, merged, tokens)).max()),
        "base": float(np.abs(adapted - logits(llama, base, tokens)).max()),
    }
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
