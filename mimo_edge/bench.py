"""Measures a backend: floor first, then decode, prefill and time to first token. Refuses when outputs are wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mimo_edge import roofline
from mimo_edge.backends.base import Backend, DraftHeads, DraftRounds, Round, Step
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.layout import HIDDEN_ROWS, KvLayout
from mimo_edge.kv.pools import KvPools
from mimo_edge.request import GREEDY
from mimo_edge.roofline import Device, Point
from mimo_edge.spec import MAX_DRAFTS, ModelSpec

DRAFT_ROWS = MAX_DRAFTS + 1
PREFILL = (512, 2048, 8192)
TOLERANCE, TOLERANCE_8_BITS = 2e-2, 0.15  # of float16 activations; of 8-bit ones, which round anew in every row
CHUNK = 256
_TAIL = 12  # rows whose logits are compared
_COPIES, _COPY_BYTES = 10, 256 << 20


class Bench:
    """One backend with its pools allocated for `layout`, and a sequence that owns the whole context."""

    def __init__(self, spec: ModelSpec, backend: Backend, layout: KvLayout, seed: int = 0):
        self.spec, self.backend = spec, backend
        self._slots = KvPools(layout).admit(layout.context)
        self._context = layout.context
        self._chunk = getattr(backend, "chunk", CHUNK)
        self._tokens = np.random.default_rng(seed).integers(0, spec.vocab_size, layout.context)
        self._layout = layout

    def check(self, other: Backend | None) -> float:
        """Relative error of the last rows' logits: the longest step against shorter ones, down to single rows, and
        against `other` where there is one.

        Raises MimoEdgeError when they differ by more than 2 %, are not finite, or do not depend on the tokens.
        """
        count = min(self._chunk, self._context)
        tail = [_TAIL - 5, 4, 1]
        whole = self._last_rows(self.backend, [count])
        errors = []
        for first in (count - _TAIL, (count - _TAIL) // 4, 16):
            head = [min(first, count - _TAIL - at) for at in range(0, count - _TAIL, first)]
            errors.append(_error(self._last_rows(self.backend, [*head, *tail]), whole))
        if other is not None:
            errors.append(_error(whole, self._last_rows(other, [count])))
        worst = float(np.max(errors))  # NaN if one is
        allowed = TOLERANCE_8_BITS if self.backend.name == "onnxruntime" else TOLERANCE
        if not worst <= allowed or np.ptp(whole[1:] - whole[:-1]) == 0:
            raise MimoEdgeError(
                f"refused: backend {self.backend.name} computes wrong logits (relative error {worst:.3g}, allowed "
                f"{allowed}): export the bundle again, or report this"
            )
        return worst

    def decode(self, rows: int, context: int, steps: int, repeats: int) -> list[float]:
        """Seconds of a step of `rows` rows behind `context` rows: the median of `steps` steps, for each repeat."""
        self._fill(context)
        at, tokens = context, self._tokens
        return [
            statistics.median(self._timed(tokens[at + i : at + i + rows], at + i) for i in range(steps))
            for _ in range(repeats)
        ]

    def prefill(self, count: int, repeats: int) -> list[float]:
        """Seconds until the first token of a prompt of `count` tokens is known."""
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            self._fill(count)
            times.append(time.perf_counter() - began)
        return times

    def drafts(self, count: int, context: int, steps: int, repeats: int) -> list[float]:
        """Seconds in which `count` MTP heads draft behind `context` rows, as `decode`; of their usual rows."""
        backend = cast(DraftHeads, self.backend)
        self._fill(context)
        first = max(0, context - DRAFT_ROWS)
        held = max(0, context - self._layout.rings.get(HIDDEN_ROWS, context))
        for head in range(count):  # what came before, as in a reply
            backend.draft(self._slots, head, held, held, self._tokens[held + 1 : context + 1])

        def draft() -> float:
            began = time.perf_counter()
            for head in range(count):
                backend.draft(self._slots, head, held, first, self._tokens[first + 1 : context + 1]).argmax()
            return time.perf_counter() - began

        return [statistics.median(draft() for _ in range(steps)) for _ in range(repeats)]

    def rounds(self, count: int, context: int, steps: int, repeats: int) -> list[float]:
        """Behind `drafts`: seconds in which the backend drafts and verifies in one call."""
        backend = cast(DraftRounds, self.backend)
        known = self._tokens[max(0, context - MAX_DRAFTS) : context + 1]
        held = max(0, context - self._layout.rings.get(HIDDEN_ROWS, context))
        asked = Round(self._slots, context, known, count, held, GREEDY)

        def run() -> float:
            began = time.perf_counter()
            backend.round(asked)
            return time.perf_counter() - began

        return [statistics.median(run() for _ in range(steps)) for _ in range(repeats)]

    def _timed(self, tokens: NDArray[np.int64], start: int) -> float:
        """A step whose best tokens are wanted; it stays uncommitted but for its first row."""
        step = Step(self._slots, start, tokens, np.arange(len(tokens)))
        best: Callable[[Step], Any] | None = getattr(self.backend, "best", None)
        began = time.perf_counter()
        if best is None:
            self.backend.run([step])[0].logits.argmax(1)
        else:
            best(step)
        self.backend.commit([1])
        return time.perf_counter() - began

    def _fill(self, count: int) -> None:
        """Commits the first `count` tokens in chunks, logits behind the last."""
        for at in range(0, count, self._chunk):
            part = self._tokens[at : min(at + self._chunk, count)]
            last = [len(part) - 1] if at + len(part) == count else []
            self.backend.run([Step(self._slots, at, part, np.array(last, np.int64))])
            self.backend.commit([len(part)])

    def _last_rows(self, backend: Backend, sizes: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the last rows of sum(sizes), evaluated in steps of the given sizes."""
        out, at, first = [], 0, sum(sizes) - _TAIL
        for size in sizes:
            rows = np.arange(max(0, first - at), size)
            out.append(backend.run([Step(self._slots, at, self._tokens[at : at + size], rows)])[0].logits.copy())
            backend.commit([size])
            at += size
        return np.concatenate(out)

    def measure(self, context: int, steps: int, repeats: int) -> tuple[dict[str, Any], list[Point]]:
        """Everything, as JSON, and the points of the roofline plot; lengths that do not fit are left out."""
        results: dict[str, Any] = {"context": context}
        points = []
        for rows in (1, DRAFT_ROWS):
            seconds = self.decode(rows, context, steps, repeats)
            points.append(self._point(f"decode, {rows} row{'s' * (rows > 1)}", rows, context, seconds))
            results[f"decode_{rows}"] = {"step_ms": _summary([1e3 * s for s in seconds])}
            results[f"decode_{rows}"]["steps_per_s"] = 1 / statistics.median(seconds)
        results["rows_4_over_1"] = results["decode_1"]["steps_per_s"] / results[f"decode_{DRAFT_ROWS}"]["steps_per_s"]
        if drafts := self._layout.heads:
            drafting = self.drafts(drafts, context, steps, repeats)
            results["draft"] = {"heads": drafts, "ms": _summary([1e3 * s for s in drafting])}
            verifying = 1 / results[f"decode_{DRAFT_ROWS}"]["steps_per_s"] + statistics.median(drafting)
            if isinstance(self.backend, DraftRounds):
                seconds = self.rounds(drafts, context, steps, repeats)
                results["draft"]["round_ms"] = _summary([1e3 * s for s in seconds])
                verifying = statistics.median(seconds)
            results["draft"]["tokens_to_pay"] = verifying * results["decode_1"]["steps_per_s"]
        for count in PREFILL:
            if count + DRAFT_ROWS <= self._context:
                seconds = self.prefill(count, repeats)
                points.append(self._point(f"prefill {count}", count, 0, seconds, 1))
                speeds = _summary([count / s for s in seconds])
                results[f"prefill_{count}"] = {"tok_s": speeds, "ttft_s": statistics.median(seconds)}
        return results, points

    def _point(self, name: str, rows: int, context: int, seconds: list[float], logit_rows: int | None = None) -> Point:
        work = roofline.step(self.spec, rows, context, self._layout.element_bytes, logit_rows)
        return Point(name, work, statistics.median(seconds))


def device_of(backend: Backend) -> Device:
    """The machine's roof: memory bandwidth measured by copying (bytes read and written); arithmetic from a table."""
    driver = getattr(backend, "driver", None)
    if driver is None:
        return Device("this CPU", _cpu_bandwidth(), _cpu_flops())
    return Device(driver.name, _gpu_bandwidth(driver), _FLOPS.get(driver.name, 4e12 * driver.multiprocessors))


_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "Orin": 42.5e12}


def _gpu_bandwidth(driver: Any) -> float:
    driver.enter()
    size = min(_COPY_BYTES, driver.memory()[0] // 4)
    a = driver.malloc(size)
    try:
        b = driver.malloc(size)
        try:
            times: list[float] = []
            for _ in range(3):
                with driver.timed(times):
                    for _ in range(_COPIES):
                        driver.copy(b, a, size)
            return 2 * size * _COPIES / (min(times) / 1e3)
        finally:
            driver.free(b)
    finally:
        driver.free(a)


def _cpu_bandwidth() -> float:
    a = np.ones(_COPY_BYTES // 8)
    b = np.zeros_like(a)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(b, a)
        times.append(time.perf_counter() - began)
    return 2 * a.nbytes / min(times)


def _cpu_flops() -> float:
    """Of a float32 product, as the CPU backends' kernels work in float32."""
    a = np.ones((1024, 1024), np.float32)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / min(times)


def _summary(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _error(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
