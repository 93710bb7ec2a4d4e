"""What the benchmarks share: the prose, the floor that memory sets, llama.cpp as a contestant, refusing to report."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Step
from mimo_edge.engine import Engine
from mimo_edge.params import parameters, stored
from mimo_edge.spec import ModelSpec

PROSE = Path(__file__).parents[1] / "tests" / "data" / "prose.txt"
_KEPT: list[Any] = []  # callbacks of which a C library holds no more than the address
CHECKED, PROMPT = 48, 64  # greedy tokens compared, behind a prompt of
TIE = 0.5  # logits: what rounding activations to 8 bits may turn around


def refuse(why: str) -> NoReturn:
    """A benchmark of something that computes the wrong thing reports nothing."""
    sys.exit(f"refused: {why}")


def report(results: dict[str, Any]) -> None:
    """The machine, then everything as JSON on the last line."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"\nmachine: {machine}")
    print(json.dumps(results | {"machine": machine}))


def load_average() -> float:
    """Runnable threads over the last minute, printed: speeds are worth something only when it starts near 0."""
    value = os.getloadavg()[0]
    print(f"load average before the start: {value:.1f}{' (NOISY: other work is running)' if value > 0.5 else ''}")
    return value


def prose() -> str:
    return PROSE.read_text(encoding="utf-8")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / median(values)


def read_bandwidth(threads: int, size: int = 512 << 20, tries: int = 7) -> float:
    """Bytes a second of `threads` threads that read `size` bytes once; the best of several tries."""
    parts = np.array_split(np.ones(size // 8, np.int64), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            began = time.perf_counter()
            list(pool.map(np.max, parts))  # vectorised and, unlike a sum, never bound by arithmetic
            times.append(time.perf_counter() - began)
    return size / min(times)


def our_bytes(spec: ModelSpec) -> tuple[int, int]:
    """(all weights, those read for one decoded token: an embedding beside a head of its own gives one row)."""
    sizes = {p.name: sum(s.nbytes for s in stored(p, spec.quant.of(p.kind))) for p in parameters(spec)}
    unread = sizes["embed"] - sizes["embed"] // spec.vocab_size if spec.separate_head else 0
    return sum(sizes.values()), sum(sizes.values()) - unread


def gguf_bytes(path: Path) -> int:
    """Bytes of all tensors of a GGUF file."""
    from gguf import GGUFReader

    return sum(int(t.n_bytes) for t in GGUFReader(path).tensors)


@functools.cache
def import_llama_cpp() -> Any:
    """The library, silent."""
    try:
        import llama_cpp
    except ModuleNotFoundError:
        sys.exit("llama.cpp is the yardstick here: run `pip install llama-cpp-python`")
    callback = llama_cpp.llama_log_callback(lambda *_: None)
    _KEPT.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


class Model(Protocol):
    def run(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Evaluates `tokens` behind `start` earlier ones (0 forgets those before); logits [1, vocab] of the last."""
        ...


class EngineModel:
    """A backend through the engine's own interface: run, commit, in the engine's chunks."""

    def __init__(self, engine: Engine, context: int):
        self.engine = engine
        self._slots = engine.pools.admit(context)

    def run(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        backend, chunk = self.engine.backend, self.engine.chunk
        for at in range(0, len(tokens), chunk):
            rows = np.array(tokens[at : at + chunk], np.int64)
            last = [len(rows) - 1] if at + chunk >= len(tokens) else []
            [out] = backend.run([Step(self._slots, start + at, rows, np.array(last, np.int64))])
            backend.commit([len(rows)])
        return out.logits


def check(bundle: Path, models: dict[str, Model], tokens: list[int]) -> dict[str, int]:
    """How many of the reference backend's greedy tokens each model would have chosen; refuses when "ours" is wrong."""
    equal, length = dict.fromkeys(models, 0), PROMPT + CHECKED
    with Engine.open(bundle, "reference", max_context=length) as engine:
        reference = EngineModel(engine, length)
        step, start = tokens[:PROMPT], 0
        for i in range(CHECKED):
            right = reference.run(step, start)[0]
            best = int(right.argmax())
            for name, model in models.items():
                choice = int(model.run(step, start)[0].argmax())
                equal[name] += choice == best
                by = float(right[best] - right[choice])
                if name == "ours" and not by <= TIE:
                    refuse(f"greedy token {i}: onnxruntime says {choice}, reference {best}, better by {by:.2f}")
            start += len(step)
            step = [best]
    return equal


class LlamaCpp:
    """llama.cpp through its C interface, the fastest way in: one sequence, its own choice of flash attention."""

    BATCH = 512

    def __init__(self, path: Path, threads: int, context: int):
        self._lib = lib = import_llama_cpp()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, self.BATCH, self.BATCH
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = False  # rings, as in its own programs
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self._batch = lib.llama_batch_init(self.BATCH, 0, 1)

    def encode(self, text: str) -> list[int]:
        """Token ids with the begin token."""
        raw = text.encode()
        tokens = (ctypes.c_int32 * (len(raw) + 2))()
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), tokens, len(tokens), True, False)
        return list(tokens[:count])

    def run(self, tokens: Sequence[int], start: int, all_rows: bool = False) -> NDArray[np.float32]:
        """Evaluates at most BATCH `tokens` behind `start` earlier ones; logits of the last row [1, vocab], or of all.

        The array is llama.cpp's own memory, valid until the next run. `start` 0 forgets what was before.
        """
        lib, batch = self._lib, self._batch
        if start == 0:
            lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = all_rows or i == len(tokens) - 1
        if lib.llama_decode(self._context, batch):
            sys.exit(f"llama.cpp failed on {len(tokens)} tokens at {start}")
        rows = len(tokens) if all_rows else 1
        return np.ctypeslib.as_array(lib.llama_get_logits(self._context), shape=(rows, self._vocab_size))

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
