"""Replies for asyncio: a thread of its own generates one, the event loop is never blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from mimo_edge.errors import MimoEdgeError
from mimo_edge.generation import Generation
from mimo_edge.request import Result

_END = None


class AsyncGeneration(AsyncIterator[str]):
    """Iterate to get the reply's text in pieces; `result` follows. It begins with the first piece that is asked for and
    then runs ahead of whoever iterates.

    Cancelling the task that waits for a piece ends the reply within one step, and so do `cancel`, leaving
    `async with`, and dropping the object.
    """

    def __init__(self, start: Callable[[], Generation]):
        self._reply = _Reply(start)
        self._pieces: asyncio.Queue[str | BaseException | None] | None = None

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> str:
        if self._pieces is None:
            self._pieces = asyncio.Queue()
            self._reply.run(asyncio.get_running_loop(), self._pieces)
        try:
            piece = await self._pieces.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(piece, str):
            return piece
        self._pieces.put_nowait(_END)  # whoever asks again
        if isinstance(piece, BaseException):
            raise piece
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the reply before its next step, with reason "cancelled"; from any thread, without waiting."""
        self._reply.cancel()

    async def aclose(self) -> None:
        """Ends the reply, unless it has ended, and waits until it has given its room back: a step at most."""
        self.cancel()
        if self._pieces is not None:
            while await self._pieces.get() is not _END:
                pass
            self._pieces.put_nowait(_END)

    @property
    def result(self) -> Result:
        """The finished reply. Raises MimoEdgeError while it is not finished, or if it never began."""
        if self._reply.generation is None:
            raise MimoEdgeError("the reply has not begun: iterate over it")
        return self._reply.generation.result

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_reply"):
            self.cancel()


class _Reply:
    """What the thread knows; not the AsyncGeneration, so that dropping that ends the reply."""

    def __init__(self, start: Callable[[], Generation]):
        self.generation: Generation | None = None
        self._start, self._lock, self._cancelled = start, threading.RLock(), False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self.generation is not None:
                self.generation.cancel()

    def run(self, loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue) -> None:
        def put(item: str | BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, item)
            except RuntimeError:  # the loop is closed: nobody listens
                self.cancel()

        def work() -> None:
            try:
                generation = self._start()
                with self._lock:
                    self.generation = generation
                    if self._cancelled:
                        generation.cancel()
                for piece in generation:
                    put(piece)
            except BaseException as e:
                put(e)
            put(_END)

        threading.Thread(target=work, name="mimo-edge reply", daemon=True).start()
