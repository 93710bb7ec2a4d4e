"""Engines of tiny bundles, as the stand-in for TensorRT reads them, and steps to run with them."""

from dataclasses import replace

import numpy as np
from specs import gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends import tensorrt_engines
from mimo_edge.backends.base import Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.tensorrt_build import programs_of, request_of
from mimo_edge.bundle import Bundle
from mimo_edge.kernels.index import TensorRtForm
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools

SPECS = {
    "gated": replace(mimo_spec(gate=True), layers=mimo_spec().layers[1:2], output_bias=True),
    "gemma": replace(gemma_spec((5, 11)), layers=gemma_spec().layers[1:3]),
    "qwen": replace(qwen_spec(1), output_bias=True),
}


def put_engine(bundle: Bundle, tensorrt="tensorrt-10.16.2.10", target="sm_87", real=None, **changes):
    """What `mimo-edge build` leaves; the stand-in's plan is the ONNX form itself. `real` is the target that the bundle
    has, where the engine is to say another."""
    model = tensorrt_engines.model_file(bundle, real or target)
    request = request_of(TensorRtForm({}), programs_of(bundle, real or target), sessions=2)
    with tensorrt_engines.workshop("x") as place:
        (place / tensorrt_engines.PLAN).write_bytes(changes.pop("plan", model.read_bytes()))
        plan = place / tensorrt_engines.PLAN
        info = tensorrt_engines.EngineInfo(
            tensorrt, target, bundle.fingerprint, tensorrt_engines.sha256(model), request.prefill, request.pages,
            request.sequences, {}, plan.stat().st_size, tensorrt_engines.sha256(plan),
        )  # fmt: skip
        final = tensorrt_engines.folder(bundle, tensorrt, target)
        tensorrt_engines.publish(
            place, final, replace(info, **changes), tensorrt_engines.timing_cache(tensorrt, target)
        )
    return final


def run_all(backend: CudaBackend, bundle: Bundle, logit_rows: list[int]):
    """A piece of a prompt, drafts of which two hold, a single row: their logits; and one row's best token."""
    layout = plan_layout(bundle.spec, 128, sequences=2, element_bytes=2)
    backend.allocate(layout)
    pools = KvPools(layout)
    pools.admit(5)  # a neighbour, so that neither pages nor rings begin at 0
    slots, tokens = pools.admit(40), np.random.default_rng(5).integers(0, 258, 21)
    out = []
    for start, count, rows, accepted in ((0, 15, logit_rows, 15), (15, 3, [0, 1, 2], 2), (17, 1, [0], 1)):
        (step,) = backend.run([Step(slots, start, tokens[start : start + count], np.array(rows))])
        out.append(step.logits.copy())
        backend.commit([accepted])
    best = backend.best(Step(slots, 18, tokens[18:19], np.array([0])))
    backend.close()
    return np.concatenate(out), best
