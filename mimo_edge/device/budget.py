"""The budget of an engine: checked against the plan before anything is loaded or allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimo_edge.backends.cuda_kernels import targets
from mimo_edge.bundle import Bundle
from mimo_edge.device import capacity
from mimo_edge.device.footprint import Load, layout_of, on_gpu
from mimo_edge.device.memory import Plan, check, plan
from mimo_edge.device.process import volunteer
from mimo_edge.device.subject import of_bundle
from mimo_edge.device.system import System
from mimo_edge.errors import UnsupportedError
from mimo_edge.kv.snapshots import Geometry

if TYPE_CHECKING:
    from mimo_edge.cache import CacheOptions
    from mimo_edge.request import Drafts

# And their variants: backends whose memory is known beforehand. That of a TensorRT engine only the engine tells.
PLANNED = ("onnxruntime", "cuda")


def enforce(
    bundle: Bundle,
    backend: str,
    context: int,
    sessions: int,
    cache: CacheOptions | None,
    budget: int,
    drafts: Drafts = "auto",
    system: System | None = None,
) -> Plan:
    """The plan, if it fits the budget and what this machine has left. Then this process offers itself as the first to
    be killed should others take that memory after all.

    Raises BadInputError when the budget is too small, MimoEdgeError when the machine is, UnsupportedError for a backend
    that cannot be planned.
    """
    gpu = None
    if backend == "auto" or on_gpu(backend):
        gpu = capacity.gpu_memory()
    if backend == "auto":
        backend = "cuda" if gpu is not None and gpu.capability in targets(bundle) else "onnxruntime"
    if not backend.startswith(PLANNED):
        raise UnsupportedError(
            f"backend {backend} has no plan: leave the memory budget out, or use onnxruntime or cuda"
        )
    gpu = gpu if on_gpu(backend) else None
    subject = of_bundle(bundle, gpu.capability if gpu else 0)
    heads = subject.usable_heads(backend, drafts)
    load = Load(context, sessions, 0, heads)
    if cache is not None:
        from mimo_edge.cache import DEFAULT_BYTES

        most = Geometry.of(layout_of(subject, backend, load)).most_bytes(context)
        load = Load(context, sessions, max(DEFAULT_BYTES, most) if cache.bytes is None else cache.bytes, heads)
    made = plan(subject, backend, capacity.of_machine(system, gpu), load, budget)
    check(made)
    volunteer()
    return made
