"""One function a statement that needs an Orin, or a few that belong together. Each says what it found, or why it could
not look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import Answer, mimo_edge
from machine import Monitor, Samples, facts, is_orin
from report import Finding, Status

from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.cuda_kernels import read_index
from mimo_edge.bundle import Bundle
from mimo_edge.device.system import System
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kernels.index import folder

CAPABILITY = 87
GPU_BACKENDS = ("cuda", "tensorrt")
CONTEXT, DEPTH = 4096, 2048  # tokens; predictions are for this depth
WORDS = 600  # of a prompt long enough for the largest step
TOLERANCE = 1.03  # of the plan
LARGE = 1e9  # bytes of weights from which predictions of speed hold
LACKING = (2, 3)  # exit codes: what was to be tested is not there, a library, a GPU, an engine or kernels


def everything(system: System, bundle: Path | None, build: bool) -> Iterator[Finding]:
    yield doctor(bundle)
    yield from selftest(bundle, ["onnxruntime"])
    missing = None if is_orin(system) else "this machine is not an Orin"
    missing = missing or (None if bundle is not None else "no --bundle was given")
    if missing or bundle is None:
        yield from (Finding(claim, "not checked", missing or "") for claim in CLAIMS)
        return
    yield from kernels(bundle)
    if build:
        yield from engines(bundle)
    yield from selftest(bundle, list(GPU_BACKENDS))
    yield from running(system, bundle)


DOCTOR = "doctor finds nothing wrong"
CUBINS = "every cubin for sm_87 loads in this driver"
PTX = "this driver compiles every PTX file for sm_87"
ENGINES = "TensorRT builds the engines within the plan"
GOLDEN = "selftest: the exporter's tokens, backend "
MEMORY = "a long prompt takes no more memory than the plan says, within 3 %"
LOAD = "loading takes as long as predicted"
SPEED = "tokens/s are as predicted"
SWAP = "a planned run swaps nothing out"
HEAT = "no throttling by heat or current"
GROUP = "whether a service's MemoryMax counts GPU memory"
RUNNING = (MEMORY, LOAD, SPEED, SWAP, HEAT, GROUP)
CLAIMS = (CUBINS, PTX, *(GOLDEN + b for b in GPU_BACKENDS), *RUNNING)


def doctor(bundle: Path | None) -> Finding:
    answer = mimo_edge("doctor", *_of(bundle), "--json")
    if "findings" not in answer.data:
        return Finding(DOCTOR, "not checked", answer.error)
    wrong = [f for f in answer.data["findings"] if f.get("level") == "wrong"]
    detail = "; ".join(f"{f['what']}: {f['fix']}" for f in wrong)
    return Finding(DOCTOR, _status(not wrong), detail or "nothing", answer.data)


def kernels(bundle: Path) -> Iterator[Finding]:
    """Loads every kernel of the bundle as machine code, then as PTX, which the driver compiles."""
    try:
        driver, index = Driver(), read_index(Bundle.open(bundle), CAPABILITY)
    except MimoEdgeError as e:
        yield from (Finding(claim, "not checked", str(e)) for claim in (CUBINS, PTX))
        return
    for claim, suffix in ((CUBINS, "cubin"), (PTX, "ptx")):
        failed, began = [], time.perf_counter()
        for key, entry in index.kernels.items():
            try:
                loaded = driver.load((bundle / folder(index.target) / f"{key}.{suffix}").read_bytes())
                driver.function(loaded, entry.entry, entry.shared)
                driver.unload(loaded)
            except (MimoEdgeError, OSError) as e:
                failed.append(f"{entry.kernel}: {e}")
        took = f"{len(index.kernels)} kernels in {time.perf_counter() - began:.1f} s, CUDA {driver.version}"
        detail = f"{took}; {'; '.join(failed[:3]) or 'all loaded'}"
        yield Finding(claim, _status(not failed), detail, {"failed": failed})
    driver.close()


def engines(bundle: Path) -> Iterator[Finding]:
    answer = mimo_edge("build", bundle)
    yield Finding(ENGINES, "not checked" if answer.code in LACKING else _status(answer.code == 0), answer.error)


def selftest(bundle: Path | None, backends: list[str]) -> Iterator[Finding]:
    for backend in backends:
        answer = mimo_edge("selftest", *_of(bundle), "--backend", backend, "--json")
        cases = answer.data.get("cases", [])
        right = sum(bool(c.get("passed")) for c in cases)
        detail = f"{right} of {len(cases)} cases" if cases else answer.error
        held = answer.code == 0 and answer.data.get("passed") is True
        lacking = answer.code in LACKING and not cases
        yield Finding(GOLDEN + backend, "not checked" if lacking else _status(held), detail, answer.data)


def running(system: System, bundle: Path) -> Iterator[Finding]:
    """A long prompt, then the benchmark, both on the GPU and watched."""
    context = min(CONTEXT, Bundle.open(bundle).spec.max_context)
    load = [bundle, "--backend", "cuda", "--context", context]
    named = ["--module", name] if (name := facts(system)["module"]) else []
    plan = mimo_edge("plan", *load, *named, "--json")
    prompt = " ".join(["word"] * WORDS)
    with Monitor(system) as run_samples:
        run = mimo_edge("run", *load, "--max-tokens", 64, "-p", prompt, "--json")
    with Monitor(system) as bench_samples:
        bench = mimo_edge("bench", *load, "--depth", min(DEPTH, context // 2))
    if run.code or bench.code:
        error = run.error if run.code else bench.error
        yield from (Finding(claim, "refuted", f"it does not run: {error}") for claim in RUNNING)
        return
    yield memory(plan, run, run_samples)
    yield from speed(plan, run, bench)
    yield swapping(run_samples, bench_samples)
    yield heat(bench_samples)
    yield control_group(run_samples)


def memory(plan: Answer, run: Answer, samples: Samples) -> Finding:
    """The plan against how far MemAvailable fell. Whatever else ran on the machine counts as well."""
    if "total" not in plan.data:
        return Finding(MEMORY, "not checked", plan.error)
    planned, taken = plan.data["total"], samples.taken
    detail = f"planned {planned / 1e6:,.0f} MB, taken {taken / 1e6:,.0f} MB, {taken / planned:.2f} of the plan"
    return Finding(MEMORY, _status(taken <= TOLERANCE * planned), detail, samples.to_json())


def speed(plan: Answer, run: Answer, bench: Answer) -> Iterator[Finding]:
    """Predictions are ranges; being quicker than predicted is no refutation."""
    predicted = dict(plan.data.get("prediction") or {})
    if plan.data.get("items", [{"bytes": 0}])[0]["bytes"] < LARGE:
        predicted.pop("decode_tok_s", None)  # launches, not bandwidth, decide: the plan says so itself
    measured = {
        LOAD: (run.data.get("timings", {}).get("load_s"), predicted.get("load_s"), "s"),
        SPEED: (bench.data.get("decode_1", {}).get("steps_per_s"), predicted.get("decode_tok_s"), "tokens/s"),
    }
    for claim, (value, expected, unit) in measured.items():
        if value is None:
            yield Finding(claim, "not checked", "it was not measured")
        elif expected is None:
            yield Finding(claim, "observed", f"{value:.2f} {unit}; nothing was predicted for it here", bench.data)
        else:
            low, high = expected
            held = value <= high if claim == LOAD else value >= low
            yield Finding(claim, _status(held), f"{value:.2f} {unit}, predicted {low:.2f} to {high:.2f}", bench.data)


def swapping(*samples: Samples) -> Finding:
    pages = [s.swapped[-1] - s.swapped[0] for s in samples if s.swapped]
    if not pages:
        return Finding(SWAP, "not checked", "/proc/vmstat does not count pages")
    return Finding(SWAP, _status(sum(pages) == 0), f"{sum(pages)} pages written to swap by the whole machine")


def heat(samples: Samples) -> Finding:
    if not samples.celsius:
        return Finding(HEAT, "not checked", "no thermal zone can be read")
    events = samples.over_current[-1] - samples.over_current[0]
    watts = f", {sum(samples.watts) / len(samples.watts):.1f} W taken in" if samples.watts else ""
    detail = f"at most {max(samples.celsius):.0f} degrees, {events} times over-current{watts}"
    return Finding(HEAT, _status(min(samples.margin) > 0 and events == 0), detail, samples.to_json())


def control_group(samples: Samples) -> Finding:
    if not samples.group or samples.taken <= 0:
        return Finding(GROUP, "not checked", "this control group's memory is not accounted")
    grown = max(samples.group) - samples.group[0]
    return Finding(GROUP, "observed", f"the group grew by {grown / 1e6:,.0f} MB of {samples.taken / 1e6:,.0f} MB taken")


def _of(bundle: Path | None) -> list[Any]:
    return [] if bundle is None else [bundle]


def _status(held: bool) -> Status:
    return "confirmed" if held else "refuted"
