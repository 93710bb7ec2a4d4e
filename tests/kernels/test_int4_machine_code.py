"""What the decode kernels compile to: packed words go from memory to the matrix instruction without being exchanged."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import triton

from mimo_edge.kernels import aot
from mimo_edge.kernels.int4_linear import variants as int4
from mimo_edge.kernels.int4_linear.variants import Tuned, TunedMany
from mimo_edge.kernels.sparse_ffn import variants as sparse
from mimo_edge.spec import GateSpec, TensorQuant

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
X = {"x": "x", "w": "w"}
CUT = Tuned(1, 4, 4)


def launches(bits, group):
    q = TensorQuant(bits, group)
    names = ("x", "norm", "w1", "w2", "bias", "normed", "ranks", "keep", "gate_up", "down", "h", "listed", "y")
    _, kept, listed = sparse.decode_sparse(4, 8192, 8192, q, GateSpec(64, 64), eps=1e-6, **{n: n for n in names})
    return {
        "linear": int4.decode(4, 4096, 8192, q, y="y", tuned=CUT, **X)[0],
        "gate_up": int4.decode_gate_up(1, 4096, 8192, q, h="h", tuned=CUT, **X)[0],
        "head": int4.decode_head(1, 50000, 8192, q, y="y", best="b", best_index="i", tuned=Tuned(2, 2, 4), **X)[0],
        "gate_up_kept": kept,
        "down_listed": listed,
        "linear_many": int4.prefill(64, 4096, 8192, q, y="y", tuned=TunedMany(2, 64, 4, 3), **X)[0],
    }


CASES = [
    (name, 4, c)
    for name in ("linear", "gate_up", "head", "gate_up_kept", "down_listed", "linear_many")
    for c in (87, 90)
]
CASES += [("linear", 8, 87), ("down_listed", 8, 87)]


def loops(code):
    """Opcodes of each loop of a disassembly."""
    lines, labels, out = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*)", line):
            lines.append(found[1])
            target = re.search(r"\((\.L_\w+)\)", found[2])
            if found[1].startswith("BRA") and target and labels.get(target[1], len(lines)) < len(lines) - 1:
                out.append(lines[labels[target[1]] :])
    return out


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Disassembly by (kernel, bits, capability)."""
    out = {}
    for capability in (87, 90):
        folder = tmp_path_factory.mktemp(f"sm_{capability}")
        made = {4: launches(4, 128), 8: launches(8, 32)}
        wanted = {(name, bits): made[bits][name].variant for name, bits, c in CASES if c == capability}
        index = aot.compile_variants(wanted.values(), capability, folder)
        for (name, bits), variant in wanted.items():
            entry = index.kernels[variant.key]
            assert entry.spills == 0, (name, bits, capability)
            run = subprocess.run(
                [NVDISASM, "-c", folder / f"{variant.key}.cubin"], check=True, capture_output=True, text=True
            )
            out[name, bits, capability] = run.stdout
    return out


@pytest.mark.parametrize(("name", "bits", "capability"), CASES)
def test_weights_reach_the_matrix_instruction_unexchanged(code, name, bits, capability):
    found = [
        Counter(op.split(".")[0] for op in body) for body in loops(code[name, bits, capability]) if "HMMA" in str(body)
    ]
    assert found
    for ops in found:
        assert not ops["SHFL"] and not ops["STS"] and not ops["LDL"] and not ops["STL"], ops
    assert "LDGSTS.E.BYPASS.128" in code[name, bits, capability]
    assert "HGMMA" not in code[name, bits, capability]
    if bits == 4 and name != "linear_many":
        for ops in found:
            unpacking = sum(ops[o] for o in ("LOP3", "SHF", "PRMT", "HADD2", "HFMA2"))
            assert unpacking <= 13 * ops["HMMA"], ops  # 9 a word, a word a matrix instruction, and addresses
