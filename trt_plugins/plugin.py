"""IPluginV3 of every op, made for the TensorRT that is loaded (compat.py).

    registry = Plugins(trt)            registers one creator an op
    with registry.using(launcher):     engines that are read inside launch through it
        engine = runtime.deserialize_cuda_engine(plan)

What a creator is handed is checked when it is read; as an exception cannot pass through TensorRT, the first error is
kept in `error` and the creation fails. Past and present pools are not declared as aliases (IPluginV3OneBuildV2):
TensorRT then keeps a copy of them a layer; they are bound to one memory instead, which enqueue checks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mimo_edge.errors import MimoEdgeError
from mimo_edge.trt_plugins import fields
from mimo_edge.trt_plugins.compat import TensorRt
from mimo_edge.trt_plugins.enqueue import Launcher, queue, scratch_places, sizes_of
from mimo_edge.trt_plugins.op import DOMAIN, VERSION, Op, Tensor
from mimo_edge.trt_plugins.ops import OPS

_TYPES = {"fp16": "HALF", "fp32": "FLOAT", "i32": "INT32", "i8": "INT8"}


class Plugins:
    """The creators of all ops. TensorRT's registry belongs to the process: make one object of this class a process."""

    def __init__(self, trt: TensorRt):
        self.trt = trt
        self.error: MimoEdgeError | None = None
        self.created: list[str] = []  # kinds of plugins created while a network was parsed
        self.launcher: Launcher | None = None
        self.plugin = _plugin_class(trt, self)
        self._creators = [_creator(trt, self, op) for op in OPS.values()]  # TensorRT keeps no reference of its own
        registry = trt.module.get_plugin_registry()
        for creator in self._creators:
            if not registry.register_creator(creator, DOMAIN):
                raise MimoEdgeError(f"TensorRT has another plugin {DOMAIN}::{creator.name}: start a new process")

    @contextmanager
    def using(self, launcher: Launcher) -> Iterator[None]:
        """Plugins that are created inside launch their kernels through `launcher`."""
        self.launcher = launcher
        try:
            yield
        finally:
            self.launcher = None

    def check(self) -> None:
        """Raises the first error that a plugin met since the last call."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def keep(self, error: MimoEdgeError) -> None:
        self.error = self.error or error


def _plugin_class(trt: TensorRt, plugins: Plugins) -> Any:
    m = trt.module

    class Plugin(m.IPluginV3, m.IPluginV3OneCore, m.IPluginV3OneBuild, m.IPluginV3OneRuntime):  # type: ignore[misc, name-defined]
        """An op in TensorRT. It launches nothing while an engine is built: there are no weights then."""

        def __init__(self, op: Op, launcher: Launcher | None):
            for base in (m.IPluginV3, m.IPluginV3OneCore, m.IPluginV3OneBuild, m.IPluginV3OneRuntime):
                base.__init__(self)
            self.op, self.launcher = op, launcher
            self.plugin_name, self.plugin_version, self.plugin_namespace = op.kind, VERSION, DOMAIN
            self.num_outputs = len(op.outputs())
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # never freed: with 10.3's bindings that is a crash

        def get_capability_interface(self, type: Any) -> Any:
            return self

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            wanted = self.op.inputs()
            if len(input_types) != len(wanted):
                raise _kept(plugins, self.op, f"{len(input_types)} inputs (allowed: {_listed(wanted)})")
            for t, given in zip(wanted, input_types, strict=True):
                if given != _data_type(m, t):
                    raise _kept(plugins, self.op, f"input {t.name} is {given} (allowed: {_TYPES[t.type]})")
            return [_data_type(m, t) for t in self.op.outputs()]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            known: dict[int | str, Any] = {}
            for t, dims in zip(self.op.inputs(), inputs, strict=True):
                given = [dims[i].get_constant_value() if dims[i].is_constant() else -1 for i in range(len(dims))]
                fits = len(given) == len(t.shape) and all(
                    isinstance(want, str) or got in (want, -1) for want, got in zip(t.shape, given, strict=True)
                )
                if not fits:
                    raise _kept(plugins, self.op, f"input {t.name} is {given} (allowed: {list(t.shape)})")
                known |= {want: dims[i] for i, want in enumerate(t.shape)}
            return [_dims(m, t, known, builder) for t in self.op.outputs()]

        def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            tensor, given = (*self.op.inputs(), *self.op.outputs())[pos], in_out[pos].desc
            return given.type == _data_type(m, tensor) and given.format == m.TensorFormat.LINEAR

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass  # everything is known from fields and shapes

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            sizes = sizes_of(self.op.inputs(), [list(x.max) for x in inputs])
            return scratch_places(self.op.scratch(sizes.get("rows", sizes.get("logit_rows", 1))))[1]

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass  # enqueue looks at the shapes

        def set_tactic(self, tactic: int) -> None:
            pass  # the one there is

        def get_fields_to_serialize(self) -> Any:
            values = {name: _array(value) for name, value in fields.encode(self.op).items()}
            kinds = fields.kinds(type(self.op))
            self._fields = [m.PluginField(name, a, _field_type(m, kinds[name])) for name, a in values.items()]
            self._values = values  # a PluginField points into its array
            return m.PluginFieldCollection(self._fields)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self.launcher is None:
                return
            try:
                shapes = [list(d.dims) for d in input_desc]
                queue(self.op, self.launcher, shapes, inputs, outputs, workspace, stream)
            except MimoEdgeError as e:
                plugins.keep(e)
                raise

        def clone(self) -> Any:
            return Plugin(self.op, self.launcher)

    return Plugin


def _creator(trt: TensorRt, plugins: Plugins, op: type[Op]) -> Any:
    m = trt.module

    class Creator(m.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            m.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = op.kind, VERSION, DOMAIN
            kinds = fields.kinds(op).items()
            self._fields = [m.PluginField(name, np.array([], np.int32), _field_type(m, kind)) for name, kind in kinds]
            self.field_names = m.PluginFieldCollection(self._fields)

        def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
            try:
                made = fields.decode(op, name, {f.name: f.data for f in field_collection})
            except MimoEdgeError as e:
                plugins.keep(e)
                return None
            plugins.created.append(op.kind)
            return plugins.plugin(made, plugins.launcher if phase == m.TensorRTPhase.RUNTIME else None)

    return Creator()


def _kept(plugins: Plugins, op: Op, what: str) -> MimoEdgeError:
    error = MimoEdgeError(f"plugin {op.kind}: {what}: export the model again")
    plugins.keep(error)
    return error


def _listed(tensors: Sequence[Tensor]) -> str:
    return f"{len(tensors)}: {', '.join(t.name for t in tensors)}"


def _data_type(m: Any, tensor: Tensor) -> Any:
    return getattr(m.DataType, _TYPES[tensor.type])


def _dims(m: Any, tensor: Tensor, known: dict[int | str, Any], builder: Any) -> Any:
    dims = m.DimsExprs(len(tensor.shape))
    for i, d in enumerate(tensor.shape):
        dims[i] = builder.constant(d) if isinstance(d, int) else known[d]
    return dims


def _field_type(m: Any, kind: type) -> Any:
    return m.PluginFieldType.CHAR if kind in (str, float) else m.PluginFieldType.INT32


def _array(value: fields.Value) -> np.ndarray:
    """What a PluginField points to."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.int8)
    return np.atleast_1d(np.asarray(value, np.int32))
