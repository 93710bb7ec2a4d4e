"""A fake model whose steps take the time that a test gives them."""

import threading
import time

from fakes import fake_engine


def slow_engine(seconds, **options):
    """An engine whose steps take so long."""
    engine = fake_engine(**options)
    run = engine.backend.run

    def slowly(steps):
        time.sleep(seconds)
        return run(steps)

    engine.backend.run = slowly
    return engine


class Gate:
    """Holds a backend's steps until it is opened: `entered` is set when one begins."""

    def __init__(self, engine):
        self.entered, self.opened = threading.Event(), threading.Event()
        run = engine.backend.run

        def gated(steps):
            self.entered.set()
            assert self.opened.wait(30)
            return run(steps)

        engine.backend.run = gated
