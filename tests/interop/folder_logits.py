"""Logits of model folders in transformers, in F32, from `config.json` and the safetensors files alone.

    folder_logits.py TOKENS FOLDER ...

TOKENS is a JSON list; every folder gets `logits.f32`: a row of the vocabulary for each token, little-endian.
"""

import json
import pathlib
import sys

import torch
import transformers


def main():
    tokens = torch.tensor([json.loads(sys.argv[1])])
    for folder in map(pathlib.Path, sys.argv[2:]):
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        # a tensor that is not found would be drawn at random
        if wrong := {what: names for what, names in loaded.items() if names}:
            sys.exit(f"{folder}: {wrong}")
        with torch.no_grad():
            logits = model.eval()(tokens).logits[0]
        logits.numpy().astype("<f4").tofile(folder / "logits.f32")


if __name__ == "__main__":
    main()
