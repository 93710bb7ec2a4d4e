"""The parity suite itself, without a GPU: the same scenarios with a tiny model, kernels in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
from cuda_bundle import fake_cuda, open_cuda, write_cuda_bundle
from fakes_trt import fake_tensorrt
from parity_backends import with_engine
from parity_judge import Cell, Table, judge
from parity_models import Model
from parity_scenarios import SCENARIOS, Outcome
from parity_suite import HEADS, Missing, Suite
from specs import WINDOW, mimo_spec

from mimo_edge.backends.onnxruntime import FLOAT_MODEL, OnnxRuntimeBackend
from mimo_edge.backends.onnxruntime_session import load
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.backends.tensorrt import TensorRtBackend
from mimo_edge.bundle import head_graphs
from mimo_edge.errors import UnsupportedError
from mimo_edge.export.graph.cpu import emit_graphs
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels.windowed_attention.variants import Tuning as AttentionTuning
from mimo_edge.params import stored_tensors
from mimo_edge.tensors import lay_out
from mimo_edge.trt_plugins import compat

# Few programs a launch: the interpreter takes as long for a small one as for a large one.
COARSE = Tuning(
    AttentionTuning(parts=1),
    {op: [{"tiles": 1, "row_tiles": 4, "warps": 1, "stages": 2}] for op in ("linear", "head", "gate_up")},
)
TINY = replace(mimo_spec(5, mtp=1), layers=(WINDOW,), max_context=128)


def make(name, folder):
    if name != "tiny":
        raise LookupError("there is none")
    bundle = write_cuda_bundle(folder / "bundle", TINY, tuning=COARSE, vocab=64)
    _, places = lay_out(stored_tensors(bundle.spec))
    for file, graph in emit_graphs(bundle.spec, places, FLOAT_MODEL, accuracy_level=1):
        (bundle.path / file).write_bytes(graph.SerializeToString())
    return Model(bundle, chunk=16, reply=3, cached=12)


def plugins(bundle, folder):
    cuda = fake_cuda(bundle)
    trt = compat.checked(fake_tensorrt(cuda), rtx=False)
    return with_engine(bundle, folder, "sm_87", lambda: TensorRtBackend.open(bundle, api=cuda, trt=trt))


def onnx(bundle, folder):
    heads = [bundle.path / name for name in head_graphs(FLOAT_MODEL, bundle.spec)]
    return OnnxRuntimeBackend(bundle.spec, bundle.path / FLOAT_MODEL, 1, heads)


def nowhere(bundle, folder):
    raise UnsupportedError("there is none here")


BACKENDS = {
    "reference": lambda bundle, folder: ReferenceBackend.open(bundle),
    "cuda": lambda bundle, folder: open_cuda(bundle),
    "plugins": plugins,
    "onnxruntime": onnx,
    "nowhere": nowhere,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    suite = Suite(tmp_path_factory.mktemp("parity"), make, BACKENDS)
    yield suite
    suite.close()


@pytest.mark.parametrize("backend", ["reference", "cuda", "onnxruntime"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios(suite, scenario, backend):
    cell = suite.cell("tiny", scenario, backend)
    assert cell.good, cell
    assert cell.tokens or scenario not in ("drafts, some rejected", HEADS, "prefix hit", "restored from disk")


def test_plugins_have_the_cuda_backends_bits(suite):
    cell = suite.cell("tiny", "prefill, odd steps", "plugins")
    assert cell.good and cell.same


def test_what_is_not_there_is_said(suite):
    with pytest.raises(Missing, match=r"nowhere.*there is none here"):
        suite.cell("tiny", "prefill, whole", "nowhere")
    with pytest.raises(Missing, match=r"other.*there is none"):
        suite.cell("other", "prefill, whole", "cuda")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_another_provider_does_not_stand_in(suite):
    bundle = suite.model("tiny").bundle
    with pytest.raises(UnsupportedError, match="no usable MissingExecutionProvider here, only CPUExecutionProvider"):
        load(bundle.path / FLOAT_MODEL, 1, ("MissingExecutionProvider", "CPUExecutionProvider"))


def test_a_backend_that_loses_a_row_is_found(suite):
    """The reference whose commits forget their last row, and one that takes another token than the best."""
    model, scenario = suite.model("tiny"), SCENARIOS["decode past the window"]
    backend = ReferenceBackend.open(model.bundle)
    commit = backend.commit
    backend.commit = lambda accepted: commit([max(0, n - 1) for n in accepted])
    assert not judge(model, scenario(backend, model, None)).good
    reply = suite.outcome("tiny", "drafts, some rejected", "reference").replies[0]
    wrong = Outcome([], [replace(reply, tokens=(*reply.tokens[:-1], (reply.tokens[-1] + 1) % 64))])
    right = suite.outcome("tiny", "prefill, whole", "reference").parts
    cell = judge(model, replace(wrong, parts=right))
    assert not cell.good and (cell.equal, cell.tokens) == (len(reply.tokens) - 1, len(reply.tokens))


def test_cells_and_the_table():
    assert not Cell(np.nan, 3, 3, 0.0).good and not Cell(0.1, 3, 3, 0.0).good and not Cell(0.0, 2, 3, 0.05).good
    assert not Cell(0.0, 3, 3, 0.0, same=False).good
    table = Table()
    table.put("m", "s", "cuda", Cell(1.234e-3, 2, 3, 0.04, same=True))
    table.skip("m", "s", "other", "other", "not installed")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.lines(["cuda", "other", "third"])[:-1]]
    assert rows[2] == ["m", "s", "1.2e-03 2/3 (tie, 0.040) = cuda", "skipped", "-"]
    assert table.lines([])[-1] == "skipped: other: not installed"
