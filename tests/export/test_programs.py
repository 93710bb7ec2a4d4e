"""Lowering: what is launched for a model, what memory it asks for, the device's weights; what is not supported."""

import json
from dataclasses import replace

import numpy as np
import pytest
from specs import ALL, gemma_spec, mimo_spec, qwen_spec
from tiny_weights import INT4, quantised, write_weights

from mimo_edge.bundle import read_tensors
from mimo_edge.errors import UnsupportedError
from mimo_edge.export.programs import device_bytes, device_weights, lower, write_device_weights
from mimo_edge.export.programs.random_bundle import _write
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels.int4_linear import layout
from mimo_edge.params import parameters
from mimo_edge.spec import MtpSpec, QuantSpec, TensorQuant


def has_experts(spec):
    return any(f.moe for f in spec.ffn.values())


LOWERED = {name: quantised(spec) for name, spec in ALL.items() if not has_experts(spec)}


def lowered(spec, rows=(16, 32)):
    return lower(quantised(spec), Tuning(), rows)


@pytest.mark.parametrize("name", LOWERED)
def test_every_argument_is_a_buffer_of_its_type(name):
    programs = lower(LOWERED[name], Tuning(), (16,))
    assert list(programs.programs) == ["step.1", "head.1", "step.4", "head.4", "step.16"]
    used = set()
    for program in programs.programs.values():
        for x in (*program.launches, *program.commit):
            assert list(x.args) == list(x.variant.types), x.variant.kernel
            assert all(n >= 1 for n in x.grid)
            for argument, value in x.args.items():
                if isinstance(value, str):
                    used.add(value)
                    assert value in programs.buffers, (x.variant.kernel, argument, value)
    assert used - {"counts"} >= {n for n, b in programs.buffers.items() if b.role in ("kv", "output")} - {"counts"}
    assert {n for n, b in programs.buffers.items() if b.role == "weight"} <= used | {"norm"}


HEADS = {
    "mimo-v2": mimo_spec(mtp=3),
    "mimo-7b": replace(qwen_spec(), mtp=MtpSpec(1, "full", "dense", order="hidden_first")),
    "chained": replace(mimo_spec(mtp=2), mtp=MtpSpec(2, "window", "mtp", chained=True)),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_pieces_of_rounds(name):
    spec = quantised(HEADS[name])
    programs = lower(spec, Tuning(), (16,))
    heads = range(spec.mtp.heads)
    names = [f"{kind}.{m}" for m in heads for kind in ("draft", "best", "sample", "catchup.16")]
    assert list(programs.programs)[5:] == ["begin.drafts", "verify", *names, "accept.best", "accept.sample"]
    assert programs.heads == len(heads)
    used = set()
    for program in programs.programs.values():
        for x in (*program.launches, *program.commit):
            assert list(x.args) == list(x.variant.types) and x.grid[0] >= 1, x.variant.kernel
            used |= {v for v in x.args.values() if isinstance(v, str)}
    assert used <= programs.buffers.keys()
    assert {n for n, b in programs.buffers.items() if b.role in ("kv", "weight")} <= used | {"norm"}
    assert not any(p.commit for n, p in programs.programs.items() if n.split(".")[0] not in ("step", "head"))
    kernels = {x.variant.kernel for x in programs.programs["catchup.16.0"].launches}
    attends = "windowed_attention.prefill" in kernels
    assert attends == spec.mtp.chained, "keys and values follow from a row's input alone, unless heads are chained"


def test_the_heads_that_an_engine_leaves_out_are_no_memory_and_no_work():
    spec = quantised(mimo_spec(mtp=3))
    all_heads, plain = lower(spec, Tuning(), (16,)), lower(replace(spec, mtp=None), Tuning(), (16,))
    one, none = all_heads.with_heads(1), all_heads.with_heads(0)
    assert one.heads == 1 and all_heads.with_heads(3) == all_heads
    assert [n for n in one.buffers if n.startswith("mtp.") and one.buffers[n].role == "kv"] == [
        "mtp.hidden", "mtp.0.layer.k", "mtp.0.layer.v"
    ]  # fmt: skip
    assert none.programs == plain.programs
    assert {n for n, b in none.buffers.items() if b.role == "kv"} == {
        n for n, b in plain.buffers.items() if b.role == "kv"
    }


def test_grids_and_launches_do_not_depend_on_the_context():
    short, long = (lower(replace(quantised(mimo_spec()), max_context=c), Tuning()) for c in (128, 128))
    assert short == long
    one, two = lowered(mimo_spec()), lower(replace(quantised(mimo_spec()), max_context=512), Tuning(), (16, 32))
    rings = [{n: b.shape for n, b in p.buffers.items() if b.per == "ring"} for p in (one, two)]
    assert rings[0] == rings[1] and rings[0], "a window layer's memory does not grow with the context"
    assert two.buffers["table.pages"].shape[1] == 2 * one.buffers["table.pages"].shape[1]


def test_one_memory_serves_all_steps_at_the_largest_size():
    programs = lowered(gemma_spec())
    assert programs.buffers["x"].shape == (32, 32) and programs.buffers["logits"].shape == (4, 128)
    assert programs.buffers["qkv"].shape[0] == 32
    news = [n for n in programs.buffers if n.startswith("k_new")]
    assert len(news) == 3 and "step.32" in programs.programs, "rows of a long step wait for commit, each layer's apart"
    assert programs.programs["step.32"].commit and not programs.programs["step.4"].commit


def head_weights(programs):
    return next(x.args["q"] for x in programs.programs["head.1"].launches if "q" in x.args)


def test_a_tied_head_reads_the_embedding_and_another_precision_is_a_tensor_of_its_own():
    spec = gemma_spec()
    same = lower(replace(spec, quant=INT4), Tuning(), (16,))
    other = lower(replace(spec, quant=replace(INT4, head=TensorQuant(8, 32))), Tuning(), (16,))
    assert "head.q" not in same.buffers and head_weights(same) == "embed.q"
    assert head_weights(other) == "head.q"
    assert other.buffers["head.q"].nbytes == 2 * other.buffers["embed.q"].nbytes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (quantised(mimo_spec(moe=True)), "do not support mixture-of-experts layers: use --target cpu"),
        (replace(quantised(mimo_spec(gate=True)), post_norms=True), "gates together with norms"),
        (replace(qwen_spec(), quant=QuantSpec()), r"float weights \(attention; give --bits\)"),
        (replace(qwen_spec(), quant=replace(INT4, head=None)), r"float weights \(head"),
    ],
)
def test_what_has_no_kernels_is_refused_in_one_line(spec, message):
    with pytest.raises(UnsupportedError, match=message) as e:
        lower(spec, Tuning())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["mimo-gated", "gemma", "qwen"])
@pytest.mark.parametrize("bits", [4, 8])
def test_device_weights_hold_every_weight(name, bits, tmp_path):
    q = TensorQuant(bits, 32)
    spec = replace(ALL[name], vocab_size=131, quant=QuantSpec(q, q, q, q))
    _, weights = write_weights(spec, tmp_path)
    tensors = read_tensors(tmp_path / "weights.safetensors")
    done = []
    write_device_weights(spec, tensors, tmp_path / "w.bin", tmp_path / "w.json", lambda *a: done.append(a))
    data, places = (tmp_path / "w.bin").read_bytes(), json.loads((tmp_path / "w.json").read_text())
    buffers = device_weights(spec)
    assert places.keys() == buffers.keys() and all(at % 256 == 0 for at, _ in places.values())
    assert sum(n for _, n in places.values()) == device_bytes(spec) == done[-1][0] <= len(data)
    for p in parameters(spec):
        if p.kind == "float":
            at, n = places[p.name]
            assert np.array_equal(np.frombuffer(data[at : at + n], "<f4").reshape(p.shape), weights.get(p.name).numpy())
        else:
            want = weights.get(p.name).numpy()
            assert np.array_equal(unpacked(data, places, p, q), want), p.name


def unpacked(data, places, p, q):
    """The matrix of a parameter, from its device tensors, lane by lane as layout.py says they lie."""
    parts = 2 if p.name.endswith("gate_up") else 1
    n, k = p.shape
    dtypes = {"i32": "<u4", "fp16": "<f2", "u8": "u1"}
    arrays = {}
    for part, (dtype, shape) in layout.shapes(n, k, q, parts).items():
        at, nbytes = places[f"{p.name}.{part}"]
        arrays[part] = np.frombuffer(data[at : at + nbytes], dtypes[dtype]).reshape(shape)
    out = np.empty(p.shape, np.float32)
    each = n // parts
    for row in range(n):
        part, r = divmod(row, each)
        tile, r = part * layout.tiles(each) + r // 32, r % 32
        words = arrays["q"][tile, :, :, r % 8, :, r // 8]  # chunk, word, quad
        scale, zero = (arrays[a][tile, :, r % 8, r // 8].astype(np.float32) for a in ("scales", "zeros"))
        if q.bits == 4:
            shifts = [4 * (i // 2) + 16 * (i % 2) for i in range(8)]
            levels = np.stack([words[:, 0] >> s & 15 for s in shifts], -1)  # chunk, quad, weight
        else:
            shifts = [8 * (i // 2) + 16 * (i % 2) for i in range(4)]
            levels = np.stack([words >> s & 255 for s in shifts], -1).transpose(0, 2, 1, 3)
        out[row] = (levels.reshape(-1, 32) - np.repeat(zero, k // len(zero) // 32)[:, None]).reshape(-1) * np.repeat(
            scale, k // len(scale)
        )
    return out


def test_random_weights_fill_every_buffer_with_finite_values(tmp_path):
    spec = quantised(mimo_spec(gate=True))
    _write(spec, tmp_path / "w.bin", tmp_path / "w.json", seed=1)
    data, places = (tmp_path / "w.bin").read_bytes(), json.loads((tmp_path / "w.json").read_text())
    for name, b in device_weights(spec).items():
        at, n = places[name]
        assert n == b.nbytes and at + n <= len(data) and any(data[at : at + n]), name
        if b.dtype in ("fp16", "fp32"):
            values = np.frombuffer(data[at : at + n], "<f2" if b.dtype == "fp16" else "<f4")
            assert np.isfinite(values).all() and (name.startswith("frequencies") or np.abs(values).max() < 8), name
        if name.endswith("zeros"):
            assert max(data[at : at + n]) <= 15
