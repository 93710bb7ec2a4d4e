"""Hugging Face folders: config.json, safetensors, tokenizer.json, generation config and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import gemma3, llama, mimo_7b, mimo_v2, qwen
from mimo_edge.export.families.checkpoint import Checkpoint
from mimo_edge.export.families.decoder import Family, with_ids
from mimo_edge.export.families.fields import Fields, load_json
from mimo_edge.export.families.layout import LayoutSource, check_layout
from mimo_edge.export.families.packed_checkpoint import packed_formats, with_packed, without_zero_biases
from mimo_edge.export.families.safetensors import open_folder
from mimo_edge.spec import ModelSpec

FAMILIES: Mapping[str, Family] = {
    t: m.FAMILY for m in (mimo_v2, mimo_7b, gemma3, qwen, llama) for t in m.FAMILY.model_types
}


def open_hf(folder: Path) -> Checkpoint:
    """Opens a folder as saved by save_pretrained or downloaded from the hub; reads headers, and of weights that are
    already quantised the scales and zeros.

    Raises BadInputError when something is missing, broken or contradictory, UnsupportedError for a family, field or
    dtype that this version cannot represent.
    """
    config = Fields(load_json(folder / "config.json"), str(folder / "config.json"))
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(
            f"{config.where}: unknown model_type {model_type!r} (known: {', '.join(sorted(FAMILIES))})"
        )
    tensors = with_packed(config, open_folder(folder))
    spec = _with_ids(family.spec(config, tensors.keys()), folder, config)
    layout = family.layout(spec, config, tensors.keys())
    tensors = without_zero_biases(tensors, layout)
    check_layout(spec, tensors, layout, family.layer_prefix(tensors.keys()), _quantisation(config))
    return Checkpoint(
        spec=spec,
        source=LayoutSource(spec, tensors, layout),
        tokenizer_json=read_tokenizer(folder, spec, family.stray_tokens),
        chat_template=read_chat_template(folder),
        name=folder.resolve().name,
        packed=packed_formats(spec, tensors, layout),
    )


def _quantisation(config: Fields) -> str | None:
    fields = config.sub("quantization_config")
    return f"quantization_config.quant_method {fields.data.get('quant_method')!r}" if fields else None


def _with_ids(spec: ModelSpec, folder: Path, config: Fields) -> ModelSpec:
    """generation_config.json decides where it has an id, as in transformers' generate."""
    path = folder / "generation_config.json"
    places = [config] + ([text] if (text := config.sub("text_config")) else [])
    if path.exists():
        places.insert(0, Fields(load_json(path), str(path)))
    ids = {n: next((p.ids(n) for p in places if p.has(n)), ()) for n in ("bos_token_id", "eos_token_id")}
    return with_ids(spec, ids["bos_token_id"], ids["eos_token_id"], str(folder))


def read_tokenizer(folder: Path, spec: ModelSpec, stray: tuple[str, ...]) -> str:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise BadInputError(
            f"tokenizer.json is missing in {folder}: write it with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    vocab = _vocabulary(text, path)
    beyond = {t for t, i in vocab.items() if i >= spec.vocab_size}
    if beyond and beyond <= set(stray):
        data = load_json(path)
        data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in beyond]
        return json.dumps(data, ensure_ascii=False)
    if beyond:
        token = max(beyond, key=vocab.__getitem__)
        raise BadInputError(
            f"{path} gives {token!r} the id {vocab[token]} but the model's vocabulary has {spec.vocab_size} entries: "
            "use the tokenizer that belongs to this model"
        )
    return text


def _vocabulary(text: str, path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as e:  # the library raises bare Exception
        raise BadInputError(f"{path}: not a usable tokenizer ({e})") from None


def read_chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (a text, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).exists():
            value = load_json(folder / name).get("chat_template")
            if value is not None:
                return _named_template(value, folder / name)
    return None


def _named_template(value: Any, path: Path) -> str:
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if value is None:
            raise BadInputError(f"{path}: chat_template has {sorted(map(str, named))} but none is named 'default'")
    if not isinstance(value, str):
        raise BadInputError(f"{path}: chat_template is not a text")
    return value
