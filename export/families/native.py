"""Native folders: spec.json beside safetensors under the canonical names of mimo_edge/params.py.

What scripts/reference_model writes; nothing is renamed, split or converted.
"""

from __future__ import annotations

from pathlib import Path

from mimo_edge.errors import BadInputError
from mimo_edge.export.families.checkpoint import Checkpoint
from mimo_edge.export.families.fields import load_json
from mimo_edge.export.families.hf import read_chat_template, read_tokenizer
from mimo_edge.export.families.layout import LayoutSource, Piece, check_layout
from mimo_edge.export.families.safetensors import open_folder
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec

SPEC = "spec.json"


def open_native(folder: Path) -> Checkpoint:
    """Opens the folder by its headers. Raises BadInputError when something is missing, broken or does not fit the spec,
    and UnsupportedError for a dtype that cannot be read or a tensor that the spec has no place for."""
    spec = ModelSpec.from_json(load_json(folder / SPEC))
    if spec.quant != QuantSpec():
        raise BadInputError(f"{folder / SPEC}: quant must be empty in a checkpoint (quantised weights live in bundles)")
    tensors = open_folder(folder)
    layout = {p.name: (Piece(p.name, p.shape, p.shape[0]),) for p in parameters(spec)}
    check_layout(spec, tensors, layout, "", None)
    return Checkpoint(
        spec=spec,
        source=LayoutSource(spec, tensors, layout),
        tokenizer_json=read_tokenizer(folder, spec, ()),
        chat_template=read_chat_template(folder),
        name=folder.resolve().name,
    )
