"""Puts what a GPU needs into a bundle that is being written."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from mimo_edge.bundle import SPEC, WEIGHTS, Bundle, BundleWriter, read_tensors
from mimo_edge.errors import BadInputError
from mimo_edge.export.programs.lower import PREFILL_ROWS, check_supported, lower
from mimo_edge.export.programs.tuning import Tuning, tuning
from mimo_edge.export.programs.weights import device_weights, write_device_weights
from mimo_edge.extras import needs_extra
from mimo_edge.kernels import index
from mimo_edge.spec import ModelSpec

Progress = Callable[[int, int, str], None]
MODULES = {"orin": 87}  # names of device families for the compute capability
_LOWEST, _HIGHEST = 80, 129  # Triton's matrix instructions and this ptxas


def capability(target: str) -> int:
    """ "sm_87" or "orin" -> 87. Raises BadInputError on anything else."""
    if target in MODULES:
        return MODULES[target]
    digits = target[3:] if target.startswith("sm_") else ""
    if not (digits.isascii() and digits.isdigit() and _LOWEST <= int(digits) <= _HIGHEST):
        raise BadInputError(f"unknown target {target!r} (known: cpu, orin, sm_80 and newer): use --target orin")
    return int(digits)


def retarget(source: Bundle, out: str | Path, capabilities: Sequence[int], progress: Progress) -> Bundle:
    """A copy of a bundle with kernels for these GPUs instead of those it had; weights and quantisation stay.

    Raises as BundleWriter and add_kernels do.
    """
    check_supported(source.spec)
    kept = [name for name in source.manifest.files if not name.startswith("kernels/") and name != SPEC]
    with BundleWriter(out) as writer:
        writer.reserve(sum(source.manifest.files[n].bytes for n in kept) + 2 * device_bytes(source.spec))
        for name in kept:
            shutil.copyfile(source.file(name), writer.path(name))
        add_kernels(writer, source.spec, capabilities, progress)
        target = ",".join(["cpu", *(f"sm_{c}" for c in capabilities)])
        return writer.finish(source.spec, target, source.manifest.name)


def device_bytes(spec: ModelSpec) -> int:
    """Bytes of the device weights' file, about."""
    return sum(b.nbytes for b in device_weights(spec).values())


def add_kernels(writer: BundleWriter, spec: ModelSpec, capabilities: Sequence[int], progress: Progress) -> None:
    """Device weights from the weights.safetensors that `writer` holds; kernels and programs of each capability.

    Raises UnsupportedError when the model has parts without kernels or Triton is missing, MimoEdgeError when a kernel
    does not compile.
    """
    compile_kernels(writer, spec, capabilities, progress)
    tensors = read_tensors(writer.path(WEIGHTS))
    write_device_weights(spec, tensors, writer.path(index.WEIGHTS), writer.path(index.WEIGHTS_INDEX), progress)
    for c in capabilities:
        write_tensorrt(writer.path(index.folder(f"sm_{c}")), spec, tuning(f"sm_{c}"))


def write_tensorrt(out: Path, spec: ModelSpec, tuned: Tuning, prefill_rows: tuple[int, ...] = PREFILL_ROWS) -> None:
    """The TensorRT form, for the kernels that `lower` makes of the same arguments, and what it consists of."""
    from mimo_edge.export.graph import schemas, tensorrt  # imports this package

    model = tensorrt.emit_tensorrt(spec, tuned, prefill_rows)
    nodes = Counter(node.op_type for node in model.graph.node if node.domain == schemas.DOMAIN)
    (out / index.TENSORRT).write_bytes(model.SerializeToString(deterministic=True))
    (out / index.TENSORRT_INFO).write_text(index.TensorRtForm(dict(nodes)).dumps(), encoding="utf-8")


def compile_kernels(writer: BundleWriter, spec: ModelSpec, capabilities: Sequence[int], progress: Progress) -> None:
    """Kernels and programs of each capability; raises as add_kernels does."""
    with needs_extra("kernels", "compiling kernels"):
        import triton  # noqa: F401

        from mimo_edge.kernels.aot import compile_variants
    for c, programs in [(c, lower(spec, tuning(f"sm_{c}"))) for c in capabilities]:
        out = _folder(writer.path(index.folder(f"sm_{c}")))
        compiled = compile_variants(programs.variants().values(), c, out, progress=progress)
        (out / index.INDEX).write_text(compiled.dumps(), encoding="utf-8")
        (out / index.PROGRAMS).write_text(programs.dumps(), encoding="utf-8")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
