"""Checks every TensorRT class, method and flag that mimo-edge uses against the Python bindings of several versions.

    python scripts/check_tensorrt_api.py [--keep DIR]

The wheels of the bindings are small and come with pip; the libraries behind them (over a gigabyte) are not needed:
the nine functions that the bindings link to are stubs, which a C compiler makes here. So the real classes are looked
at, and plugins are really made of them and asked what TensorRT would ask; nothing is built. The versions are those of
JetPack 6.2 (10.3) and 7.2 (10.16; JetPack's own build, 10.16.2.10, is not on PyPI), and 11. The bindings of 10.3 need
NumPy 1: with NumPy 2 they hand fields over wrongly, which mimo-edge must notice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WHEELS = {
    "tensorrt-cu12-bindings==10.3.0": "numpy==1.26.4",
    "tensorrt-cu13-bindings==10.16.1.11": None,
    "tensorrt-cu13-bindings==11.4.0.106": None,
}
STUBS = {
    "libnvinfer": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "libnvonnxparser": (
        "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion",
    ),
    "libnvinfer_plugin": ("initLibNvInferPlugins",),
}  # fmt: skip
USED = """
    ILogger.Severity.ERROR Builder Builder.create_network Builder.create_builder_config
    Builder.create_optimization_profile Builder.build_serialized_network NetworkDefinitionCreationFlag.STRONGLY_TYPED
    INetworkDefinition.num_inputs INetworkDefinition.get_input INetworkDefinition.num_layers
    INetworkDefinition.get_layer ILayer.type ITensor.name ITensor.shape ITensor.dtype ITensor.get_dimension_name
    LayerType.PLUGIN_V3 OnnxParser OnnxParser.parse OnnxParser.num_errors OnnxParser.get_error ParserError.desc
    ParserError.node_name ParserError.node_operator IBuilderConfig.set_memory_pool_limit MemoryPoolType.WORKSPACE
    IBuilderConfig.max_aux_streams IBuilderConfig.create_timing_cache IBuilderConfig.set_timing_cache
    IBuilderConfig.get_timing_cache ITimingCache.serialize IBuilderConfig.add_optimization_profile
    IOptimizationProfile.set_shape get_plugin_registry IPluginRegistry.register_creator IPluginV3 IPluginV3OneCore
    IPluginV3OneBuild IPluginV3OneRuntime IPluginCreatorV3One IPluginV3.get_capability_interface IPluginV3.clone
    IPluginV3OneBuild.get_output_data_types IPluginV3OneBuild.get_output_shapes
    IPluginV3OneBuild.supports_format_combination IPluginV3OneBuild.configure_plugin
    IPluginV3OneBuild.get_workspace_size IPluginV3OneRuntime.on_shape_change IPluginV3OneRuntime.set_tactic
    IPluginV3OneRuntime.get_fields_to_serialize IPluginV3OneRuntime.attach_to_context IPluginV3OneRuntime.enqueue
    IPluginCreatorV3One.create_plugin IPluginCreatorV3One.field_names PluginField PluginFieldCollection
    PluginFieldType.CHAR PluginFieldType.INT32 TensorRTPhase.BUILD TensorRTPhase.RUNTIME TensorFormat.LINEAR
    DataType.HALF DataType.FLOAT DataType.INT32 DataType.INT8 DataType.UINT8 DimsExprs IDimensionExpr.is_constant
    IDimensionExpr.get_constant_value IExprBuilder.constant DynamicPluginTensorDesc.desc DynamicPluginTensorDesc.max
    PluginTensorDesc.dims PluginTensorDesc.type PluginTensorDesc.format Runtime Runtime.deserialize_cuda_engine
    ICudaEngine.device_memory_size_v2 ICudaEngine.create_execution_context
    ExecutionContextAllocationStrategy.USER_MANAGED ICudaEngine.num_io_tensors ICudaEngine.get_tensor_name
    ICudaEngine.get_tensor_mode TensorIOMode.INPUT ICudaEngine.get_tensor_shape ICudaEngine.get_tensor_dtype
    IExecutionContext.set_device_memory IExecutionContext.set_optimization_profile_async
    IExecutionContext.set_input_shape IExecutionContext.set_tensor_address IExecutionContext.execute_async_v3
""".split()  # noqa: SIM905  (as a list it would take 91 lines)


OK = f"all {len(USED)} names are there, and plugins answer"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks mimo-edge's use of TensorRT against its bindings.")
    parser.add_argument("--keep", type=Path, help="keep wheels and stubs in this folder")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(inside(args.inside)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_ops(folder / "ops.json")
        results = {wheel: check(wheel, numpy, folder) for wheel, numpy in WHEELS.items()}
    for wheel, result in results.items():
        print(f"{wheel}: {result}")
    return int(any(r != OK for r in results.values()))


def check(wheel: str, numpy: str | None, folder: Path) -> str:
    """What is wrong, in a line, or OK."""
    place = folder / wheel.replace("==", "-")
    place.mkdir(parents=True, exist_ok=True)
    try:
        pip("download", "-d", place, wheel)
        if numpy:
            pip("install", "--upgrade", "--target", place / "numpy", numpy)
    except subprocess.CalledProcessError as e:
        return f"could not be fetched: {e.stderr.strip().splitlines()[-1][:200]}"
    with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
        archive.extractall(place)
    make_stubs(place, major=wheel.partition("==")[2].split(".")[0])
    if numpy and "do not work together" not in (error := ask_inside(folder, place, [place])):
        return f"with this environment's NumPy it should have been refused: {error}"
    return ask_inside(folder, place, [place / "numpy", place])


def pip(verb: str, option: str, *rest: object) -> None:
    command = [sys.executable, "-m", "pip", verb, "-q", "--no-deps", option, *map(str, rest)]
    subprocess.run(command, capture_output=True, text=True, check=True)


def ask_inside(folder: Path, libraries: Path, paths: list[Path]) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": ":".join(map(str, paths))}
    command = [sys.executable, __file__, "--inside", str(folder / "ops.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return f"failed: {' '.join(done.stderr.split())[-300:]}"
    missing = json.loads(done.stdout.splitlines()[-1])
    return f"lacks {', '.join(missing)}" if missing else OK


def make_stubs(folder: Path, major: str) -> None:
    for library, functions in STUBS.items():
        source = folder / f"{library}.c"
        source.write_text("".join(f"void *{f}(void) {{ return 0; }}\n" for f in functions))
        name = f"{library}.so.{major}"
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True)


def write_ops(path: Path) -> None:
    """Fields of one node of every op, of the built-in model and of one with what that lacks."""
    from mimo_edge.bundle import BUILT_IN, Bundle
    from mimo_edge.export.graph.schemas import DOMAIN, op_of
    from mimo_edge.export.graph.tensorrt import emit_tensorrt
    from mimo_edge.export.programs.tuning import tuning
    from mimo_edge.trt_plugins import fields
    from mimo_edge.trt_plugins.ops import OPS

    spec = Bundle.open(BUILT_IN, verify=False).spec
    plain = replace(spec, ffn={k: replace(f, gate=None) for k, f in spec.ffn.items()})
    found = {}
    for model in (emit_tensorrt(s, tuning("sm_87")) for s in (spec, plain)):
        found |= {n.op_type: n for n in model.graph.node if n.domain == DOMAIN}
    assert found.keys() == OPS.keys()
    path.write_text(json.dumps({kind: fields.encode(op_of(OPS[kind], node)) for kind, node in found.items()}))


def inside(ops: Path) -> list[str]:
    """In a process with one version's bindings: names that they lack, once plugins made of them have answered."""
    import tensorrt_bindings as trt

    missing = [name for name in USED if not has(trt, name)]
    if not missing:
        ask_plugins(trt, json.loads(ops.read_text()))
    return missing


def has(thing: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


def ask_plugins(trt: Any, ops: dict[str, dict]) -> None:
    """Makes a plugin of every op and asks it what TensorRT asks; its launches are noted instead of made."""
    from mimo_edge.trt_plugins import fields
    from mimo_edge.trt_plugins.compat import checked
    from mimo_edge.trt_plugins.ops import OPS
    from mimo_edge.trt_plugins.plugin import Plugins

    registry = SimpleNamespace(register_creator=lambda creator, space: True)
    trt.get_plugin_registry = lambda: registry  # the library's is a stub
    plugins = Plugins(checked(trt, rtx=False))
    launched: list[str] = []
    note = SimpleNamespace(
        launch=lambda launch, address, stream: launched.append(launch.variant.kernel),
        copy=lambda *_: None,
        fill=lambda *_: None,
    )
    for kind, values in ops.items():
        ask(trt, plugins, fields.decode(OPS[kind], "x", values), note)
    plugins.check()
    assert len(launched) >= len(OPS), launched


def ask(trt: Any, plugins: Any, op: Any, note: Any) -> None:
    first = plugins.plugin(op, None)
    creator = next(c for c in plugins._creators if c.name == op.kind)
    with plugins.using(note):
        again = creator.create_plugin("x", first.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert again is not None and again.op == op, plugins.error
    shapes = [[d if isinstance(d, int) else 4 for d in t.shape] for t in op.inputs()]
    given = {t.name: 256 * (i + 1) for i, t in enumerate(op.inputs())}
    outputs = [given[op.in_place().get(t.name, op.inputs()[0].name)] for t in op.outputs()]
    descriptions = [described(trt, t, shape) for t, shape in zip(op.inputs(), shapes, strict=True)]
    again.clone().enqueue(descriptions, [], list(given.values()), outputs, 1 << 20, 0)
    assert len(first.get_output_data_types([d.type for d in descriptions])) == first.num_outputs


def described(trt: Any, tensor: Any, shape: list[int]) -> Any:
    d = trt.PluginTensorDesc()
    d.dims = trt.Dims(shape)
    names = {"fp16": "HALF", "fp32": "FLOAT", "i32": "INT32", "i8": "INT8"}
    d.type, d.format = getattr(trt.DataType, names[tensor.type]), trt.TensorFormat.LINEAR
    return d


if __name__ == "__main__":
    sys.exit(main())
