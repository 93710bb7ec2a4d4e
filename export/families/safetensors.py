"""Headers of safetensors files: which tensors a Hugging Face folder holds and where.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, data
(https://github.com/huggingface/safetensors#format). Only headers are read here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError
from mimo_edge.export.families.fields import load_json
from mimo_edge.export.families.tensors import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's shards. Raises BadInputError naming the missing, extra or broken file."""
    tensors: dict[str, StoredTensor] = {}
    for shard, expected in _shards(folder).items():
        found = read_header(folder / shard)
        for name in expected:
            if name not in found:
                raise BadInputError(f"{folder / INDEX} places tensor {name} in {shard}, which does not hold it")
        twice = tensors.keys() & found.keys()
        if twice:
            raise BadInputError(
                f"tensor {min(twice)} is in two shards of {folder}: remove the one left from another model"
            )
        tensors |= found
    return tensors


def _shards(folder: Path) -> dict[str, list[str]]:
    """File name -> tensors that the index expects in it (none when there is no index)."""
    present = sorted(p.name for p in folder.glob("model*.safetensors"))
    if not (folder / INDEX).exists():
        if present == [SINGLE]:
            return {SINGLE: []}
        have = ", ".join(present) or ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights"
        raise BadInputError(f"{folder}: expected {SINGLE}, or shards with {INDEX}; found {have}")
    shards: dict[str, list[str]] = {}
    weight_map = load_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(f"{folder / INDEX}: no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BadInputError(f"{folder / INDEX}: weight_map of {name} is {shard!r}, not a file name")
        shards.setdefault(shard, []).append(name)
    for shard in shards:
        if not (folder / shard).is_file():
            raise BadInputError(f"shard {shard} is missing in {folder}: download the whole model")
    extra = [p for p in present if p not in shards]
    if extra:
        raise BadInputError(f"shard {extra[0]} in {folder} is not listed in {INDEX}: remove it or use the right index")
    return shards


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file. Raises BadInputError when the header is broken or the file shorter than it says."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise BadInputError(f"{path}: not a safetensors file, or cut off inside its header ({size} bytes)")
        try:
            header = json.loads(f.read(length))
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise BadInputError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    for t in tensors.values():
        if t.offset + t.nbytes > size:
            raise BadInputError(
                f"{path} is truncated: {t.name} ends at byte {t.offset + t.nbytes} of {size}; copy it again"
            )
    return tensors


def _tensor(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = (
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            map(int, entry["data_offsets"]),
        )
    except (TypeError, KeyError, ValueError):
        raise BadInputError(f"{path}: the header entry of {name} is broken: {str(entry)[:80]}") from None
    bits = _BITS.get(dtype)
    if begin < 0 or min(shape, default=0) < 0 or (bits and math.prod(shape) * bits != (end - begin) * 8):
        raise BadInputError(f"{path}: {name} is {dtype} {list(shape)} but has bytes [{begin}, {end})")
    return StoredTensor(name, path, dtype, shape, base + begin, end - begin)
