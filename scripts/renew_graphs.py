"""Writes the CPU graphs of a bundle anew, as this version emits them; the weights of an older version stay as they are.

    python scripts/renew_graphs.py BUNDLE OUT

The new bundle has the same fingerprint, so caches made with the old one stay valid.
"""

from __future__ import annotations

import shutil
import sys

from mimo_edge.bundle import SPEC, WEIGHTS, Bundle, BundleWriter
from mimo_edge.export.pipeline import write_graphs
from mimo_edge.params import stored_tensors
from mimo_edge.tensors import lay_out


def main(source: str, out: str) -> None:
    bundle = Bundle.open(source)
    with BundleWriter(out) as writer:
        for name in bundle.manifest.files:
            if name != SPEC and not name.endswith(".onnx"):
                writer.path(name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(bundle.file(name), writer.path(name))
        header, places = lay_out(stored_tensors(bundle.spec))
        with writer.path(WEIGHTS).open("rb") as file:
            assert file.read(len(header)) == header, "the weights are laid out in another way: export the model again"
        write_graphs(writer, bundle.spec, places)
        new = writer.finish(bundle.spec, bundle.manifest.target, bundle.manifest.name)
    assert new.fingerprint == bundle.fingerprint
    for name, entry in new.manifest.files.items():
        was = bundle.manifest.files.get(name)
        print(f"{'new' if was is None else 'same' if was == entry else 'changed':8}{entry.bytes:12,}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
