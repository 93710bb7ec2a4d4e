"""Whole bundles of tiny random models that speak bytes (fakes.byte_tokenizer)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from tiny_weights import INT4, write_weights

from mimo_edge.backends.onnxruntime import FLOAT_MODEL, MODEL
from mimo_edge.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, BundleWriter
from mimo_edge.export.graph.cpu import emit_graphs
from mimo_edge.spec import ModelSpec


def write_bundle(out: Path, spec: ModelSpec, seed: int = 0, template: str | None = TEMPLATE) -> Bundle:
    """INT4 weights; float activations in both graphs, so that all backends agree to rounding."""
    spec = replace(spec, vocab_size=258, bos_id=BOS, eos_ids=(EOS,), quant=INT4)
    with BundleWriter(out) as writer:
        places, _ = write_weights(spec, writer.path("."), seed)
        for name in (MODEL, FLOAT_MODEL):
            for file, graph in emit_graphs(spec, places, name, accuracy_level=1):
                writer.path(file).write_bytes(graph.SerializeToString())
        writer.path(TOKENIZER).write_text(byte_tokenizer().to_str())
        if template is not None:
            writer.path(CHAT_TEMPLATE).write_text(template)
        return writer.finish(spec, "cpu", "tiny")
