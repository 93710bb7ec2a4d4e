"""Time and memory of loading a bundle, watched from outside the process that loads it.

    python scripts/bench_load.py BUNDLE [--context N] [--repeat N]

A child process imports the libraries, waits, loads, waits, and generates; meanwhile this process reads the child's
/proc/PID/status. Three kinds of children load the whole engine, the backend alone (weights and KV), and the tokenizer
alone. Peaks are compared with the bytes of weights plus KV, as they are and without what interpreter and libraries took
before the load. Files are in the page cache: the first, uncounted child puts them there. Reports nothing unless the
loaded engine's greedy tokens are the reference backend's. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import EngineModel, check, load_average, median, our_bytes, prose, report

from mimo_edge.backends import registry
from mimo_edge.bundle import TOKENIZER, Bundle
from mimo_edge.engine import Engine
from mimo_edge.kv.layout import plan_layout
from mimo_edge.text import Text

NEW_TOKENS = 32
PAUSE_S = 0.001  # between two looks at the child
KINDS = "engine", "backend", "tokenizer"


def child(kind: str, path: Path, context: int) -> None:
    """Behind each phase it says a line of JSON and waits for the parent's line."""
    import onnxruntime  # noqa: F401  (importing belongs to the start, not to the load)

    _say({})
    began = time.perf_counter()
    if kind == "engine":
        loaded: Any = Engine.open(path, "onnxruntime", max_context=context)
    elif kind == "tokenizer":
        bundle = Bundle.open(path)
        loaded = Text.open(bundle.file(TOKENIZER), bundle.spec)
    else:
        bundle = Bundle.open(path)
        loaded = registry.load("onnxruntime", bundle)
        loaded.allocate(plan_layout(bundle.spec, context))
    _say({"load_s": time.perf_counter() - began})
    if kind == "engine":
        tokens = loaded.text.encode(prose())
        reply = loaded.generate(tokens[: context - NEW_TOKENS], max_tokens=NEW_TOKENS)
        _say({"generated": len("".join(reply))})
        _say({"equal": check(path, {"ours": EngineModel(loaded, context)}, tokens)["ours"]})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


class Child:
    """A child process, and the highest memory seen in each of its phases, in bytes."""

    def __init__(self, kind: str, path: Path, context: int):
        command = [sys.executable, __file__, str(path), "--context", str(context), "--child", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._listen()
        self.start = {"resident": self._status("VmHWM"), "anonymous": self._status("RssAnon")}

    def next(self) -> dict[str, Any]:
        """Lets the next phase run to its end: what the child said, and the peaks `resident` and `anonymous`."""
        assert self._process.stdin
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # VmHWM starts again from now
        with self._watch() as seen:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            said = self._listen()
        return said | {"resident": self._status("VmHWM"), "anonymous": max(seen)}

    @contextmanager
    def _watch(self) -> Iterator[list[int]]:
        seen, stop = [0], threading.Event()

        def look() -> None:
            while not stop.wait(PAUSE_S):
                seen.append(self._status("RssAnon"))  # the kernel keeps no record of its peak

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(self._process.wait() or "the child ended early")
        return json.loads(line)

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(kind: str, path: Path, context: int, repeat: int) -> dict[str, Any]:
    """The worst peaks, and the median time, of `repeat` children."""
    phases: dict[str, list[dict[str, Any]]] = {"load": [], "run": []}
    for _ in range(repeat):
        process = Child(kind, path, context)
        phases["load"].append(process.next())
        if kind == "engine":
            phases["run"].append(process.next())
        process.end()
    found: dict[str, Any] = {"start": process.start, "load_s": median([p["load_s"] for p in phases["load"]])}
    for phase, results in phases.items():
        if results:
            found[phase] = {what: max(r[what] for r in results) for what in ("resident", "anonymous")}
    return found


def show(kind: str, found: dict[str, Any], floor: int) -> None:
    print(f"{kind}: loads in {found['load_s']:.2f} s")
    for phase in ("load", "run"):
        for what, peak in list(found.get(phase, {}).items()):
            ratio, net = peak / floor, (peak - found["start"][what]) / floor
            found[phase] |= {f"{what}_ratio": ratio, f"{what}_net_ratio": net}
            print(
                f"  {phase:4} {what:9} peak {peak / 1e6:8.1f} MB, {ratio:.2f} of weights + KV, {net:.2f} without start"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens that the KV cache is made for and filled with"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.bundle, args.context)
    noise, spec = load_average(), Bundle.open(args.bundle).spec
    layout = plan_layout(spec, args.context)
    weights, kv = our_bytes(spec)[0], layout.full_bytes + layout.window_bytes
    print(f"floor: weights {weights / 1e6:.1f} MB + KV {kv / 1e6:.1f} MB = {(weights + kv) / 1e6:.1f} MB")
    first = Child("engine", args.bundle, args.context)
    equal = [first.next() for _ in range(3)][-1]["equal"]  # after load and reply
    first.end()
    print(f"greedy tokens equal to the reference backend's: {equal}")
    start = first.start
    print(f"start (interpreter, libraries): {start['resident'] / 1e6:.1f} MB, anonymous {start['anonymous'] / 1e6:.1f}")
    results = {kind: measure(kind, args.bundle, args.context, args.repeat) for kind in KINDS}
    for kind, found in results.items():
        show(kind, found, weights + kv)
    report(results | {"weights": weights, "kv": kv, "context": args.context, "equal": equal, "load_average": noise})


if __name__ == "__main__":
    main()
