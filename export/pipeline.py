"""Checkpoint -> bundle: rows are read, quantised and written block by block, at places known beforehand."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from mimo_edge.bundle import CHAT_TEMPLATE, MANIFEST, TOKENIZER, WEIGHTS, Bundle, BundleWriter
from mimo_edge.errors import BadInputError
from mimo_edge.export import programs
from mimo_edge.export.families import open_checkpoint
from mimo_edge.export.gates import GateReport, GateRequest, gate_checkpoint
from mimo_edge.export.golden import write_golden
from mimo_edge.export.graph.cpu import emit_graphs
from mimo_edge.export.quantize import METHODS
from mimo_edge.export.quantize.calibrate import Calibrator
from mimo_edge.export.quantize.calibration import Calibration, Conditions
from mimo_edge.export.quantize.choose import DEFAULT_BUDGET, KINDS, LARGE_MODEL, QuantReport, choose
from mimo_edge.export.quantize.perplexity import Method, ReadySource, Source
from mimo_edge.export.quantize.rtn import check_group
from mimo_edge.export.tokenizer_file import compact
from mimo_edge.params import Param, count, parameters, stored, stored_tensors
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant
from mimo_edge.tensors import Location, lay_out

log = logging.getLogger(__name__)

QUANTIZATION, CALIBRATION, GATES = "quantization.json", "calibration.json", "gates.json"
CALIBRATED = "gptq"  # the method that needs calibration text
_GRAPHS = {"model.cpu.onnx": 4, "model.cpu-float.onnx": 1}  # accuracy level: 8-bit activations, float activations
_BLOCK_BYTES = 64 << 20  # float32 rows in memory at once
_OTHER_BYTES = 64 << 20  # room for graph, tokenizer and manifest, on top of the weights

Progress = Callable[[int, int, str], None]  # done, total, what: bytes of "weights", layers of "measuring ..."


def uniform(bits: int = 4, group: int = 32) -> QuantSpec:
    """All kinds of tensors alike."""
    q = TensorQuant(bits, group)
    return QuantSpec(q, q, q, q)


def export_bundle(
    src: str | Path,
    out: str | Path,
    *,
    target: str | Sequence[str] = "cpu",
    quant: QuantSpec | None = None,
    budget: float = DEFAULT_BUDGET,
    max_context: int | None = None,
    allow_coarse_groups: bool = False,
    method: str | None = None,
    calib: str | Path | None = None,
    calib_tokens: int | None = None,
    conditions: Conditions | None = None,
    gates: GateRequest | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Exports the checkpoint `src` (Hugging Face folder or .gguf file) into the new folder `out`. A bundle as `src` is
    copied as it is, with kernels for the GPUs named.

    Every bundle runs on a CPU; `target` names the GPUs that it gets kernels for as well ("orin", "sm_90", several).
    `quant` None chooses by measurement: the fewest bytes read per token that lose at most `budget` (0.06 = 6 % more
    perplexity) on the worse of two texts; the table measured goes into quantization.json. Weights that the checkpoint
    already stores in 4 bits are kept as they are, unless `quant` asks for another format. On any error, and on Ctrl-C,
    nothing is left behind. `method` is "rtn" (round to nearest) or "gptq" (error feedback, needs `calib`), by default
    "gptq" where there is `calib`: a file of JSON lines (export/quantize/calibration_data.py), of which `calib_tokens`
    tokens are used. `conditions` are those of the calibration. `gates` lets the feed-forwards skip work; trained on
    `calib`, measured in gates.json.

    Raises BadInputError (damaged checkpoint, `out` exists, group that does not fit, context too long),
    UnsupportedError (family or target), MimoEdgeError (disk full).
    """
    targets = [target] if isinstance(target, str) else list(target)
    capabilities = sorted({programs.capability(t) for t in targets if t != "cpu"})
    report = progress or (lambda done, total, what: None)
    if (Path(src) / MANIFEST).is_file():
        given = [quant, max_context, calib, calib_tokens, conditions, gates]
        if any(x is not None for x in given) or budget != DEFAULT_BUDGET or allow_coarse_groups:
            raise BadInputError(
                f"{src} is a bundle, which is copied as it is: leave options on bits, context, calibration and "
                "gates out, or export from the checkpoint"
            )
        if not capabilities:
            raise BadInputError(f"{src} is a bundle already: name a GPU to add kernels for, as in --target orin")
        return programs.retarget(Bundle.open(src), out, capabilities, report)
    with BundleWriter(out) as writer, TemporaryDirectory(dir=Path(out).absolute().parent) as scratch:
        checkpoint = open_checkpoint(Path(src))
        spec = _with_context(checkpoint.spec, max_context)
        if gates is not None:
            checkpoint, found = gate_checkpoint(replace(checkpoint, spec=spec), gates, calib, calib_tokens, report)
            spec = checkpoint.spec
            _write_json(writer.path(GATES), found)
        quantize, source = _method(method, calib), checkpoint.source
        calibrator = None
        if calib is not None:
            calibrator = Calibrator.open(
                replace(checkpoint, spec=spec),
                Path(calib),
                calib_tokens,
                conditions or Conditions(),
                Path(scratch),
                report,
            )
        if quant is None:
            chosen = choose(
                spec, source, checkpoint.tokenizer_json, budget=budget, method=quantize, progress=report,
                packed=checkpoint.packed, calibrator=calibrator,
            )  # fmt: skip
            quant = chosen.quant
            _write_json(writer.path(QUANTIZATION), chosen)
        _warn_requantised(checkpoint.packed, quant)
        spec = replace(spec, quant=quant)
        check_quant(spec, allow_coarse_groups, checkpoint.packed)
        if calibrator:
            done = calibrator.last(quant)
            spec = replace(spec, output_bias=done.spec.output_bias)
            source, quantize = done.source(quant), done.method(quant)
            _write_json(writer.path(CALIBRATION), done)
        if capabilities:
            programs.check_supported(spec)
        header, places = lay_out(stored_tensors(spec))
        device_bytes = programs.device_bytes(spec) if capabilities else 0
        writer.reserve(sum(p.nbytes for p in places.values()) + device_bytes + _OTHER_BYTES)
        write_weights(writer.path(WEIGHTS), header, places, spec, source, quantize, report)
        write_graphs(writer, spec, places)
        writer.path(TOKENIZER).write_text(compact(checkpoint.tokenizer_json), encoding="utf-8")
        if checkpoint.chat_template is not None:
            writer.path(CHAT_TEMPLATE).write_text(checkpoint.chat_template, encoding="utf-8")
        write_golden(writer.path("."), spec, checkpoint.chat_template)
        if capabilities:
            programs.add_kernels(writer, spec, capabilities, report)
        return writer.finish(spec, ",".join(["cpu", *(f"sm_{c}" for c in capabilities)]), checkpoint.name)


def check_quant(spec: ModelSpec, allow_coarse_groups: bool, packed: QuantSpec) -> None:
    """Raises BadInputError if a group does not divide a tensor, or is known to hurt a model of this size (`packed`:
    formats of the checkpoint's own weights, which are not questioned)."""
    for p in parameters(spec):
        if quant := spec.quant.of(p.kind):
            check_group(p.name, p.shape[1], quant.group)
    size = count(spec)
    for kind in KINDS:
        quant = spec.quant.of(kind)
        if quant == packed.of(kind):
            continue
        if quant and quant.bits == 4 and quant.group > 32 and size < LARGE_MODEL and not allow_coarse_groups:
            raise BadInputError(
                f"4-bit groups of {quant.group} ({kind}) in a model of {size / 1e6:.0f}M weights cost much quality: "
                "use --group-size 32, or --allow-coarse-groups if that is meant"
            )


def write_weights(
    path: Path,
    header: bytes,
    places: dict[str, Location],
    spec: ModelSpec,
    source: Source,
    method: Method,
    progress: Progress,
) -> None:
    """Writes weights.safetensors. Raises OSError (disk full) and what the source and the method raise."""
    total, done = sum(p.nbytes for p in places.values()), 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.truncate(fd, len(header) + total)
        _pwrite(fd, header, 0)
        for param in parameters(spec):
            for start, stop in _row_blocks(param):
                for place, part in _stored_rows(param, spec, source, method, start, stop):
                    at = places[place]
                    _pwrite(fd, np.ascontiguousarray(part).data, at.offset + start * (at.nbytes // at.shape[0]))
                    done += part.nbytes
                progress(done, total, "weights")
    finally:
        os.close(fd)


def write_graphs(writer: BundleWriter, spec: ModelSpec, places: dict[str, Location]) -> None:
    """The CPU graphs of the model and of its MTP heads, whose weights lie at `places` in weights.safetensors."""
    for name, accuracy_level in _GRAPHS.items():
        for file, graph in emit_graphs(spec, places, name, accuracy_level):
            writer.path(file).write_bytes(graph.SerializeToString())


def _row_blocks(param: Param) -> list[tuple[int, int]]:
    rows = param.shape[0]
    step = max(1, _BLOCK_BYTES * rows // (4 * param.elements))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _stored_rows(
    param: Param, spec: ModelSpec, source: Source, method: Method, start: int, stop: int
) -> list[tuple[str, NDArray]]:
    """Names and contents of the stored tensors' rows [start, stop)."""
    name = "embed" if param.name == "head" and spec.tied else param.name
    quant = spec.quant.of(param.kind)
    parts: tuple[NDArray, ...] | None = None
    if quant and isinstance(source, ReadySource):
        parts = source.ready(name, quant, start, stop)
    if parts is None:
        rows = source.read(name, start, stop) if len(param.shape) == 2 else source.read(name)
        parts = (rows,) if quant is None else method(rows, quant, param.name)
    return [(t.name, part) for t, part in zip(stored(param, quant), parts, strict=True)]


def _warn_requantised(packed: QuantSpec, quant: QuantSpec) -> None:
    for kind in KINDS:
        was, now = packed.of(kind), quant.of(kind)
        if was and now and (now.bits != was.bits or was.group % now.group):
            log.warning(
                "%s weights, in the checkpoint %d bits in groups of %d, are quantised again to %d bits in groups of %d",
                kind, was.bits, was.group, now.bits, now.group,
            )  # fmt: skip


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _method(name: str | None, calib: str | Path | None) -> Method:
    """How to round what is not calibrated."""
    if name not in (None, *METHODS, CALIBRATED):
        raise BadInputError(f"unknown quantisation method {name!r} (known: {', '.join([*METHODS, CALIBRATED])})")
    if name == CALIBRATED and calib is None:
        raise BadInputError(f"method {CALIBRATED} needs calibration text: give a file of JSON lines with --calib")
    if name in METHODS and calib is not None:
        raise BadInputError(f"method {name} does not calibrate: leave --calib out, or use method {CALIBRATED}")
    return METHODS.get(name or "", METHODS["rtn"])


def _with_context(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    if max_context is None:
        return spec
    if not 1 <= max_context <= spec.max_context:
        raise BadInputError(f"--max-context {max_context}: the checkpoint allows 1 to {spec.max_context}")
    return replace(spec, max_context=max_context)


def _write_json(path: Path, report: QuantReport | Calibration | GateReport) -> None:
    path.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
