"""An adapter folder in PEFT: `peft_adapter.py BASE.gguf FOLDER MERGED.gguf TOKENS.json SAVED`.

Prints as JSON how far the logits of the base with the adapter are from those of the merged file (`merged`), and from those of
the base alone (`base`): largest absolute differences. SAVED gets the adapter as PEFT saves it.
"""

import json
import sys

import peft
import torch

import llama_torch


def main():
    base, folder, merged, tokens, saved = sys.argv[1:]
    with open(tokens, encoding="utf8") as file:
        tokens = torch.tensor([json.load(file)])
    with torch.no_grad():
        plain = llama_torch.load(base).eval()
        alone = plain(tokens).logits
        model = peft.PeftModel.from_pretrained(plain, folder).eval()
        adapted = model(tokens).logits
        model.save_pretrained(saved)
        folded = llama_torch.load(merged).eval()(tokens).logits
    worst = {"merged": (adapted - folded).abs().max().item(), "base": (adapted - alone).abs().max().item()}
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
