"""Runs kernels on CPU tensors, through Triton's interpreter (conftest.py chooses it before anything imports Triton).

MIMO_EDGE_TEST_TARGET=sm_87 runs the same launches compiled for that target on a GPU instead (a newer one takes the
PTX). MIMO_EDGE_RECORD_VARIANTS=FILE launches nothing (tests fail) and notes the variants instead, so that they can be
compiled beforehand, all at once: scripts/parity_cuda.py --compile --variants FILE.
"""

import importlib
import json
import os
from dataclasses import asdict

import torch
from triton.runtime import interpreter

from mimo_edge.kernels.launch import Variant

TORCH = {"fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
_TARGET, _RECORD = os.environ.get("MIMO_EDGE_TEST_TARGET"), os.environ.get("MIMO_EDGE_RECORD_VARIANTS")

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor, scope):
    """Triton 3.6's interpreter makes loop bounds of arrays of one element with int(), which numpy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch


def call(variant: Variant, grid, args: dict) -> None:
    """One launch; `args` maps the variant's arguments to tensors and numbers."""
    assert list(args) == list(variant.types), f"{variant.kernel}: {list(args)} instead of {list(variant.types)}"
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            assert variant.types[name] == "*" + next(k for k, v in TORCH.items() if v == value.dtype), name
    if _RECORD:
        with open(_RECORD, "a") as file:
            file.write(json.dumps(asdict(variant)) + "\n")
    elif _TARGET:
        from on_gpu import launch

        launch(_TARGET, variant, grid, args)
    else:
        op, function = variant.kernel.split(".")
        kernel = getattr(importlib.import_module(f"mimo_edge.kernels.{op}.triton"), function)
        kernel[tuple(grid)](**args, **variant.constants, num_warps=variant.num_warps, num_stages=variant.num_stages)
