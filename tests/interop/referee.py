"""Stock llama.cpp as the judge of GGUF files: the ready libllama of a pinned npm package, loaded with ctypes.

    referee.py fetch                                               get the library (needs npm), print its folder
    referee.py quantize IN.gguf OUT.gguf FTYPE [--imatrix FILE]    as llama-quantize does; FTYPE is a llama_ftype number
    referee.py score BASE.gguf FILE.gguf ... --text FILE --json OUT [--windows N] [--window TOKENS]

`score` cuts the text into windows and scores the second half of each, as llama-perplexity does. OUT gets, for every FILE and
position: KL(BASE || FILE) in nats, the negative log-likelihood of the token that follows under both, and whether both have the
same most likely token. `REFEREE` names the cache folder.
"""

import argparse
import ctypes as c
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tarfile
import time

import numpy as np

PACKAGE = "@node-llama-cpp/linux-x64@3.21.1"
SHA256 = "4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f"
CACHE = pathlib.Path(os.environ.get("REFEREE", pathlib.Path.home() / ".cache/flywheel/referee"))

floats = c.POINTER(c.c_float)


def fields(ctype, names):
    return [(name, ctype) for name in names.split()]


class ModelParams(c.Structure):
    _fields_ = (
        fields(c.c_void_p, "devices buffer_types")
        + fields(c.c_int32, "gpu_layers split_mode load_mode lazy main_gpu")
        + fields(c.c_void_p, "split progress progress_data overrides")
        + fields(c.c_bool, "vocab_only check_tensors extra_buffers no_host no_alloc load_mtp")
    )


class ContextParams(c.Structure):
    _fields_ = (
        fields(c.c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_other")
        + fields(c.c_int32, "threads threads_batch type rope_scaling pooling attention flash_attention")
        + fields(c.c_float, "rope_base rope_scale yarn_factor yarn_attention yarn_fast yarn_slow")
        + fields(c.c_uint32, "yarn_context")
        + fields(c.c_float, "defrag")
        + fields(c.c_void_p, "eval_callback eval_data")
        + fields(c.c_int32, "type_k type_v")
        + fields(c.c_void_p, "abort abort_data")
        + fields(c.c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified")
        + [("samplers", c.c_void_p), ("n_samplers", c.c_size_t), ("other", c.c_void_p)]
    )


class QuantizeParams(c.Structure):
    _fields_ = (
        fields(c.c_int32, "threads ftype output_type embedding_type")
        + fields(c.c_bool, "allow_requantize quantize_output only_copy pure keep_split dry_run")
        + fields(c.c_void_p, "imatrix overrides types prune")
        + [("buffer", c.c_size_t)]
    )


class Batch(c.Structure):
    _fields_ = [
        ("n", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embedding", c.c_void_p),
        ("position", c.POINTER(c.c_int32)),
        ("sequences", c.POINTER(c.c_int32)),
        ("sequence", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


class Importance(c.Structure):
    _fields_ = [("name", c.c_char_p), ("data", floats), ("size", c.c_size_t)]


class Override(c.Structure):
    """`llama_model_kv_override`: a value for the file's metadata (tag 0: int, 3: text)."""

    _fields_ = [("tag", c.c_int32), ("key", c.c_char * 128), ("pad", c.c_int32), ("value", c.c_char * 128)]


SILENT = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda level, text, user: None)

FUNCTIONS = {
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_quantize_default_params": (QuantizeParams,),
    "llama_model_load_from_file": (c.c_void_p, c.c_char_p, ModelParams),
    "llama_model_free": (None, c.c_void_p),
    "llama_init_from_model": (c.c_void_p, c.c_void_p, ContextParams),
    "llama_free": (None, c.c_void_p),
    "llama_model_get_vocab": (c.c_void_p, c.c_void_p),
    "llama_vocab_n_tokens": (c.c_int32, c.c_void_p),
    "llama_tokenize": (
        c.c_int32, c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool,
    ),
    "llama_batch_init": (Batch, c.c_int32, c.c_int32, c.c_int32),
    "llama_batch_free": (None, Batch),
    "llama_decode": (c.c_int32, c.c_void_p, Batch),
    "llama_get_logits_ith": (floats, c.c_void_p, c.c_int32),
    "llama_get_memory": (c.c_void_p, c.c_void_p),
    "llama_memory_clear": (None, c.c_void_p, c.c_bool),
    "llama_model_quantize": (c.c_uint32, c.c_char_p, c.c_char_p, c.POINTER(QuantizeParams)),
}  # fmt: skip


def fetch():
    """The folder of the libraries; downloads and checks the package where it is not there yet."""
    folder = CACHE / SHA256[:16]
    found = folder / "package/bins/linux-x64"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pack = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
        archive = folder / pack.stdout.split()[-1]
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            archive.unlink()
            sys.exit(f"{PACKAGE} has SHA-256 {digest}, expected {SHA256}")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return found


def library():
    bins = fetch()
    base = c.CDLL(str(bins / "libggml-base.so"), mode=c.RTLD_GLOBAL)
    base.ggml_log_set(SILENT, None)
    ggml = c.CDLL(str(next(bins.glob("libggml.v*.so"))), mode=c.RTLD_GLOBAL)
    llama = c.CDLL(str(next(bins.glob("libllama.v*.so"))), mode=c.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(f"{bins}/".encode())
    llama.llama_log_set(SILENT, None)
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


class Model:
    """A loaded file with room for one window."""

    def __init__(self, llama, path, window, threads):
        self.llama = llama
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit(f"stock llama.cpp refuses {path}")
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = window
        params.threads = params.threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, params)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.size = llama.llama_vocab_n_tokens(self.vocab)
        self.batch = llama.llama_batch_init(window, 0, 1)

    def close(self):
        self.llama.llama_batch_free(self.batch)
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)

    def tokens(self, text):
        raw = text.encode()
        buffer = (c.c_int32 * (len(raw) + 8))()
        return buffer[: self.llama.llama_tokenize(self.vocab, raw, len(raw), buffer, len(buffer), False, False)]

    def log_probabilities(self, tokens):
        """Of the token after each position of the second half but the last one."""
        half, batch = len(tokens) // 2 - 1, self.batch
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        batch.n = len(tokens)
        for j, token in enumerate(tokens):
            batch.token[j], batch.position[j], batch.sequences[j], batch.logits[j] = token, j, 1, j >= half
            batch.sequence[j][0] = 0
        if self.llama.llama_decode(self.context, batch) != 0:
            sys.exit("stock llama.cpp cannot run the model")
        rows = [self.llama.llama_get_logits_ith(self.context, j) for j in range(half, len(tokens) - 1)]
        logits = np.stack([np.ctypeslib.as_array(row, (self.size,)) for row in rows])
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def score(args):
    llama, text = library(), pathlib.Path(args.text).read_text(encoding="utf8")
    base = Model(llama, args.base, args.window, args.threads)
    tokens = base.tokens(text)
    count = min(args.windows, len(tokens) // args.window)
    windows = [tokens[i * args.window : (i + 1) * args.window] for i in range(count)]
    expected = [base.log_probabilities(window) for window in windows]
    base.close()
    report = []
    for path in args.files:
        row = {"file": path, "bytes": os.path.getsize(path), "window": args.window}
        columns = {"kld": [], "base_nll": [], "nll": [], "same_top": []}
        model = Model(llama, path, args.window, args.threads)
        for window, p in zip(windows, expected):
            q, following = model.log_probabilities(window), np.array(window[args.window // 2 :])
            at = np.arange(len(following))
            columns["kld"] += np.einsum("ij,ij->i", np.exp(p), p - q, dtype=np.float64).tolist()
            columns["base_nll"] += (-p[at, following]).tolist()
            columns["nll"] += (-q[at, following]).tolist()
            columns["same_top"] += (p.argmax(-1) == q.argmax(-1)).tolist()
        model.close()
        report.append(row | columns)
    pathlib.Path(args.json).write_text(json.dumps(report))


def importance(path):
    """Mean squares by tensor and the metadata of an importance matrix in llama.cpp's GGUF layout."""
    data, at = pathlib.Path(path).read_bytes(), 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text():
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = take("IQ")
            return [value(inner) for _ in range(n)]
        return take((dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"})[kind])

    _, _, tensors, keys = take("4sIQQ")
    metadata = {}
    for _ in range(keys):
        key = text()
        metadata[key] = value(take("I"))
    places = {}
    for _ in range(tensors):
        name = text()
        dims = [take("Q") for _ in range(take("I"))]
        places[name] = (int(np.prod(dims)), take("IQ")[1])
    align = metadata.get("general.alignment", 32)
    start = (at + align - 1) // align * align
    array = {name: np.frombuffer(data, "<f4", n, start + offset) for name, (n, offset) in places.items()}
    sums = [name.removesuffix(".in_sum2") for name in array if name.endswith(".in_sum2")]
    return {name: array[name + ".in_sum2"] / array[name + ".counts"][0] for name in sums}, metadata


def quantize(args):
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.threads = args.ftype, args.threads
    params.allow_requantize = True  # the cached model has no float form
    keep = []  # what the parameters point to
    if args.imatrix:
        columns, metadata = importance(args.imatrix)
        entries = (Importance * (len(columns) + 1))()
        for i, (name, values) in enumerate(columns.items()):
            keep.append(np.ascontiguousarray(values, np.float32))
            entries[i] = Importance(name.encode(), keep[-1].ctypes.data_as(floats), len(values))
        # the keys that llama-quantize writes
        written = {
            "file": pathlib.Path(args.imatrix).name,
            "dataset": ", ".join(metadata.get("imatrix.datasets", [])),
            "entries_count": len(columns),
            "chunks_count": metadata.get("imatrix.chunk_count", 0),
        }
        overrides = (Override * (len(written) + 1))()
        for i, (key, value) in enumerate(written.items()):
            raw = value.encode()[:127] if isinstance(value, str) else struct.pack("<q", value)
            overrides[i] = Override(3 if isinstance(value, str) else 0, f"quantize.imatrix.{key}".encode(), 0, raw)
        params.imatrix, params.overrides = c.cast(entries, c.c_void_p), c.cast(overrides, c.c_void_p)
        keep += [entries, overrides]
    start = time.perf_counter()
    if llama.llama_model_quantize(args.input.encode(), args.output.encode(), c.byref(params)) != 0:
        sys.exit(f"stock llama.cpp cannot quantise {args.input}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"seconds": time.perf_counter() - start}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("fetch")
    command.set_defaults(run=lambda args: print(fetch()))
    command = commands.add_parser("quantize")
    command.add_argument("input")
    command.add_argument("output")
    command.add_argument("ftype", type=int)
    command.add_argument("--imatrix")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--json", help="gets the seconds of the quantisation alone")
    command.set_defaults(run=quantize)
    command = commands.add_parser("score")
    command.add_argument("base")
    command.add_argument("files", nargs="+")
    command.add_argument("--text", required=True)
    command.add_argument("--json", required=True)
    command.add_argument("--windows", type=int, default=16)
    command.add_argument("--window", type=int, default=256)
    command.add_argument("--threads", type=int, default=1, help="more wait for each other on a busy machine")
    command.set_defaults(run=score)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
