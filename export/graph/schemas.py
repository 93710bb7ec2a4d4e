"""ONNX schemas of the `mimo` ops, with shape inference. Importing this module registers them.

Packed weights are INT8 here and uint8 in the bundle, bit for bit the same (TensorRT has no UINT8 plugin inputs). T is
float16 or float32. What each op computes is in kernels/<op>/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TypeProto
from onnx.defs import OpSchema, register_schema

DOMAIN, VERSION = "mimo", 1

_PACKED, _INT, _FLOAT = "tensor(int8)", "tensor(int32)", "tensor(float)"
_T = ("T", ["tensor(float16)", "tensor(float)"], "activations, scales and pools")
Context = onnx.shape_inference.InferenceContext
Dim = onnx.TensorShapeProto.Dimension


def _inputs(required: dict[str, str], optional: dict[str, str] | None = None) -> list[OpSchema.FormalParameter]:
    return [OpSchema.FormalParameter(name, kind) for name, kind in required.items()] + [
        OpSchema.FormalParameter(name, kind, param_option=OpSchema.FormalParameterOption.Optional)
        for name, kind in (optional or {}).items()
    ]


def _attributes(**kinds: OpSchema.AttrType) -> list[OpSchema.Attribute]:
    return [OpSchema.Attribute(name, kind, "", required=True) for name, kind in kinds.items()]


def _packed(name: str = "") -> dict[str, str]:
    prefix = f"{name}_" if name else ""
    return {f"{prefix}q": _PACKED, f"{prefix}scales": "T", f"{prefix}zeros": _PACKED}


def _dims(context: Context, i: int) -> list[Dim]:
    return list(context.get_input_type(i).tensor_type.shape.dim)


def _known(dim: Dim) -> int | None:
    return dim.dim_value if dim.HasField("dim_value") else None


def _set(context: Context, i: int, element: int, dims: list[Dim]) -> None:
    result = TypeProto()
    result.tensor_type.elem_type = element
    result.tensor_type.shape.dim.extend(dims)
    context.set_output_type(i, result)


def _element(context: Context, i: int) -> int:
    return context.get_input_type(i).tensor_type.elem_type


def _columns(context: Context, i: int) -> int:
    """K of the packed weights whose q is input i."""
    _, groups, group_bytes = (d.dim_value for d in _dims(context, i))
    return groups * group_bytes * 8 // context.get_attribute("bits").i


def _infer_embedding(context: Context) -> None:
    _set(context, 0, _element(context, 2), [*_dims(context, 0), Dim(dim_value=_columns(context, 1))])


def _product(context: Context, first: int, last: int) -> None:
    """Rows of input 0 through packed weights, whose q are inputs `first` to `last`."""
    rows, columns = _dims(context, 0)
    if _known(columns) not in (None, _columns(context, first)):
        raise ValueError(f"rows of {_known(columns)} times weights of {_columns(context, first)} columns")
    _set(context, 0, _element(context, 0), [rows, _dims(context, last)[0]])


def _infer_attention(context: Context) -> None:
    width = context.get_attribute("heads").i * context.get_attribute("v_head_dim").i
    _set(context, 0, _element(context, 0), [_dims(context, 0)[0], Dim(dim_value=width)])
    for i in (1, 2):
        _set(context, i, _element(context, i), _dims(context, i))


def _register(
    name: str,
    inputs: list[OpSchema.FormalParameter],
    outputs: dict[str, str],
    attributes: list[OpSchema.Attribute],
    infer: Callable[[Context], None],
) -> None:
    schema = OpSchema(
        name, DOMAIN, VERSION, f"See kernels, {name}.",
        inputs=inputs, outputs=_inputs(outputs), type_constraints=[_T], attributes=attributes,
    )  # fmt: skip
    schema.set_type_and_shape_inference_function(infer)
    register_schema(schema)


_INTEGER, _REAL, _STRING = OpSchema.AttrType.INT, OpSchema.AttrType.FLOAT, OpSchema.AttrType.STRING

_register(
    "Int4Embedding", _inputs({"tokens": _INT, **_packed()}), {"y": "T"}, _attributes(bits=_INTEGER), _infer_embedding
)
_register(
    "Int4Linear",
    _inputs({"x": "T", **_packed()}, {"bias": "T"}),
    {"y": "T"},
    _attributes(bits=_INTEGER),
    lambda context: _product(context, 1, 1),
)
_register(
    "SparseFfn",
    _inputs({"x": "T", "keep": "T", **_packed("gate_up"), **_packed("down")}),
    {"y": "T"},
    _attributes(bits=_INTEGER, activation=_STRING),
    lambda context: _product(context, 2, 5),
)
_register(
    "WindowedAttention",
    _inputs(
        {
            "qkv": "T", "k_pool": "T", "v_pool": "T", "positions": _INT, "sequences": _INT, "lengths": _INT,
            "table": _INT, "frequencies": _FLOAT,
        },
        {"sinks": _FLOAT, "q_norm": _FLOAT, "k_norm": _FLOAT},
    ),
    {"y": "T", "new_k_pool": "T", "new_v_pool": "T"},
    _attributes(
        heads=_INTEGER, kv_heads=_INTEGER, head_dim=_INTEGER, v_head_dim=_INTEGER, window=_INTEGER, scale=_REAL,
        value_scale=_REAL, eps=_REAL,
    ),
    _infer_attention,
)  # fmt: skip
