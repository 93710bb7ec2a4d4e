"""One kind of step while it is put together."""

from __future__ import annotations

from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels.launch import Buffer, DType, Launch, Program, Role
from mimo_edge.spec import MAX_DRAFTS, ModelSpec


class Step:
    """Launches and buffers of a step of `rows` rows of one sequence; `pages` and `rings` as in ProgramSet."""

    def __init__(self, spec: ModelSpec, tuning: Tuning, rows: int, pages: int, rings: dict[str, int]):
        self.spec, self.tuning, self.rows, self.pages, self.rings = spec, tuning, rows, pages, rings
        self.buffers: dict[str, Buffer] = {}
        self.commit: list[Launch] = []
        self._launches: list[Launch] = []

    @property
    def short(self) -> bool:
        """Whether keys and values are stored while the step runs, and decode kernels do the products."""
        return self.rows <= MAX_DRAFTS + 1

    def add(self, launches: Launch | tuple[Launch, ...]) -> None:
        self._launches += (launches,) if isinstance(launches, Launch) else launches

    def buffer(
        self, name: str, dtype: DType, shape: tuple[int, ...], role: Role = "scratch", fill: int | None = None
    ) -> str:
        """Asks for memory; of one name, the largest that any layer or step asks for is kept. Returns the name."""
        new = Buffer(dtype, shape, role, fill)
        if name not in self.buffers or new.nbytes > self.buffers[name].nbytes:
            self.buffers[name] = new
        return name

    def keep(self, buffers: dict[str, Buffer], suffix: str) -> dict[str, str]:
        """Asks for what an op says it needs; returns its names mapped to names with the suffix."""
        names = {name: f"{name}{suffix}" for name in buffers}
        for name, b in buffers.items():
            self.buffer(names[name], b.dtype, b.shape, b.role, b.fill)
        return names

    def program(self) -> Program:
        return Program(self.rows, tuple(self._launches), tuple(self.commit), self.buffers)
