"""The planner: bytes by item, what fits and the most that does, and the budget that is enforced beforehand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_bundle import fake_cuda, write_cuda_bundle
from fakes_cuda import FakeCuda
from specs import ALL, gemma_spec, mimo_spec, qwen_spec
from tiny_bundle import write_bundle
from tiny_weights import INT4

from mimo_edge import roofline
from mimo_edge.backends import registry
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_memory import UNIT
from mimo_edge.bundle import BUILT_IN
from mimo_edge.cache import CacheOptions
from mimo_edge.device import budget, capacity, driver, footprint
from mimo_edge.device.capacity import Capacity
from mimo_edge.device.footprint import Load, Subject
from mimo_edge.device.memory import check, megabytes, need, plan, within
from mimo_edge.device.modules import module
from mimo_edge.device.subject import assume, of_bundle, open_subject
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.export.programs import lower
from mimo_edge.export.programs.lower import SPARE, check_supported
from mimo_edge.export.programs.tuning import tuning
from mimo_edge.export.programs.weights import device_weights
from mimo_edge.kv.layout import plan_layout
from mimo_edge.params import parameters
from mimo_edge.spec import QuantSpec, TensorQuant, read_spec

SPECS = Path(__file__).parents[2] / "scripts" / "specs"
ROOMY = Capacity("a machine", 64 << 30, 60 << 30, 1 << 30, "a test")


@pytest.fixture(autouse=True)
def stay(monkeypatch):
    """The process that runs the tests does not offer itself to the kernel."""
    monkeypatch.setattr(budget, "volunteer", lambda: True)


def subject(spec, quant=INT4):
    return Subject.of(replace(spec, quant=quant))


def just(total):
    """The least budget that a plan of `total` bytes on a CPU fits."""
    first = max(int(total * 1.03), total + 16_000_000)
    return next(b for b in range(first - 2, first + 9) if within(b, "onnxruntime") == total)


def sizes(made):
    return {i.name: i.bytes for i in made.items}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", ["onnxruntime", "cuda"])
def test_bytes_of_keys_and_values_are_the_layout_s(name, backend):
    spec = ALL[name]
    made = plan(subject(spec), backend, ROOMY, Load(200, 3))
    layout = plan_layout(spec, 200, 3, 4 if backend == "onnxruntime" else 2)
    assert sizes(made)["KV pages"] == layout.full_bytes
    extra = sizes(made)["window rings"] - layout.window_bytes
    assert extra == 0 if backend == "onnxruntime" else extra >= 0, "a GPU's rings are longer by a dropped step"
    assert made.total == sum(sizes(made).values()) and made.fits


def test_state_of_mtp_heads_counts():
    spec = mimo_spec(mtp=3)
    with_heads = plan(subject(spec), "onnxruntime", ROOMY, Load(200, 2, heads=3))
    layout = plan_layout(spec, 200, 2, heads=3, chunk=256)
    assert sizes(with_heads)["window rings"] == layout.window_bytes > plan_layout(spec, 200, 2).window_bytes


@pytest.mark.parametrize("file", ["gemma-3-270m.json", "mimo-7b.json"])
def test_gpu_weights_and_scratch_without_programs_are_those_of_the_programs(file):
    spec = replace(read_spec(SPECS / file), mtp=None, quant=INT4)
    check_supported(spec)
    assert footprint.GPU_SPARE == SPARE
    rotations = sum(b.nbytes for n, b in device_weights(spec).items() if n.startswith("frequencies."))
    assert footprint.gpu_weights(spec) == sum(b.nbytes for b in device_weights(spec).values()) - rotations
    buffers = lower(spec, tuning("sm_87")).buffers.values()
    scratch = sum(b.nbytes for b in buffers if b.role not in ("weight", "kv", "input"))
    assert footprint.gpu_scratch(spec) == pytest.approx(scratch, rel=0.15)


def test_the_plan_of_a_bundle_is_what_the_cuda_backend_allocates(tmp_path):
    bundle = write_cuda_bundle(tmp_path / "b", mimo_spec())
    backend = CudaBackend.open(bundle, api=fake_cuda(bundle))
    load = Load(200, 2)
    backend.allocate(replace(plan_layout(bundle.spec, 200, 2, 2)))
    used, made = backend.memory(), sizes(plan(of_bundle(bundle, 87), "cuda", ROOMY, load))
    backend.close()
    assert made["KV pages"] + made["window rings"] == pytest.approx(used["kv"], rel=0.05)  # pieces start at 256 bytes
    buffers = of_bundle(bundle, 87).programs.buffers
    assert made["weights"] == sum(b.nbytes for b in buffers.values() if b.role == "weight") <= used["weights"]


class CountingCuda(FakeCuda):
    """Counts the kernels of captured graphs."""

    nodes = 0

    def cuGraphInstantiate(self, graph, flags):
        self.nodes += len(graph)
        return super().cuGraphInstantiate(graph, flags)


@pytest.mark.parametrize("heads", [0, 1])
def test_what_the_driver_takes_is_counted_as_the_backend_allocates_and_captures(tmp_path, heads):
    bundle = write_cuda_bundle(tmp_path / "b", mimo_spec(mtp=1))
    model, layout = of_bundle(bundle, 87), plan_layout(bundle.spec, 200, 2, 2, heads=heads, chunk=16)
    api = CountingCuda(model.programs.variants())
    backend = CudaBackend.open(bundle, api=api)
    backend.allocate(layout)
    backend.close()
    counted = driver.of_programs(model.programs, layout, model.code_bytes)
    assert counted.nodes == api.nodes > 0
    assert counted.code == sum(p.stat().st_size for p in bundle.path.rglob("*.cubin")) > 0
    buffers = model.programs.with_heads(heads).buffers.values()
    many = {"step": 1, "page": layout.pages, "ring": 2}
    asked = sum(b.nbytes * many[b.per] for b in buffers)
    whole = sum(-(-n // UNIT) * UNIT for n in api.allocated)
    assert len(api.allocated) == 4 and whole == asked + counted.rounding
    assert counted.total - counted.rounding == UNIT * math.ceil(
        (UNIT + counted.code + driver.NODE * counted.nodes) / UNIT
    )


# model: (bytes of its cubins for sm_90, heads, {context: the peak}) on one NVIDIA H200, as in docs/device.md
PEAKS = {
    "reference": (3_932_312, 3, {1024: 44_040_192, 4096: 46_137_344, 8192: 52_428_800}),
    "qwen3-1.7b": (2_470_776, 0, {1024: 1_094_713_344, 4096: 1_447_034_880, 16384: 2_856_321_024}),
    "mimo-7b": (2_371_696, 0, {1024: 4_219_469_824, 4096: 4_672_454_656, 16384: 6_484_393_984}),
}


@pytest.mark.parametrize("name", PEAKS)
def test_plans_are_close_to_peaks_that_were_measured_on_a_gpu(name):
    code, heads, peaks = PEAKS[name]
    spec = read_spec(BUILT_IN / "spec.json" if name == "reference" else SPECS / f"{name}.json")
    if name != "reference":  # as export/programs/random_bundle.py makes them
        q = TensorQuant(4, 64)
        spec = replace(spec, mtp=None, quant=QuantSpec(q, q, q, q) if spec.quant == QuantSpec() else spec.quant)
    programs = lower(spec, tuning("sm_90"))
    for model in (Subject(name, spec, 0), Subject(name, spec, 0, programs=programs, code_bytes=code)):
        for context, peak in peaks.items():
            made = plan(model, "cuda", replace(ROOMY, device_only=True), Load(context, heads=heads))
            exact = model.programs is not None  # by shape it is an estimate
            assert made.total == pytest.approx(peak, rel=0.003 if exact else 0.02), (exact, context)


def test_the_largest_context_and_the_most_sessions_are_the_most_that_fit():
    model = subject(replace(qwen_spec(), max_context=100_000))
    whole = plan(model, "onnxruntime", ROOMY, Load(5_000))
    room = replace(ROOMY, available=whole.total + ROOMY.reserve)
    made = plan(model, "onnxruntime", room, Load(5_000))
    assert made.fits and made.largest_context >= 5_000
    most = made.largest_context
    assert plan(model, "onnxruntime", room, Load(most)).fits
    assert not plan(model, "onnxruntime", room, Load(most + made.context % 64 + 64)).fits
    sessions = plan(model, "onnxruntime", replace(ROOMY, available=3 << 30), Load(5_000)).most_sessions
    fits = [
        plan(model, "onnxruntime", replace(ROOMY, available=3 << 30), Load(5_000, n)).fits
        for n in (sessions, sessions + 1)
    ]
    assert fits == [True, False]
    none = plan(model, "onnxruntime", replace(ROOMY, available=ROOMY.reserve + 1), Load(5_000))
    assert (none.largest_context, none.most_sessions, none.fits) == (0, 0, False)


def test_a_budget_one_page_too_small_is_refused_with_the_items_and_the_largest_context():
    model = subject(replace(qwen_spec(), max_context=100_000))
    exact = plan(model, "onnxruntime", ROOMY, Load(64 * 40)).total
    least = just(exact)
    check(plan(model, "onnxruntime", ROOMY, Load(64 * 40), budget=least))
    with pytest.raises(BadInputError) as e:
        check(plan(model, "onnxruntime", ROOMY, Load(64 * 41), budget=least))
    text = str(e.value)
    assert "more than the budget of" in text and "the largest context that fits is 2,560: use --context 2560" in text
    assert (
        all(f"{i} " in text for i in ("weights", "KV pages", "workspace", "runtime", "tokenizer")) and "\n" not in text
    )
    with pytest.raises(MimoEdgeError) as e:
        check(plan(model, "onnxruntime", replace(ROOMY, available=ROOMY.reserve + exact - 1), Load(64 * 40)))
    assert not isinstance(e.value, BadInputError) and "a machine, which has" in str(e.value)


def test_on_a_discrete_gpu_only_its_own_memory_counts():
    items = plan(subject(qwen_spec()), "cuda", ROOMY, Load(100)).items
    gpu = replace(ROOMY, device_only=True)
    assert need(items, gpu) == need(items, ROOMY) - sum(
        i.bytes for i in items if i.name in ("runtime", "tokenizer", "loading")
    )


@pytest.mark.parametrize(("context", "sessions"), [(0, 1), (257, 1), (10, 0), (10, 5000)])
def test_what_an_engine_cannot_have_is_no_plan(context, sessions):
    with pytest.raises(BadInputError, match="out of range"):
        plan(subject(qwen_spec()), "onnxruntime", ROOMY, Load(context, sessions))


def test_predictions_say_that_they_are_and_where_they_come_from():
    made = plan(
        subject(qwen_spec()), "cuda", capacity.of_module(module("orin-nano-8gb")), Load(100), None, "orin-nano-8gb"
    )
    p = made.prediction
    assert p and p["kind"] == "prediction, not a measurement" and "0.70 to 0.84" in p["decode_from"]
    low, high = p["decode_tok_s"]
    assert 0.70 * 68e9 / p["bytes_per_token"] == pytest.approx(low) and low < high
    assert 0 < p["load_s"][0] < p["load_s"][1]
    assert plan(subject(qwen_spec()), "onnxruntime", ROOMY, Load(100), None, "orin-nano-8gb").prediction is None


def test_a_token_reads_the_experts_that_are_chosen():
    dense, experts = (replace(mimo_spec(moe=moe), quant=INT4) for moe in (False, True))
    one, many = (roofline.step(experts, rows, 10) for rows in (1, 64))
    whole = sum(footprint.stored_bytes(experts, p) for p in footprint.used_params(experts, 0) if ".experts." in p.name)
    assert (
        many.weight_bytes - one.weight_bytes == whole // 2 + 63 * roofline._bytes(experts, parameters(experts)[0]) // 97
    )
    assert roofline.step(dense, 64, 10).weight_bytes - roofline.step(dense, 1, 10).weight_bytes < whole // 2


def test_the_quantisation_of_a_checkpoint_is_assumed_and_said():
    four = assume(Subject.of(qwen_spec()), QuantSpec(), None, None)
    assert four.spec.quant == INT4 and four.assumed == "4 bits in groups of 32 throughout"
    eight = assume(Subject.of(qwen_spec()), QuantSpec(), 8, 32)
    assert footprint.gpu_weights(eight.spec) > footprint.gpu_weights(four.spec)
    packed = QuantSpec(ffn=TensorQuant(8, 32))
    mixed = assume(Subject.of(qwen_spec()), packed, None, None)
    assert mixed.spec.quant.ffn == TensorQuant(8, 32) and "ffn 8 bits in groups of 32" in mixed.assumed
    with pytest.raises(BadInputError, match="groups of 128 do not divide"):
        assume(Subject.of(qwen_spec()), QuantSpec(), 4, 128)


def test_a_bundle_has_its_own_quantisation(tmp_path):
    bundle = write_bundle(tmp_path / "b", gemma_spec())
    found = open_subject(bundle.path, 87)
    assert found.spec == bundle.spec and found.assumed is None and found.programs is None
    assert found.tokenizer_bytes == (bundle.path / "tokenizer.json").stat().st_size < found.load_bytes
    with pytest.raises(BadInputError, match="leave --bits"):
        open_subject(bundle.path, 87, 4)


def test_an_engine_with_too_small_a_budget_loads_nothing(tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path / "b", qwen_spec())
    exact = plan(of_bundle(bundle, 0), "onnxruntime", capacity.of_machine(), Load(256)).total
    with Engine.open(bundle.path, "onnxruntime", memory_budget=just(exact)) as engine:
        assert engine.layout.context == 256
    monkeypatch.setattr(registry, "load", lambda *_: pytest.fail("weights were loaded"))
    page = 64 * engine.layout.full_token_bytes
    with pytest.raises(
        BadInputError, match=r"more than the budget of .*: weights .*the largest context that fits is 192"
    ):
        Engine.open(bundle.path, "onnxruntime", memory_budget=just(exact) - page)
    with pytest.raises(UnsupportedError, match="backend reference has no plan"):
        Engine.open(bundle.path, "reference", memory_budget=exact)


def test_a_cache_counts_against_the_budget(tmp_path):
    bundle = write_bundle(tmp_path / "b", qwen_spec())
    without = budget.enforce(bundle, "onnxruntime", 100, 1, None, 8 << 30)
    cached = budget.enforce(bundle, "onnxruntime", 100, 1, CacheOptions(bytes=50_000_000), 8 << 30)
    assert cached.total - without.total == 50_000_000 == sizes(cached)["prefix cache"]
    default = budget.enforce(bundle, "onnxruntime", 100, 1, CacheOptions(), 8 << 30)
    assert sizes(default)["prefix cache"] == 256 << 20


def test_a_model_s_plan_does_not_change_by_itself():
    """Plans are promises: whoever changes a formula changes these figures, and the tables in docs/plans.md."""
    spec = read_spec(SPECS / "gemma-3-270m.json")
    found = [
        plan(assume(Subject.of(spec), QuantSpec(), 4, 32), b, ROOMY, Load(4096)).total for b in ("cuda", "onnxruntime")
    ]
    assert [megabytes(n) for n in found] == ["887.7 MB", "758.9 MB"]
