"""The index of a bundle's compiled kernels, as the device reads it. Plain data, without Triton or PyTorch.

A bundle holds for every compute capability that it was exported for:

    kernels/sm_87/index.json     this index
    kernels/sm_87/programs.json  the launches of every kind of step (export/programs)
    kernels/sm_87/model.trt.onnx the model as TensorRT takes it (export/graph/tensorrt.py)
    kernels/sm_87/model.trt.json what of it the device must know without reading ONNX (TensorRtForm)
    kernels/sm_87/KEY.cubin      machine code          kernels/sm_87/KEY.ptx  the same for a newer GPU's driver

and once for all of them

    kernels/weights.bin          weights as the kernels read them      kernels/weights.json  name -> [offset, bytes]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from mimo_edge.errors import BadInputError
from mimo_edge.spec import from_json

FORMAT = 1
INDEX, PROGRAMS = "index.json", "programs.json"
TENSORRT, TENSORRT_INFO = "model.trt.onnx", "model.trt.json"
WEIGHTS, WEIGHTS_INDEX = "kernels/weights.bin", "kernels/weights.json"
MAX_SHARED = 163 << 10  # bytes a block may use on Orin (sm_87), kept on every target


@dataclass(frozen=True)
class KernelEntry:
    """One compiled Variant.

    `types` are its arguments in order; `scratch` null pointers follow them, which Triton appends to every entry.
    `overlap`: it may start before the launch in front of it ends, as it waits for that itself (constant PDL;
    programmatic dependent launch, sm_90 and newer).
    `shared` bytes, `registers` a thread, `spills` bytes of a thread's local memory. `source` hashes the kernel's
    sources; `cubin` and `ptx` are the SHA-256 of the files.
    """

    kernel: str
    entry: str
    types: dict[str, str]
    scratch: int
    num_warps: int
    shared: int
    registers: int
    spills: int
    source: str
    cubin: str
    ptx: str
    overlap: bool = False


@dataclass(frozen=True)
class KernelIndex:
    """`target` is "sm_87", ...; `ptxas` the CUDA release that assembled the cubins; `ptx_isa` the PTX files' version;
    `elf_abi` the cubins' (7: drivers of CUDA 12 load them, 8: CUDA 13 and later)."""

    target: str
    triton: str
    ptxas: str
    ptx_isa: str
    elf_abi: int
    kernels: dict[str, KernelEntry]
    format: int = FORMAT

    def dumps(self) -> str:
        """Keys are not sorted: the order of `types` is the order of arguments."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def loads(text: str | bytes, where: str) -> KernelIndex:
        """Raises BadInputError naming `where` when the text is no index that this version reads."""
        return _read(KernelIndex, text, where)


@dataclass(frozen=True)
class TensorRtForm:
    """`nodes` counts the model's `mimo` nodes by op: as many plugin layers must an engine have."""

    nodes: dict[str, int]
    format: int = FORMAT

    def dumps(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def loads(text: str | bytes, where: str) -> TensorRtForm:
        """Raises BadInputError naming `where` when the text is none that this version reads."""
        return _read(TensorRtForm, text, where)


def _read(cls: type, text: str | bytes, where: str) -> Any:
    try:
        data: Any = json.loads(text)
    except ValueError as e:
        raise BadInputError(f"{where} is not JSON ({e}): copy or export the bundle again") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise BadInputError(f"{where}: format {data.get('format')!r}, this version reads {FORMAT}: export again")
    return from_json(cls, data, where)


def folder(target: str) -> str:
    """The bundle's folder of a target's kernels."""
    return f"kernels/{target}"
