"""ONNX schemas of the `mimo` ops, with shape inference. Importing this module registers them.

They are read off the ops' own definitions (trt_plugins): a node's attributes are the op's fields, and its inputs are
exactly those that the op with these fields takes, in order, none left out. What each computes is in
kernels/<op>/reference.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx
from onnx import TensorProto, TypeProto
from onnx.defs import OpSchema, register_schema

from mimo_edge.errors import BadInputError
from mimo_edge.trt_plugins import fields
from mimo_edge.trt_plugins.op import VERSION as PLUGIN_VERSION
from mimo_edge.trt_plugins.op import Op, Tensor
from mimo_edge.trt_plugins.ops import OPS

DOMAIN, VERSION = "mimo", 1
PLUGIN = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}  # where TensorRT's parser looks for the plugin
ELEMENTS = {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT, "i32": TensorProto.INT32, "i8": TensorProto.INT8}

Context = onnx.shape_inference.InferenceContext
_KINDS: dict[type, Any] = {
    int: OpSchema.AttrType.INT,
    float: OpSchema.AttrType.STRING,
    str: OpSchema.AttrType.STRING,
    tuple: OpSchema.AttrType.INTS,
}


def op_of(op: type[Op], node: onnx.NodeProto) -> Op:
    """The op that a node stands for. Raises BadInputError as fields.decode does."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return fields.decode(op, node.name, {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()})


def _infer(op: type[Op], context: Context) -> None:
    values = {}
    for name, kind in fields.kinds(op).items():
        a = context.get_attribute(name)
        values[name] = a.s.decode() if kind in (float, str) else list(a.ints) if kind is tuple else a.i
    try:
        this = fields.decode(op, "", values)
    except BadInputError as e:
        raise ValueError(str(e)) from None
    given = [context.get_input_type(i).tensor_type for i in range(context.get_num_inputs())]
    wanted = this.inputs()
    if len(given) != len(wanted):
        names = ", ".join(t.name for t in wanted)
        raise ValueError(f"{op.kind} takes {len(wanted)} inputs ({names}), not {len(given)}")
    for tensor, have in zip(wanted, given, strict=True):
        _check(op, tensor, have)
    half = next((h.elem_type for t, h in zip(wanted, given, strict=True) if t.type == "fp16"), TensorProto.FLOAT16)
    known = {d: h.shape.dim[i] for t, h in zip(wanted, given, strict=True) for i, d in enumerate(t.shape)}
    for i, tensor in enumerate(this.outputs()):
        result = TypeProto()
        result.tensor_type.elem_type = half if tensor.type == "fp16" else ELEMENTS[tensor.type]
        for d in tensor.shape:
            result.tensor_type.shape.dim.append(
                onnx.TensorShapeProto.Dimension(dim_value=d) if isinstance(d, int) else known[d]
            )
        context.set_output_type(i, result)


def _check(op: type[Op], tensor: Tensor, have: Any) -> None:
    """Raises ValueError unless what is given has the tensor's type (float32 does for float16) and shape."""
    elements = {ELEMENTS[tensor.type]} | ({TensorProto.FLOAT} if tensor.type == "fp16" else set())
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in have.shape.dim]
    fits = len(dims) == len(tensor.shape) and all(
        isinstance(want, str) or not isinstance(got, int) or want == got
        for want, got in zip(tensor.shape, dims, strict=True)
    )
    if have.elem_type not in elements or not fits:
        given = TensorProto.DataType.Name(have.elem_type)
        raise ValueError(f"{op.kind}: input {tensor.name} is {given} {dims} (allowed: {tensor.type} {tensor.shape})")


def _register(op: type[Op]) -> None:
    kinds = {name: _KINDS[kind] for name, kind in fields.kinds(op).items()}
    attributes = [OpSchema.Attribute(name, kind, "", required=True) for name, kind in kinds.items()]
    attributes += [OpSchema.Attribute(name, OpSchema.AttrType.STRING, "", required=True) for name in PLUGIN]
    constraints = [(t, ["tensor(float16)", "tensor(float)", "tensor(int32)", "tensor(int8)"], "") for t in ("I", "O")]
    variadic: Any = {"param_option": OpSchema.FormalParameterOption.Variadic, "is_homogeneous": False}
    schema = OpSchema(
        op.kind,
        DOMAIN,
        VERSION,
        op.__doc__ or "",
        inputs=[OpSchema.FormalParameter("inputs", "I", **variadic)],
        outputs=[OpSchema.FormalParameter("outputs", "O", **variadic)],
        type_constraints=constraints,
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(partial(_infer, op))
    register_schema(schema)


for _op in OPS.values():
    _register(_op)
