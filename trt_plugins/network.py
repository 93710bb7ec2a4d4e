"""The TensorRT form becomes a network and an engine. Runs in the process that child.py is."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.trt_plugins.compat import TensorRt
from mimo_edge.trt_plugins.op import DOMAIN, SHORT
from mimo_edge.trt_plugins.plugin import Plugins

PROFILES = ("decode", "drafts", "prefill")  # in this order in every engine
_MOST_ELEMENTS = (1 << 31) - 1  # of a tensor


@dataclass(frozen=True)
class Request:
    """What to build. `nodes` counts the `mimo` nodes by op, `prefill` is the rows of the longest and of the shortest
    piece of a prompt; pools may have up to `pages` pages and `sequences` rings. `workspace` is in bytes."""

    nodes: Mapping[str, int]
    prefill: tuple[int, int]
    pages: int
    sequences: int
    workspace: int


@dataclass(frozen=True)
class Built:
    """`layers` counts the network's layers by type, plugins by op."""

    plan: bytes
    layers: Mapping[str, int]
    timing_cache: bytes
    seconds: float


class Log:
    """Makes a TensorRT logger that keeps warnings and errors."""

    def __init__(self, m: Any):
        self.lines: list[str] = []
        lines = self.lines

        class Logger(m.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                m.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= m.ILogger.Severity.ERROR:
                    lines.append(" ".join(message.split()))

        self.logger = Logger()

    @property
    def last(self) -> str:
        return self.lines[-1][:300] if self.lines else "TensorRT gave no reason"


def build(trt: TensorRt, plugins: Plugins, model: bytes, request: Request, timing_cache: bytes = b"") -> Built:
    """Parses, checks, builds. Raises BadInputError when the form is not what its plugins take, MimoEdgeError when
    TensorRT fails; both say what TensorRT says."""
    m, log = trt.module, Log(trt.module)
    began = time.perf_counter()
    builder = m.Builder(log.logger)
    network = builder.create_network(1 << int(m.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parse(trt, plugins, network, log, model)
    layers = count_layers(trt, plugins, network, request.nodes)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(m.MemoryPoolType.WORKSPACE, request.workspace)
    config.max_aux_streams = 0  # everything on the one stream that a step is captured on
    cache = config.create_timing_cache(timing_cache)
    config.set_timing_cache(cache, False)
    for name in PROFILES:
        config.add_optimization_profile(_profile(builder, network, request, name))
    plan = builder.build_serialized_network(network, config)
    plugins.check()
    if plan is None:
        raise MimoEdgeError(f"{trt.name} could not build the engine: {log.last}")
    saved = config.get_timing_cache()
    data = bytes(saved.serialize()) if saved is not None else b""
    return Built(bytes(plan), layers, data, time.perf_counter() - began)


def parse(trt: TensorRt, plugins: Plugins, network: Any, log: Log, model: bytes) -> None:
    parser = trt.module.OnnxParser(network, log.logger)
    parsed = parser.parse(model)
    plugins.check()
    if not parsed:
        raise BadInputError(f"{trt.name} does not take the model: {_reason(parser, log)}: export the model again")
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if tensor.dtype == trt.module.DataType.UINT8:  # plugins have no such inputs: the builder fails, without a word
            raise BadInputError(f"input {tensor.name} is UINT8 (allowed: INT8 for bytes): export the model again")


def _reason(parser: Any, log: Log) -> str:
    if not parser.num_errors:
        return log.last
    error = parser.get_error(parser.num_errors - 1)
    return f"node {error.node_name()} ({error.node_operator()}): {' '.join(error.desc().split())[:300]}"


def count_layers(trt: TensorRt, plugins: Plugins, network: Any, nodes: Mapping[str, int]) -> dict[str, int]:
    """Layers by type, plugins by op. Raises BadInputError unless every `mimo` node became a plugin layer."""
    m = trt.module
    types = [network.get_layer(i).type for i in range(network.num_layers)]
    found = sum(t == m.LayerType.PLUGIN_V3 for t in types)
    made = Counter(plugins.created)
    if found != sum(nodes.values()) or dict(made) != dict(nodes):
        raise BadInputError(
            f"{found} plugin layers ({_listed(made)}) for {sum(nodes.values())} nodes of domain {DOMAIN} "
            f"({_listed(nodes)}): the model and the plugins are of different versions: export the model again"
        )
    others = Counter(str(t).rpartition(".")[2] for t in types if t != m.LayerType.PLUGIN_V3)
    return {**dict(sorted(made.items())), **dict(sorted(others.items()))}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "none"


def _profile(builder: Any, network: Any, request: Request, name: str) -> Any:
    """Fixed rows for decode and drafts; the pieces of a prompt, of which one row's logits are made, for prefill."""
    longest, shortest = request.prefill
    rows = {"decode": (1, 1, 1), "drafts": (SHORT,) * 3, "prefill": (shortest, longest, longest)}[name]
    logits = (SHORT,) * 3 if name == "drafts" else (1, 1, 1)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = list(tensor.shape)
        if -1 not in shape:
            continue
        ranges = {
            "rows": rows,
            "logit_rows": logits,
            "pages": (1, 1, min(request.pages, _most(shape))),
            "sequences": (1, 1, min(request.sequences, _most(shape))),
        }[tensor.get_dimension_name(0)]
        profile.set_shape(tensor.name, *([n, *shape[1:]] for n in ranges))
    return profile


def _most(shape: list[int]) -> int:
    """Blocks that a pool of this shape may have."""
    return _MOST_ELEMENTS // math.prod(shape[1:])
