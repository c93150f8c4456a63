"""LoRA training with PEFT and PyTorch, to compare with ours: `peft_train.py MODEL.gguf RUN.json`.

RUN.json holds the folder of the start adapter, the batches of token ids (all texts of one length), and the optimiser's numbers.
Prints as JSON: losses of all steps, seconds of all steps, peak memory, versions.
"""

import json
import math
import resource
import sys
import time

import peft
import torch
import transformers

import llama_torch


def main():
    path, run = sys.argv[1:]
    with open(run, encoding="utf8") as file:
        run = json.load(file)
    torch.set_num_threads(run["threads"])
    model = peft.PeftModel.from_pretrained(llama_torch.load(path), run["adapter"], is_trainable=True)
    model.train()
    values = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        values, lr=run["learning_rate"], betas=(run["beta1"], run["beta2"]), eps=run["epsilon"], weight_decay=0.0
    )
    steps = len(run["batches"])
    losses, seconds = [], []
    for step, batch in enumerate(run["batches"]):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = run["learning_rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        ids = torch.tensor(batch)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(values, run["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    report = {
        "losses": losses,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in values),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {m.__name__: m.__version__ for m in (torch, peft, transformers)},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
