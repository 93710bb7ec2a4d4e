"""A small ONNX graph writer: names, constants, weights by reference, branches. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

FLOAT, FLOAT16, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL
INT64, INT32, UINT8, INT8 = TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8
Shape = Sequence[int | str]


class GraphBuilder:
    """Collects nodes in order. `branch()` gives a builder for a subgraph whose constants live in the root."""

    def __init__(self, parent: GraphBuilder | None = None):
        self._root: GraphBuilder = parent._root if parent else self
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._types: list[ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._constants: dict[str, str] = {}
        self._used: dict[str, int] = {}

    def branch(self) -> GraphBuilder:
        return GraphBuilder(self)

    def input(self, name: str, shape: Shape, dtype: int = FLOAT) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: Shape, dtype: int = FLOAT) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def constant(self, value: NDArray | np.generic | Sequence[int] | float | int, dtype: type = np.float32) -> str:
        """An inline constant; equal ones are stored once. Floats become `dtype`; a uint8 stays one."""
        array = np.asarray(value)
        array = array.astype(dtype) if array.dtype.kind == "f" else array
        digest = f"{array.dtype}{list(array.shape)}{array.tobytes().hex()}"
        known = self._root._constants
        if digest not in known:
            known[digest] = f"constant.{len(known)}"
            self._root._initializers[known[digest]] = numpy_helper.from_array(array, known[digest])
        return known[digest]

    def external(self, name: str, dtype: int, shape: Sequence[int], location: str, offset: int, length: int) -> str:
        """An initializer whose bytes stay in the file `location`; asking again for the same name is free."""
        if name not in self._root._initializers:
            tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", location), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            self._root._initializers[name] = tensor
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        outputs: Sequence[str] | int = 1,
        name: str | None = None,
        domain: str = "",
        shape: Shape | None = None,
        dtype: int = FLOAT,
        **attributes,
    ) -> list[str]:
        """Appends a node and returns its outputs' names: `outputs` gives them or their number, which are then made of
        `name`. `shape` and `dtype` declare the first output where ONNX cannot infer it (ops outside its domain)."""
        if isinstance(outputs, int):
            base = self._unique(name or op)
            outputs = [base if k == 0 else f"{base}.{k}" for k in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        if shape is not None:
            self.declare(outputs[0], shape, dtype)
        return list(outputs)

    def declare(self, name: str, shape: Shape, dtype: int = FLOAT) -> None:
        self._types.append(helper.make_tensor_value_info(name, dtype, shape))

    def op(self, op: str, *inputs: str, **kwargs) -> str:
        """`node` for the common case: one output."""
        return self.node(op, inputs, **kwargs)[0]

    def _unique(self, name: str) -> str:
        count = self._root._used.get(name, 0)
        self._root._used[name] = count + 1
        return name if count == 0 else f"{name}.{count}"

    def graph(self, name: str) -> GraphProto:
        outputs = {o.name for o in self._outputs}
        return helper.make_graph(
            self._nodes,
            name,
            self._inputs,
            self._outputs,
            list(self._initializers.values()),
            value_info=[t for t in self._types if t.name not in outputs],
        )

    def model(self, name: str, opsets: dict[str, int], ir_version: int) -> ModelProto:
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        return helper.make_model(
            self.graph(name), opset_imports=imports, ir_version=ir_version, producer_name="mimo-edge"
        )
