"""Speed of stock llama.cpp on one GGUF file, measured as `crates/inference/examples/bench_decode.rs` measures ours.

    bench_stock.py FILE.gguf --json OUT [--threads N]

OUT gets the seconds of loading (model, vocabulary and context), tokens a second of a prompt of 512, of 64 tokens after it, and of
32 tokens after 64 by one sequence and by eight together.
"""

import argparse
import json
import pathlib
import time

import referee


class Runner:
    def __init__(self, llama, path, threads):
        self.llama = llama
        start = time.perf_counter()
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"stock llama.cpp refuses {path}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * 128, 512, 512, 8
        params.kv_unified = True
        params.threads = params.threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, params)
        self.load_s = time.perf_counter() - start
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(512, 0, 8)

    def clear(self):
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def run(self, items):
        """Items: token, position, sequence, whether logits are wanted; returns the logits of the last one wanted."""
        batch = self.batch
        batch.n = len(items)
        for j, (token, position, sequence, logits) in enumerate(items):
            batch.token[j], batch.position[j], batch.sequences[j], batch.logits[j] = token, position, 1, logits
            batch.sequence[j][0] = sequence
        if self.llama.llama_decode(self.context, batch) != 0:
            raise SystemExit("stock llama.cpp cannot run the model")
        return self.llama.llama_get_logits_ith(self.context, -1)

    def token(self, sequence, i):
        return (sequence * 101 + i * 37 + 17) % self.vocab

    def prefill_and_decode(self, prompt, new):
        self.clear()
        start = time.perf_counter()
        self.run([(self.token(0, i), i, 0, i == prompt - 1) for i in range(prompt)])
        middle = time.perf_counter()
        for i in range(prompt, prompt + new):
            self.run([(self.token(0, i), i, 0, True)])
        return prompt / (middle - start), new / (time.perf_counter() - middle)

    def together(self, sequences, prompt, new):
        self.clear()
        self.run([(self.token(s, i), i, s, i == prompt - 1) for s in range(sequences) for i in range(prompt)])
        start = time.perf_counter()
        for i in range(prompt, prompt + new):
            self.run([(self.token(s, i), i, s, True) for s in range(sequences)])
        return sequences * new / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--json", required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    llama = referee.library()
    runner = Runner(llama, args.file, args.threads)
    runner.prefill_and_decode(64, 2)  # pages are in memory, buffers are made
    prefill, decode = runner.prefill_and_decode(512, 64)
    report = {
        "load_s": runner.load_s,
        "prefill_tok_s": prefill,
        "decode_tok_s": decode,
        "one_tok_s": runner.together(1, 64, 32),
        "eight_tok_s": runner.together(8, 64, 32),
    }
    pathlib.Path(args.json).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
