"""The Orin modules as data."""

import pytest

from mimo_edge import roofline
from mimo_edge.device.modules import CAPABILITY, GIB, MODULES, module
from mimo_edge.errors import BadInputError


def test_all_modules_and_their_super_modes_are_there():
    plain = {"orin-nano-4gb", "orin-nano-8gb", "orin-nx-8gb", "orin-nx-16gb", "agx-orin-32gb", "agx-orin-64gb"}
    raised = {f"{n}-super" for n in plain - {"agx-orin-64gb"}}  # which has no such mode
    assert set(MODULES) == plain | raised and CAPABILITY == 87
    assert all(MODULES[n].base == n.removesuffix("-super") for n in raised)


@pytest.mark.parametrize("m", MODULES.values(), ids=lambda m: m.name)
def test_figures_agree_with_each_other(m):
    assert m.name == module(m.name).name and m.sources
    assert 0.8 * m.nominal_gb < m.memory / GIB < m.nominal_gb
    # sparse INT8 operations of the matrix units are four times the dense float16 ones; NX and AGX add their DLAs
    gpu_tops = 4 * m.flops / 1e12
    assert m.tops is None or (gpu_tops <= 1.03 * m.tops and gpu_tops >= 0.45 * m.tops)
    if m.base:
        base = module(m.base)
        assert (m.memory, m.multiprocessors) == (base.memory, base.multiprocessors)
        assert m.bandwidth >= base.bandwidth and m.gpu_hz >= base.gpu_hz


def test_data_sheet_figures():
    nano, agx = module("orin-nano-8gb-super"), module("agx-orin-64gb")
    assert (nano.bandwidth, nano.tops, nano.multiprocessors) == (102e9, 67, 8)
    assert (agx.bandwidth, agx.tops, agx.multiprocessors) == (204.8e9, 275, 16)
    assert agx.flops == pytest.approx(42.5e12, rel=0.01) and nano.flops == pytest.approx(16.7e12, rel=0.01)
    assert {d.name: d.bandwidth for d in roofline.MODULES.values()} == {m.name: m.bandwidth for m in MODULES.values()}


def test_a_module_that_does_not_exist_names_those_that_do():
    with pytest.raises(BadInputError, match=r"unknown module 'nano' .known: orin-nano-4gb, .*agx-orin-64gb"):
        module("nano")
