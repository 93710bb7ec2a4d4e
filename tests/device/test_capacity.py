"""How much memory there is: what an integrated GPU shares, what a discrete one has, what a container may take."""

import pytest
from fake_machine import GB, FakeJetson
from fakes_cuda import FakeCuda

from mimo_edge.device import capacity, process
from mimo_edge.device.capacity import GpuMemory
from mimo_edge.device.modules import MODULES
from mimo_edge.device.system import System
from mimo_edge.errors import MimoEdgeError

KB, MB = 1 << 10, 1 << 20


def test_an_integrated_gpu_has_what_the_kernel_calls_available(tmp_path):
    fake = FakeJetson(tmp_path)
    fake.memory(6 * GB, free=300_000)  # nearly all of it page cache
    gpu = GpuMemory(87, True, free=300_000 * KB, total=8 << 30)
    for found in (capacity.of_machine(fake.machine.system, gpu), capacity.of_machine(fake.machine.system)):
        assert found.available == 6 * GB * KB and found.source == "MemAvailable" and not found.device_only
        assert found.usable == found.available - max(768 * MB, found.total // 10)


def test_a_discrete_gpu_has_what_its_driver_says(tmp_path):
    fake = FakeJetson(tmp_path)
    fake.memory(6 * GB)
    found = capacity.of_machine(fake.machine.system, GpuMemory(90, False, free=70 << 30, total=80 << 30))
    assert (found.available, found.total, found.usable) == (70 << 30, 80 << 30, 70 << 30)
    assert found.device_only and "cudaMemGetInfo" in found.source


@pytest.mark.parametrize("integrated", [True, False])
def test_the_driver_is_asked_whether_its_gpu_is_integrated(integrated):
    api = FakeCuda(integrated=integrated, memory=1 << 30)
    assert capacity.gpu_memory(api) == GpuMemory(87, integrated, 1 << 30, 1 << 30)
    assert capacity.gpu_memory(FakeCuda(devices=0)) is None


def test_a_control_group_s_limit_counts_when_it_is_tighter(tmp_path):
    fake = FakeJetson(tmp_path)
    fake.memory(6 * GB)
    fake.limit(4 << 30, used=1 << 30, cache=256 * MB)
    found = capacity.of_machine(fake.machine.system)
    assert (found.total, found.available) == (4 << 30, (3 << 30) + 256 * MB) and "robot.service" in found.source
    fake.memory(2 * GB)
    assert capacity.of_machine(fake.machine.system).available == 2 * GB * KB, "the machine has less than the limit"
    fake.limit(64 << 30)
    assert capacity.of_machine(fake.machine.system).source == "MemAvailable", "a limit above the machine is none"


def test_control_groups_of_version_1(tmp_path):
    fake = FakeJetson(tmp_path)
    fake.write("proc/self/cgroup", "5:cpu:/\n4:memory:/docker/x\n0::/\n")
    group = "sys/fs/cgroup/memory/docker/x"
    fake.write(f"{group}/memory.limit_in_bytes", str(1 << 30))
    fake.write(f"{group}/memory.usage_in_bytes", str(300 * MB))
    fake.write(f"{group}/memory.stat", "total_inactive_file 1048576\n")
    fake.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")  # none
    limit = fake.machine.system.cgroup_limit()
    assert limit and (limit.total, limit.free) == (1 << 30, (1 << 30) - 299 * MB)


def test_without_meminfo_nothing_is_guessed(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemFree: x kB\n")
    with pytest.raises(MimoEdgeError, match="does not say how much memory is available"):
        System(tmp_path).memory()


@pytest.mark.parametrize("m", MODULES.values(), ids=lambda m: m.name)
def test_a_module_keeps_a_reserve_and_the_system_s_share(m):
    found = capacity.of_module(m)
    assert 0.3 * m.memory < found.usable < 0.95 * m.memory


def test_the_process_offers_itself_when_memory_runs_out(tmp_path):
    score = tmp_path / "proc/self/oom_score_adj"
    score.parent.mkdir(parents=True)
    score.write_text("0\n")
    assert process.volunteer(tmp_path) and score.read_text() == "500"
    score.write_text("800\n")
    assert process.volunteer(tmp_path) and score.read_text() == "800\n", "a service may have set more"
    assert not process.volunteer(tmp_path / "none")
