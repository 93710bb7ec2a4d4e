"""What a model is: frozen dataclasses, JSON both ways.

Every importer ends in a `ModelSpec` and every consumer (oracle, graph, planner, runtime) starts from one.
Nothing here imports torch, onnx or onnxruntime.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mimo_edge.errors import BadInputError

MAX_DRAFTS = 3  # the most draft tokens a step verifies; sizes every ring (design: R = W-1 + K+1)


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequency scaling. `linear` divides all frequencies by `factor`; `llama3` is Llama 3.1's piecewise rule
    (transformers/modeling_rope_utils.py, `_compute_llama3_parameters`)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention layer.

    `window` is the number of keys a query sees, itself included; None means all earlier keys.
    `rotary_dim` first dimensions of a head are rotated, halves paired (NeoX); the rest pass through.
    `scale` multiplies q.k; `value_scale` multiplies v before it is cached; `sinks` adds one learned logit per
    query head to the softmax's denominator (arXiv 2601.02780, eq. 2-3).
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    rope_theta: float
    scale: float
    window: int | None = None
    rope_scaling: RopeScaling | None = None
    value_scale: float = 1.0
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def k_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_rows(self) -> int:
        return self.kv_heads * self.v_head_dim

    @property
    def kv_elements(self) -> int:
        """Cached elements a token and layer."""
        return self.k_rows + self.v_rows


@dataclass(frozen=True)
class MoeSpec:
    """Sigmoid-scored experts: the `top_k` best by score + bias; weights are the raw scores, normalised if
    `normalize`, times `scale` (transformers mimo_v2_flash, MiMoV2FlashTopkRouter)."""

    experts: int
    top_k: int
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class GateSpec:
    """Low-rank gate over blocks of feed-forward channels: a row keeps block b iff
    (W2 relu(W1 x) + bias)[b] > 0, x being the feed-forward's normalised input."""

    block: int
    rank: int


@dataclass(frozen=True)
class FeedForwardSpec:
    """down(act(gate x) * up x); with `moe`, `intermediate` is one expert's size."""

    intermediate: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    moe: MoeSpec | None = None
    gate: GateSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Names of the layer's attention and feed-forward kinds (keys of ModelSpec.attention and .ffn)."""

    attention: str
    ffn: str


@dataclass(frozen=True)
class MtpSpec:
    """Multi-token-prediction heads. `order` is the order of the two halves that enter the projection.

    MiMo-V2: token_first, three heads. MiMo-7B: hidden_first, one head, `zero_first` (the embedding of position 0
    is zeroed). `hidden` says whether heads see the hidden state before or after the final norm;
    `chained` whether head i+1 sees head i's hidden state instead of the main model's.
    """

    heads: int
    attention: str
    ffn: str
    order: Literal["token_first", "hidden_first"] = "token_first"
    hidden: Literal["pre_norm", "post_norm"] = "pre_norm"
    chained: bool = False
    zero_first: bool = False


@dataclass(frozen=True)
class TensorQuant:
    """`bits` (4 or 8) a weight in groups of `group` along K, asymmetric."""

    bits: int
    group: int


@dataclass(frozen=True)
class QuantSpec:
    """How each kind of tensor is stored; None leaves it in float."""

    attention: TensorQuant | None = None
    ffn: TensorQuant | None = None
    embedding: TensorQuant | None = None
    head: TensorQuant | None = None

    def of(self, kind: str) -> TensorQuant | None:
        return getattr(self, kind) if kind in ("attention", "ffn", "embedding", "head") else None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model.

    Norm weights are stored as plain multipliers (families with a 1+w convention are converted on import).
    `embed_scale` multiplies embeddings on lookup. `post_norms` adds a norm behind attention and behind the
    feed-forward, inside the residual branch (Gemma 3). `tied` makes the head use the embedding's values.
    `output_bias` adds a vector to the outputs of attention and feed-forward (before post_norms): the correction of
    a calibrated quantisation's mean shift.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_context: int
    norm_eps: float
    attention: dict[str, AttentionSpec]
    ffn: dict[str, FeedForwardSpec]
    layers: tuple[LayerSpec, ...]
    tied: bool = False
    embed_scale: float = 1.0
    post_norms: bool = False
    output_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    mtp: MtpSpec | None = None
    quant: QuantSpec = QuantSpec()

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def separate_head(self) -> bool:
        """Whether the bundle stores a head of its own: untied, or tied but stored at another precision."""
        return not self.tied or self.quant.head != self.quant.embedding

    def attention_of(self, layer: int) -> AttentionSpec:
        return self.attention[self.layers[layer].attention]

    def ffn_of(self, layer: int) -> FeedForwardSpec:
        return self.ffn[self.layers[layer].ffn]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Any) -> ModelSpec:
        """Raises BadInputError on unknown or missing keys and on wrong types."""
        return from_json(ModelSpec, data, "spec")


def read_spec(path: Path) -> ModelSpec:
    """A spec.json, as in a bundle. Raises BadInputError on what is none."""
    try:
        return ModelSpec.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as e:
        raise BadInputError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise BadInputError(f"{path} is not JSON ({e}): give a spec.json, as in a bundle") from None


def dumps(spec: ModelSpec) -> str:
    return json.dumps(spec.to_json(), indent=1, sort_keys=True) + "\n"


def _validate(spec: ModelSpec) -> None:
    def need(ok: bool, what: str) -> None:
        if not ok:
            raise BadInputError(f"model spec of family {spec.family!r}: {what}")

    need(spec.vocab_size > 0 and spec.hidden_size > 0 and spec.max_context > 0, "sizes must be positive")
    need(len(spec.layers) > 0, "no layers")
    need(0 < spec.norm_eps < 1, f"norm_eps {spec.norm_eps} must be between 0 and 1")
    need(math.isfinite(spec.embed_scale), f"embed_scale {spec.embed_scale} must be finite")
    for name, a in spec.attention.items():
        where = f"attention {name!r}: "
        need(min(a.heads, a.kv_heads, a.head_dim, a.v_head_dim) > 0, where + "sizes must be positive")
        need(a.heads % a.kv_heads == 0, where + f"{a.heads} heads do not divide into {a.kv_heads} kv heads")
        need(
            0 <= a.rotary_dim <= a.head_dim and a.rotary_dim % 2 == 0,
            where + f"rotary_dim {a.rotary_dim} must be even and at most head_dim {a.head_dim}",
        )
        need(1 <= a.rope_theta < 1e30, where + f"rope_theta {a.rope_theta} must be at least 1 and below 1e30")
        need(math.isfinite(a.scale) and math.isfinite(a.value_scale), where + "scale and value_scale must be finite")
        need(a.rope_scaling is None or 0 < a.rope_scaling.factor < 1e6, where + "rope scaling's factor must be above 0")
        need(a.window is None or a.window >= 1, where + f"window {a.window} must be at least 1")
    for name, f in spec.ffn.items():
        where = f"feed-forward {name!r}: "
        need(f.intermediate > 0, where + "intermediate must be positive")
        need(f.moe is None or 1 <= f.moe.top_k <= f.moe.experts, where + "top_k must be 1..experts")
        need(
            f.gate is None or (f.moe is None and f.intermediate % f.gate.block == 0),
            where + "a gate needs a dense feed-forward whose size is a multiple of its block",
        )
    kinds = list(spec.layers) + ([LayerSpec(spec.mtp.attention, spec.mtp.ffn)] if spec.mtp else [])
    for layer in kinds:
        need(layer.attention in spec.attention, f"unknown attention kind {layer.attention!r}")
        need(layer.ffn in spec.ffn, f"unknown feed-forward kind {layer.ffn!r}")
    for kind in ("attention", "ffn", "embedding", "head"):
        q = spec.quant.of(kind)
        need(
            q is None or (q.bits in (4, 8) and q.group in (32, 64, 128)),
            f"quant {kind}: {q} (allowed: bits 4 or 8, group 32, 64 or 128)",
        )


def from_json(cls: type, data: Any, where: str) -> Any:
    """Decodes `data` into the dataclass `cls`; unknown keys, missing keys and wrong types are errors."""
    if not isinstance(data, dict):
        raise BadInputError(f"{where}: expected an object, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise BadInputError(f"{where}: unknown key {unknown[0]!r} (known: {', '.join(sorted(hints))})")
    values = {k: _decode(hints[k], v, f"{where}.{k}") for k, v in data.items()}
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in data]:
        raise BadInputError(f"{where}: key {missing[0]!r} is missing")
    return cls(**values)


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value in args:
            return value
        raise BadInputError(f"{where}: {value!r} (allowed: {', '.join(map(repr, args))})")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        raise BadInputError(f"{where}: expected a list, got {type(value).__name__}")
    if origin is dict:
        if isinstance(value, dict):
            return {str(k): _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
        raise BadInputError(f"{where}: expected an object, got {type(value).__name__}")
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise BadInputError(f"{where}: expected {hint.__name__}, got {value!r}")
