"""Bytes that a model takes while it runs, item by item, before any of them is allocated.

Bytes of keys and values are kv/layout.py's. The rest follows from shapes where it can; what a library takes on top was
measured once (docs/device.md says on what) and is a constant here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mimo_edge.backends.cuda_memory import staging
from mimo_edge.device import driver
from mimo_edge.kernels.int4_linear import layout as device_layout
from mimo_edge.kernels.launch import ITEM_BYTES
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import HIDDEN_ROWS, KvLayout, plan_layout
from mimo_edge.kv.windows import ring_slots
from mimo_edge.params import Param, parameters, stored
from mimo_edge.spec import MAX_DRAFTS, ModelSpec

MB = 1_000_000
CPU_CHUNK = 256  # rows of a prefill step (engine.py's CHUNK)
GPU_CHUNK, GPU_SHORT = 512, MAX_DRAFTS + 1  # rows of the longest and of a short step (export/programs/lower.py)
GPU_SPARE = 2 * MAX_DRAFTS + 1  # rings on a GPU are longer: dropped steps have written into them (lower.py's SPARE)

# Measured with `python scripts/bench_plan.py` on x86-64 (Python 3.11, ONNX Runtime 1.32, tokenizers 0.22).
LIBRARIES = 80 * MB  # interpreter, numpy, tokenizers, ONNX Runtime and what it maps when a session starts
PACKED_SHARE, SESSION = 0.012, 3 * MB  # ONNX Runtime's padding of packed weights, and the session itself
TOKENIZER, TOKENIZER_LOADING = 6.8, 24.4  # times the bytes of tokenizer.json: kept, and while it is read
TOKENIZER_JSON = 50  # bytes of tokenizer.json a token of the vocabulary, where the file is not at hand

# Nobody measured these on an Orin.
GPU_LIBRARIES = 80 * MB  # interpreter, numpy, tokenizers, cuda-python
CUDA_CONTEXT = 300 * MB


@dataclass(frozen=True)
class Item:
    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Subject:
    """A model to plan for: its spec (with a quantisation), and what a bundle tells exactly.

    `tokenizer_bytes` is the size of tokenizer.json; `programs` those of the GPU in question and `code_bytes` its
    kernels; `heads` the MTP heads that can draft on a CPU. `assumed` says what quantisation was taken for a checkpoint
    that has none yet; `load_bytes` is what is read and hashed when the bundle is opened, 0 where there is none.
    """

    name: str
    spec: ModelSpec
    tokenizer_bytes: int
    assumed: str | None = None
    programs: ProgramSet | None = None
    code_bytes: int = 0
    load_bytes: int = 0
    heads: int = 0

    @staticmethod
    def of(spec: ModelSpec, name: str | None = None) -> Subject:
        """Of a spec alone."""
        heads = spec.mtp.heads if spec.mtp else 0
        return Subject(name or spec.family, spec, TOKENIZER_JSON * spec.vocab_size, heads=heads)

    def usable_heads(self, backend: str, drafts: int | str = "auto") -> int:
        """MTP heads that an engine would keep state for (decoding/mtp.py says so of a backend that is there)."""
        have = self.programs.heads if on_gpu(backend) and self.programs is not None else self.heads
        return min(have, MAX_DRAFTS if drafts == "auto" else int(drafts))


@dataclass(frozen=True)
class Load:
    """What is asked of the machine: `heads` MTP heads draft, `cache_bytes` keep prefixes."""

    context: int
    sessions: int = 1
    cache_bytes: int = 0
    heads: int = 0


def layout_of(subject: Subject, backend: str, load: Load) -> KvLayout:
    """The pools that an engine would allocate."""
    spec, gpu = subject.spec, on_gpu(backend)
    chunk = GPU_CHUNK if gpu else CPU_CHUNK
    layout = plan_layout(spec, load.context, load.sessions, 2 if gpu else 4, heads=load.heads, chunk=chunk)
    if not gpu:
        return layout
    longer = {k: ring_slots(a.window, GPU_SPARE, spec.max_context) for k, a in spec.attention.items() if a.window}
    if load.heads:
        longer[HIDDEN_ROWS] = min(spec.max_context, layout.rings[HIDDEN_ROWS] + GPU_SHORT)
    return replace(layout, rings=layout.rings | longer)


def footprint(subject: Subject, backend: str, load: Load) -> tuple[Item, ...]:
    """Everything that is resident at the peak of a long prompt. The order is that of the table in `mimo-edge plan`."""
    layout = layout_of(subject, backend, load)
    own = _gpu_items(subject, load, layout) if on_gpu(backend) else _cpu_items(subject, load)
    tokens = f"{load.sessions} x {load.context:,} tokens"
    items = [
        *own[:1],
        Item("KV pages", layout.full_bytes, f"{tokens}, {layout.full_token_bytes:,} bytes a token"),
        Item("window rings", layout.window_bytes, f"{load.sessions} x {layout.ring_bytes:,}, whatever the context"),
        Item("prefix cache", load.cache_bytes, "the budget of --cache-bytes" if load.cache_bytes else "off"),
        *own[1:],
        Item("tokenizer", int(TOKENIZER * subject.tokenizer_bytes), f"{TOKENIZER} times tokenizer.json"),
    ]
    rest = loading(subject, backend, {i.name: i.bytes for i in own}) - sum(i.bytes for i in items)
    if rest > 0:
        items.append(Item("loading", rest, "what reading the model takes beyond what stays"))
    return tuple(items)


def loading(subject: Subject, backend: str, own: dict[str, int]) -> int:
    """The peak before keys and values are allocated: while the tokenizer is read, or weights are sent to a GPU. `own`
    are the backend's items."""
    tokenizer = own["runtime"] + int(TOKENIZER_LOADING * subject.tokenizer_bytes)
    if not on_gpu(backend):  # packed matrix by matrix, and the table is not touched: never the peak
        return tokenizer
    loaded = own["runtime"] + own["driver"] + own["weights"] + int(TOKENIZER * subject.tokenizer_bytes)
    return max(tokenizer, loaded + 2 * staging(own["weights"]))


def on_gpu(backend: str) -> bool:
    return backend.startswith("cuda")


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


def _cpu_items(subject: Subject, load: Load) -> list[Item]:
    spec = subject.spec
    return [
        Item("weights", cpu_weights(spec, load.heads), "packed by ONNX Runtime, and the table that it maps"),
        Item("workspace", cpu_workspace(spec, load.context), f"a prompt's step of {CPU_CHUNK} rows"),
        Item("runtime", LIBRARIES, "Python, NumPy, tokenizers, ONNX Runtime"),
    ]


def _gpu_items(subject: Subject, load: Load, layout: KvLayout) -> list[Item]:
    if subject.programs is None:
        weights, scratch, how = gpu_weights(subject.spec, load.heads), gpu_scratch(subject.spec), "by shape"
        pools = layout.full_bytes + layout.window_bytes
        more = driver.by_shape(len(subject.spec.layers), load.heads, [weights, pools, scratch])
    else:
        sizes = {"weight": 0, "kv": 0, "": 0}
        for b in subject.programs.with_heads(load.heads).buffers.values():
            sizes[b.role if b.role in sizes else ""] += b.nbytes
        weights, scratch, how = sizes["weight"], sizes[""], "the bundle's programs"
        more = driver.of_programs(subject.programs, layout, subject.code_bytes)
    logits = 4 * subject.spec.vocab_size * GPU_SHORT  # a copy on the host
    runtime = GPU_LIBRARIES + CUDA_CONTEXT + logits
    taken = f"{megabytes(more.code)} of kernels, {more.nodes:,} nodes of graphs, {megabytes(more.rounding)} of rounding"
    return [
        Item("weights", weights, how),
        Item("workspace", scratch, f"scratch of a step of {GPU_CHUNK} rows, {how}"),
        Item("driver", more.total, f"{taken}: fitted to an H200"),
        Item("runtime", runtime, "Python and a CUDA context, which are assumed; logits on the host"),
    ]


def used_params(spec: ModelSpec, heads: int) -> list[Param]:
    """Of the main model and the first `heads` MTP heads."""
    return [p for p in parameters(spec) if not p.name.startswith("mtp.") or int(p.name.split(".")[1]) < heads]


def stored_bytes(spec: ModelSpec, p: Param) -> int:
    return sum(t.nbytes for t in stored(p, spec.quant.of(p.kind)))


def cpu_weights(spec: ModelSpec, heads: int = 0) -> int:
    """MatMulNBits packs its matrices anew: the integers, and two float32 a group. The embedding's table stays mapped
    and is counted whole, though only the rows of tokens that occur are ever read. Every MTP head is a session of its
    own, which packs the head of the vocabulary once more."""
    total = 0.0
    for p in used_params(spec, heads):
        quant = spec.quant.of(p.kind)
        if p.name == "embed" or quant is None:
            total += stored_bytes(spec, p)
        if quant is not None and (p.name != "embed" or not spec.separate_head):
            integers, scales, _ = stored(p, quant)
            times = 1 + heads if p.kind in ("embedding", "head") else 1
            total += times * (integers.nbytes + 2 * scales.nbytes) * (1 + PACKED_SHARE)
    return int(total) + (1 + heads) * SESSION


def cpu_workspace(spec: ModelSpec, context: int, chunk: int = CPU_CHUNK) -> int:
    """What ONNX Runtime's arena and the step's own arrays reach in the last step of a prompt as long as the context.

    The terms are the arrays alive at once (export/graph/cpu.py); their factors were fitted to measured peaks, since
    the arena keeps holes.
    """
    rows = min(chunk, context)
    new_rows = sum(4 * spec.attention_of(i).kv_elements * rows for i in range(len(spec.layers)))
    feed_forward = max(4 * rows * 2 * f.intermediate for f in spec.ffn.values())
    scores, masks = 0, 0
    for kind in {layer.attention for layer in spec.layers}:
        a = spec.attention[kind]
        seen = context if a.window is None else min(context, a.window + MAX_DRAFTS + rows)
        scores = max(scores, 4 * a.heads * rows * seen)
        masks += 4 * rows * seen * (a.heads // a.kv_heads + 2)
    qkv = max(4 * rows * (a.q_rows + a.k_rows + a.v_rows) for a in spec.attention.values())
    head = 8 * spec.vocab_size
    return int(4 * scores + masks + 1.5 * new_rows + 4 * feed_forward + 2 * qkv + head)


def gpu_weights(spec: ModelSpec, heads: int = 0) -> int:
    """Weights as the kernels read them (kernels/int4_linear/layout.py)."""
    total = 0
    for p in used_params(spec, heads):
        quant = spec.quant.of(p.kind)
        if quant is None:
            total += 4 * p.elements
            continue
        shapes = device_layout.shapes(*p.shape, quant, 2 if p.name.endswith("gate_up") else 1)
        total += sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in shapes.values())
    return total


def gpu_scratch(spec: ModelSpec, rows: int = GPU_CHUNK) -> int:
    """Buffers of the longest step, about: export/programs/layer.py without lowering the model."""
    used = [spec.attention_of(i) for i in range(len(spec.layers))]
    hidden = rows * spec.hidden_size * (4 + 2 + (2 if spec.post_norms else 0))
    qkv = max(2 * rows * (a.q_rows + a.k_rows + a.v_rows) for a in used)
    attended = max(2 * rows * (a.q_rows + a.heads * a.v_head_dim) for a in used)
    inner = max(2 * rows * spec.ffn_of(i).intermediate for i in range(len(spec.layers)))
    waiting = sum(2 * rows * a.kv_elements for a in used if a.window is not None)
    rotations = sum(4 * rows * a.rotary_dim for a in {id(a): a for a in used}.values())
    return hidden + qkv + attended + inner + waiting + rotations + 4 * GPU_SHORT * spec.vocab_size
