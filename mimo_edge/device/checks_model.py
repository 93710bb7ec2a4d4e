"""Checks of `mimo-edge doctor` on the software and the bundle: will this model run here, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mimo_edge.backends.cuda_kernels import read_index, targets
from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.device import capacity, memory
from mimo_edge.device.findings import Finding, advice, wrong
from mimo_edge.device.footprint import Load
from mimo_edge.device.modules import CAPABILITY
from mimo_edge.device.probe import JETPACKS, OLDEST, Machine
from mimo_edge.device.subject import of_bundle
from mimo_edge.errors import BadInputError
from mimo_edge.golden import SELFTEST

PYTHON = (3, 10)
NEEDED = {"numpy": "numpy", "tokenizers": "tokenizers", "jinja2": "jinja2", "onnxruntime": "onnxruntime"}
OLD_TENSORRT = 36  # L4T whose Python bindings of TensorRT were made for NumPy 1
USUAL_CONTEXT = 4096  # tokens that a plan is checked for, where the model has so many


def check_python(m: Machine) -> Iterator[Finding]:
    if m.python < PYTHON:
        version = ".".join(map(str, m.python))
        yield wrong(
            "python",
            "this Python is too old",
            version,
            "sudo apt install python3.10 python3.10-venv, and install mimo-edge in its venv",
        )
    for name, package in NEEDED.items():
        if m.installed(name) is None and not (name == "onnxruntime" and m.installed("onnxruntime-gpu")):
            yield wrong("library", "a library that mimo-edge needs is missing", name, f"pip install {package}")
    # that of CUDA 12.6 is one distribution, cuda-python
    if m.jetson and m.installed("cuda-bindings") is None and m.installed("cuda-python") is None:
        yield wrong(
            "cuda-python",
            "the GPU cannot be used without cuda-python",
            "not installed",
            "pip install 'mimo-edge[cuda]'",
        )
    numpy, release = m.installed("numpy") or "0", m.release or (0, 0, 0)
    tensorrt = m.system.glob("/usr/lib/python3*/dist-packages/tensorrt")
    if tensorrt and release[0] == OLD_TENSORRT and int(numpy.split(".")[0]) > 1:
        yield advice(
            "numpy-tensorrt", "JetPack 6's TensorRT 10.3 needs NumPy 1: the tensorrt backend would refuse to run",
            f"NumPy {numpy}", "pip install 'numpy<2', or use --backend cuda",
        )  # fmt: skip


def check_bundle(m: Machine, path: Path) -> Iterator[Finding]:
    """What opening and running the bundle would meet."""
    try:
        bundle = Bundle.open(path)
    except BadInputError as e:
        yield wrong("bundle", "the bundle cannot be used", e, f"copy {path} again, or export the model again")
        return
    if m.jetson:
        yield from check_kernels(m, bundle)
    yield from check_memory(m, bundle)
    if not bundle.has(SELFTEST):
        yield advice(
            "selftest-missing", f"the bundle has no {SELFTEST}, so nobody can tell whether it answers right here", path,
            "export the model again",
        )  # fmt: skip


def check_kernels(m: Machine, bundle: Bundle) -> Iterator[Finding]:
    have = targets(bundle)
    export = f"mimo-edge export {bundle.path} --target orin -o {bundle.path}-orin, where Triton is installed"
    if CAPABILITY not in have:
        value = ", ".join(f"sm_{c}" for c in have) or "none"
        # the built-in model is there to try things out, on the CPU too
        say = advice if bundle.path.resolve() == BUILT_IN.resolve() else wrong
        yield say(
            "kernels",
            f"the bundle has no kernels for this GPU (sm_{CAPABILITY}), so the CPU would be used",
            value,
            export,
        )
        return
    index = read_index(bundle, CAPABILITY)
    need = int(index.ptxas.split(".")[0])
    known = JETPACKS.get(m.release[0]) if m.release and m.release[0] >= OLDEST else None
    if known and need > known[1]:
        yield wrong(
            "kernels-newer", f"JetPack {known[0]} runs kernels of CUDA {known[1]}, the bundle's are newer",
            f"CUDA {index.ptxas}", f"TRITON_PTXAS_PATH=(a ptxas of CUDA {known[1]}) {export}",
        )  # fmt: skip


def check_memory(m: Machine, bundle: Bundle) -> Iterator[Finding]:
    """Whether a usual context fits what this machine, or its container, has left."""
    gpu = m.jetson and CAPABILITY in targets(bundle)
    subject = of_bundle(bundle, CAPABILITY if gpu else 0)
    room = capacity.of_machine(m.system)  # the memory of a Jetson's GPU is the machine's
    wanted = Load(min(USUAL_CONTEXT, bundle.spec.max_context))
    made = memory.plan(subject, "cuda" if gpu else "onnxruntime", room, wanted)
    if made.fits:
        return
    limited = "limit" in room.source
    items = ", ".join(f"{i.name} {memory.megabytes(i.bytes)}" for i in made.items if i.bytes)
    fix = (
        f"use --context {made.largest_context}" if made.largest_context else "close other programs; see mimo-edge plan"
    )
    if limited:
        missing = memory.megabytes(made.total - made.limit)
        fix = f"raise the limit by {missing} (docker run --memory, systemd MemoryMax), or {fix}"
    yield wrong(
        "limit" if limited else "memory", f"{wanted.context:,} tokens need {memory.megabytes(made.total)}: {items}",
        f"{memory.megabytes(room.usable)} usable ({room.source}, less {memory.megabytes(room.reserve)} reserve)", fix,
    )  # fmt: skip
