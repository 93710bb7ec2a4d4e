"""A stand-in for TensorRT that runs engines: a plan is the ONNX form itself, plugins come from the registry.

It keeps the rules that matter: plugins are made from fields by creators, with the phase; every tensor needs an address,
a dynamic one a shape within its profile; a context's own tensors lie in the memory that it was given.
"""

from __future__ import annotations

import ctypes
import enum
import math
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import torch

from mimo_edge.trt_plugins.enqueue import scratch_places
from mimo_edge.trt_plugins.network import PROFILES

BYTES = {1: 4, 6: 4, 10: 2, 3: 1}  # of ONNX's element types
DTYPES = {1: "FLOAT", 6: "INT32", 10: "HALF", 3: "INT8"}
DataType = enum.Enum("DataType", ["FLOAT", "HALF", "INT32", "INT8", "UINT8"])


class PluginField:
    def __init__(self, name, data, type):
        self.name, self.data, self.type = name, data, type


class Registry:
    def __init__(self):
        self.creators = {}

    def register_creator(self, creator, namespace):
        key = (namespace, creator.name, creator.plugin_version)
        return self.creators.setdefault(key, creator) is creator


def gather_on_cpu(cuda, source, index, to, count, width, stream):
    """What Gather does, in the memory of the fake driver."""

    def work():
        chosen = view(cuda, index, count, torch.int32).long()
        x = view(cuda, source, (int(chosen.max()) + 1) * width, torch.float32).reshape(-1, width)
        view(cuda, to, count * width, torch.float32)[:] = x[chosen].flatten()

    cuda._do(work)


def copy_rows(cuda, source, index, to, count, width, stream):
    """Gather with any driver, where the rows are the first ones: so for all but one row of a long step."""
    cuda.cuMemcpyDtoDAsync(to, source, 4 * count * width, stream)


def fake_tensorrt(cuda, version="10.16.2.10", gather=gather_on_cpu):
    """The module, whose engines run on a driver, fake or real."""
    registry = Registry()
    names = SimpleNamespace(
        __version__=version,
        DataType=DataType,
        TensorFormat=enum.Enum("TensorFormat", ["LINEAR", "CHW4"]),
        TensorIOMode=enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"]),
        TensorRTPhase=enum.Enum("TensorRTPhase", ["BUILD", "RUNTIME"]),
        PluginFieldType=enum.Enum("PluginFieldType", ["CHAR", "INT32"]),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
        PluginField=PluginField,
        PluginFieldCollection=list,
        ILogger=type("ILogger", (), {"Severity": SimpleNamespace(ERROR=1)}),
        get_plugin_registry=lambda: registry,
        **{
            name: type(name, (), {})
            for name in (
                "IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One",
            )
        },
    )  # fmt: skip
    module = ModuleType("tensorrt")
    vars(module).update(vars(names))
    module.Runtime = lambda logger: SimpleNamespace(
        deserialize_cuda_engine=lambda plan: read(module, registry, partial(gather, cuda), plan)
    )
    return module


def read(module, registry, gather, plan):
    if plan == b"foreign":
        return None
    graph = onnx.load_from_string(plan).graph
    nodes = []
    for node in graph.node:
        plugin = None
        if node.domain:
            values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            space, version = (values.pop(k).decode() for k in ("plugin_namespace", "plugin_version"))
            given = [PluginField(k, field(v), None) for k, v in values.items()]
            creator = registry.creators[space, node.op_type, version]
            plugin = creator.create_plugin(node.name, given, module.TensorRTPhase.RUNTIME)
            if plugin is None:
                return None
            assert len(plugin.get_output_data_types([plugin_type(module, t) for t in plugin.op.inputs()]))
        nodes.append((node, plugin))
    return Engine(module, graph, nodes, gather)


def field(value):
    """What TensorRT hands to a creator: text as numbers with a zero behind."""
    if isinstance(value, bytes):
        return np.frombuffer(value + b"\0", np.int8)
    return np.atleast_1d(np.asarray(value, np.int32))


def plugin_type(module, tensor):
    return getattr(module.DataType, {"fp16": "HALF", "fp32": "FLOAT", "i32": "INT32", "i8": "INT8"}[tensor.type])


class Engine:
    def __init__(self, module, graph, nodes, gather):
        self.module, self.nodes, self.gather = module, nodes, gather
        self.inputs = {i.name: i.type.tensor_type for i in graph.input}
        self.outputs = {o.name: o.type.tensor_type for o in graph.output}
        inferred = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=OPSETS)).graph
        self.types = {v.name: v.type.tensor_type for v in inferred.value_info} | self.inputs | self.outputs
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.device_memory_size_v2 = self.lay_out(512)[1]

    def get_tensor_name(self, i):
        return [*self.inputs, *self.outputs][i]

    def get_tensor_mode(self, name):
        return self.module.TensorIOMode.INPUT if name in self.inputs else self.module.TensorIOMode.OUTPUT

    def get_tensor_shape(self, name):
        return [d.dim_value or -1 for d in self.types[name].shape.dim]

    def get_tensor_dtype(self, name):
        return getattr(DataType, DTYPES[self.types[name].elem_type])

    def create_execution_context(self, strategy):
        assert strategy == self.module.ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)

    def lay_out(self, rows):
        """Offsets of inner tensors and workspaces (by the node's name), and their bytes."""
        sizes = {"rows": rows, "logit_rows": min(rows, 4)}
        places, total = {}, 0
        for node, plugin in self.nodes:
            for name in node.output:
                if name not in self.outputs:
                    t = self.types[name]
                    dims = [d.dim_value or sizes[d.dim_param] for d in t.shape.dim]
                    places[name] = total
                    total += -(-math.prod(dims) * BYTES[t.elem_type] // 256) * 256
            if plugin:
                places[node.name, "workspace"] = total
                count = min(rows, 4) if node.op_type == "Int4Head" else rows
                total += scratch_places(plugin.op.scratch(count))[1]
        return places, total


class Context:
    def __init__(self, engine):
        self.engine, self.address, self.shapes, self.profile = engine, {}, {}, None

    def set_device_memory(self, memory, size):
        assert size >= self.engine.device_memory_size_v2
        self.memory = memory

    def set_optimization_profile_async(self, profile, stream):
        self.profile = PROFILES[profile]
        return True

    def set_input_shape(self, name, shape):
        declared = self.engine.get_tensor_shape(name)
        assert len(shape) == len(declared) and all(d in (-1, s) for d, s in zip(declared, shape, strict=True))
        allowed = {"decode": range(1, 2), "drafts": range(4, 5), "prefill": range(16, 513)}[self.profile]
        if name in ("tokens", "positions", "sequences") and shape[0] not in allowed:
            return False
        self.shapes[name] = list(shape)
        return True

    def set_tensor_address(self, name, address):
        self.address[name] = address
        return True

    def execute_async_v3(self, stream):
        e = self.engine
        assert self.address.keys() == {*e.inputs, *e.outputs}, "a tensor has no address"
        rows = self.shapes["tokens"][0]
        places, total = e.lay_out(rows)
        assert total <= e.device_memory_size_v2
        at = {n: self.memory + offset for n, offset in places.items()} | self.address
        sizes = {"rows": rows, "logit_rows": self.shapes["logit_rows"][0]}
        try:
            for node, plugin in e.nodes:
                if plugin is None:
                    width = e.types[node.input[0]].shape.dim[1].dim_value
                    e.gather(*(at[n] for n in (*node.input, *node.output)), sizes["logit_rows"], width, stream)
                    continue
                shapes = [self.shape(name, sizes) for name in node.input]
                plugin = plugin.attach_to_context(None)
                descriptions = [SimpleNamespace(dims=s) for s in shapes]
                given, made = [at[n] for n in node.input], [at[n] for n in node.output]
                plugin.enqueue(descriptions, [], given, made, at[node.name, "workspace"], stream)
        except Exception:
            return False  # what TensorRT answers when a plugin raises
        return True

    def shape(self, name, sizes):
        if name in self.shapes:
            return self.shapes[name]
        return [d.dim_value or sizes[d.dim_param] for d in self.engine.types[name].shape.dim]


def view(fake_cuda, address, count, dtype):
    fake_cuda._check(address, 4 * count)
    return torch.frombuffer((ctypes.c_uint8 * (4 * count)).from_address(address), dtype=dtype)


OPSETS = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("mimo", 1)]
