"""What stock llama.cpp computes, beside what we compute; stock is loaded as `referee.py` beside this file does it.

    parity.py logits MODEL [--window N] [--threads N]
    parity.py dequantize FROM TO
    parity.py open MODEL

`logits` reads windows from stdin, all numbers little-endian: the number of tokens and the first scored position (u32), the
tokens (i32), then our logits of the scored positions (f32, vocabulary values a row). Prints one JSON line: positions, mean and
largest KL(stock || ours) in nats, the share of positions with the same most likely token, the largest difference of
log-probabilities among the tokens that stock gives more than 1 %, and both most likely tokens of every window's last position.

`dequantize` reads blocks from FROM, each run as type (u32), number of weights (u64), bytes (u64), then the bytes, and writes
the weights to TO as f32, decoded by ggml's own `to_float`.

`open` loads a model, by its first shard where it has several, runs a few tokens and prints one JSON line: the size of the
vocabulary, seconds, and the most likely next token.
"""

import argparse
import ctypes as c
import json
import pathlib
import struct
import sys
import time

import numpy as np

import referee


class Traits(c.Structure):
    """Beginning of `ggml_type_traits`."""

    _fields_ = [
        ("name", c.c_char_p),
        ("block", c.c_int64),
        ("interleave", c.c_int64),
        ("size", c.c_size_t),
        ("quantized", c.c_bool),
        ("to_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)),
    ]


def read(stream, size):
    data = stream.read(size)
    if len(data) != size:
        sys.exit(f"{size} bytes expected, {len(data)} there")
    return data


def stock_rows(model, tokens, first):
    """Logits of stock for the positions from `first` on."""
    llama, batch = model.llama, model.batch
    llama.llama_memory_clear(llama.llama_get_memory(model.context), True)
    batch.n = len(tokens)
    for j, token in enumerate(tokens):
        batch.token[j], batch.position[j], batch.sequences[j], batch.logits[j] = token, j, 1, j >= first
        batch.sequence[j][0] = 0
    if llama.llama_decode(model.context, batch) != 0:
        sys.exit("stock llama.cpp cannot run the model")
    for j in range(first, len(tokens)):
        yield np.ctypeslib.as_array(llama.llama_get_logits_ith(model.context, j), (model.size,)).astype(np.float64)


def log_softmax(row):
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


def logits(args):
    model = referee.Model(referee.library(), args.model, args.window, args.threads)
    kld, same, worst, last = [], [], 0.0, []
    while head := sys.stdin.buffer.read(8):
        count, first = struct.unpack("<II", head)
        tokens = np.frombuffer(read(sys.stdin.buffer, 4 * count), "<i4").tolist()
        for stock in stock_rows(model, tokens, first):
            ours = np.frombuffer(read(sys.stdin.buffer, 4 * model.size), "<f4").astype(np.float64)
            p, q = log_softmax(stock), log_softmax(ours)
            kld.append(float((np.exp(p) * (p - q)).sum()))
            same.append(bool(p.argmax() == q.argmax()))
            likely = p > np.log(0.01)
            worst = max(worst, float(np.abs(p - q)[likely].max(initial=0.0)))
        last.append([int(p.argmax()), int(q.argmax())])
    report = {"positions": len(kld), "kld": float(np.mean(kld)), "kld_max": max(kld), "top1": float(np.mean(same))}
    print(json.dumps(report | {"worst": worst, "last": last}))


def dequantize(args):
    bins = referee.fetch()
    ggml = c.CDLL(str(bins / "libggml-base.so"), mode=c.RTLD_GLOBAL)
    ggml.ggml_get_type_traits.restype, ggml.ggml_get_type_traits.argtypes = c.POINTER(Traits), [c.c_int32]
    with open(args.source, "rb") as source, open(args.target, "wb") as target:
        while head := source.read(20):
            kind, count, size = struct.unpack("<IQQ", head)
            traits, blocks = ggml.ggml_get_type_traits(kind)[0], read(source, size)
            if count % traits.block or count // traits.block * traits.size != size:
                sys.exit(f"{size} bytes are not {count} weights of {traits.name.decode()}")
            out = np.zeros(count, np.float32)
            traits.to_float(blocks, out.ctypes.data, count)
            target.write(out.tobytes())


def open_model(args):
    start = time.perf_counter()
    model = referee.Model(referee.library(), args.model, 32, args.threads)
    loaded = time.perf_counter() - start
    [row] = stock_rows(model, list(range(1, 17)), 15)
    if not np.isfinite(row).all():
        sys.exit("the logits are no numbers")
    print(json.dumps({"vocabulary": model.size, "load_seconds": round(loaded, 2), "next": int(row.argmax())}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("logits")
    command.add_argument("model")
    command.add_argument("--window", type=int, default=256)
    command.add_argument("--threads", type=int, default=2)
    command.set_defaults(run=logits)
    command = commands.add_parser("open")
    command.add_argument("model")
    command.add_argument("--threads", type=int, default=2)
    command.set_defaults(run=open_model)
    command = commands.add_parser("dequantize")
    command.add_argument("source", type=pathlib.Path)
    command.add_argument("target", type=pathlib.Path)
    command.set_defaults(run=dequantize)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
