"""The planner: what a model needs on a machine, whether it fits, and the most that would. It allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimo_edge import roofline
from mimo_edge.device import modules
from mimo_edge.device.capacity import Capacity
from mimo_edge.device.footprint import Item, Load, Subject, footprint, layout_of, megabytes, on_gpu
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.spec import ModelSpec

MAX_SESSIONS = 4096  # as Engine.open allows
# Measured peaks on a CPU were at most so far above their plans; a budget leaves the larger of both to spare.
SPREAD, SPREAD_BYTES = 0.03, 16_000_000
DEPTH = 2048  # committed tokens that predictions of speed are for, as in NVIDIA's own tables
_DEVICE_ITEMS = ("weights", "KV pages", "window rings", "workspace", "driver")  # of a discrete GPU's memory
# Bytes a second at which NVMe drives of Orin boards are read (4.5 GB in 1.3 to 2.5 s), and at which one core hashes.
NVME, HASHED = (1.8e9, 3.4e9), (0.5e9, 1.2e9)


@dataclass(frozen=True)
class Plan:
    """`limit` is what may be used: the usable memory, or the budget if that is less. The largest context is for the
    sessions asked for, the most sessions for the context asked for; 0 where not even one fits.

    `prediction` has no measurement of ours behind it; its keys say what it rests on.
    """

    model: str
    backend: str
    context: int
    sessions: int
    assumed: str | None
    items: tuple[Item, ...]
    total: int
    limit: int
    budget: int | None
    capacity: Capacity
    largest_context: int
    most_sessions: int
    prediction: dict[str, Any] | None

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def plan(
    subject: Subject,
    backend: str,
    capacity: Capacity,
    load: Load,
    budget: int | None = None,
    module: str | None = None,
) -> Plan:
    """Plans `load`. `module` names the one whose memory bandwidth speeds are predicted from; None predicts none.

    Raises BadInputError on a context or a number of sessions that the model or an engine cannot have.
    """
    spec = subject.spec
    for what, value, most in (("context", load.context, spec.max_context), ("sessions", load.sessions, MAX_SESSIONS)):
        if not 1 <= value <= most:
            raise BadInputError(f"{what} {value} is out of range (allowed: 1 to {most})")
    limit = capacity.usable if budget is None else min(capacity.usable, within(budget, backend))

    def total(wanted: Load) -> int:
        return need(footprint(subject, backend, wanted), capacity)

    page = layout_of(subject, backend, load).page_size
    pages = _most(-(-spec.max_context // page), lambda n: total(replace(load, context=_tokens(n, page, spec))) <= limit)
    asked = load.context if total(load) <= limit else 0  # which may end within a page
    return Plan(
        model=subject.name,
        backend=backend,
        context=load.context,
        sessions=load.sessions,
        assumed=subject.assumed,
        items=footprint(subject, backend, load),
        total=total(load),
        limit=limit,
        budget=budget,
        capacity=capacity,
        largest_context=max(_tokens(pages, page, spec), asked),
        most_sessions=_most(MAX_SESSIONS, lambda n: total(replace(load, sessions=n)) <= limit),
        prediction=predict(subject, module, load.context) if module and on_gpu(backend) else None,
    )


def within(budget: int, backend: str) -> int:
    """What a plan may come to so that the budget holds."""
    return budget if on_gpu(backend) else max(0, min(int(budget / (1 + SPREAD)), budget - SPREAD_BYTES))


def need(items: tuple[Item, ...], capacity: Capacity) -> int:
    """Bytes that count against a capacity: everything, or what lies in a discrete GPU's memory."""
    return sum(i.bytes for i in counted(items, capacity))


def counted(items: tuple[Item, ...], capacity: Capacity) -> tuple[Item, ...]:
    return tuple(i for i in items if not capacity.device_only or i.name in _DEVICE_ITEMS)


def predict(subject: Subject, module: str, context: int) -> dict[str, Any]:
    """Tokens a second behind min(context, DEPTH) tokens, and seconds to open the bundle from NVMe."""
    speed = roofline.predict(subject.spec, module, min(context, DEPTH))
    low, high = roofline.REACHED
    nbytes = subject.load_bytes or sum(i.bytes for i in footprint(subject, "cuda", Load(1)) if i.name == "weights")
    return speed | {
        "base_module": modules.module(module).base or module,
        "decode_from": f"bandwidth over bytes a token, times {low:.2f} to {high:.2f}: what other INT4 decoders were "
        "seen to reach on Orin; a model of less than about 1 GB is slower, as launches take their time too",
        "load_s": [nbytes / NVME[1] + nbytes / HASHED[1], nbytes / NVME[0] + nbytes / HASHED[0]],
        "load_from": f"{nbytes:,} bytes read from NVMe at 1.8 to 3.4 GB/s and hashed by one core at 0.5 to 1.2 GB/s",
    }


def check(plan: Plan) -> None:
    """Raises, in one line with every item and the largest context that fits, when a plan does not fit: BadInputError
    where the budget is too small, MimoEdgeError where the machine is."""
    if plan.fits:
        return
    c = plan.capacity
    items = ", ".join(f"{i.name} {megabytes(i.bytes)}" for i in counted(plan.items, c) if i.bytes)
    by_budget = plan.budget is not None and plan.limit < c.usable
    room = f"{c.name}, which has {megabytes(c.usable)} usable ({c.source}, less a reserve)"
    if by_budget:
        room = f"the budget of {megabytes(plan.budget or 0)}" + (
            "" if on_gpu(plan.backend) else " less what plans were off by"
        )
    error = BadInputError if by_budget else MimoEdgeError
    raise error(
        f"{plan.model} with {plan.sessions} x {plan.context:,} tokens needs {megabytes(plan.total)}, "
        f"{megabytes(plan.total - plan.limit)} more than {room}: {items}; {_advice(plan)}"
    )


def _advice(plan: Plan) -> str:
    """What would fit."""
    if plan.largest_context:
        return f"the largest context that fits is {plan.largest_context:,}: use --context {plan.largest_context}"
    if plan.sessions > 1 and plan.most_sessions:
        return f"no context fits so many sessions; {plan.most_sessions} of this context fit"
    return "no context fits: choose a smaller model, fewer bits a weight, or close other programs"


def _tokens(pages: int, page: int, spec: ModelSpec) -> int:
    return min(pages * page, spec.max_context)


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..most that fits, 0 if none does; what fits n fits less."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
