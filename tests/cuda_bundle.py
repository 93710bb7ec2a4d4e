"""Tiny bundles with programs for a GPU, whose compiled code is the fake driver's; and a backend that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from fakes_cuda import FakeCuda, cubin_of, ptx_of
from tiny_weights import INT4, write_weights

from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, BundleWriter, read_tensors
from mimo_edge.export.programs import lower, write_device_weights, write_tensorrt
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels import index
from mimo_edge.kernels.index import KernelEntry, KernelIndex
from mimo_edge.kernels.launch import Variant
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.spec import ModelSpec

PREFILL = (16,)


def write_cuda_bundle(
    out: Path, spec: ModelSpec, capability: int = 87, seed: int = 0, tuning=None, vocab: int = 258, compile=None
) -> Bundle:
    """INT4 weights, programs for steps of 1, 4 and 16 rows, and an index as the compiler would write it. With another
    vocabulary than bytes and two more, it is for the backend alone."""
    spec = replace(spec, vocab_size=vocab, bos_id=BOS, eos_ids=(EOS,), quant=INT4)
    with BundleWriter(out) as writer:
        write_weights(spec, writer.path("."), seed)
        writer.path(TOKENIZER).write_text(byte_tokenizer().to_str())
        writer.path(CHAT_TEMPLATE).write_text(TEMPLATE)
        folder = writer.path(index.folder(f"sm_{capability}"))
        folder.mkdir(parents=True)
        tensors = read_tensors(writer.path("weights.safetensors"))
        write_device_weights(spec, tensors, writer.path(index.WEIGHTS), writer.path(index.WEIGHTS_INDEX))
        programs = lower(spec, tuning or Tuning(), PREFILL)
        compiled = (compile or fake_compile)(programs.variants().values(), capability, folder)
        (folder / index.INDEX).write_text(compiled.dumps())
        (folder / index.PROGRAMS).write_text(programs.dumps())
        write_tensorrt(folder, spec, tuning or Tuning(), PREFILL)
        return writer.finish(spec, f"sm_{capability}", "tiny")


def fake_compile(variants: Iterable[Variant], capability: int, out: Path, progress=None) -> KernelIndex:
    """Stands for aot.compile_variants."""
    entries = {}
    for v in variants:
        (out / f"{v.key}.cubin").write_bytes(cubin_of(v))
        (out / f"{v.key}.ptx").write_bytes(ptx_of(v))
        entries[v.key] = _entry(v)
    return KernelIndex(f"sm_{capability}", "3.6.0", "12.8", "8.7", 7, entries)


def _entry(v: Variant) -> KernelEntry:
    hashes = [hashlib.sha256(code).hexdigest() for code in (cubin_of(v), ptx_of(v))]
    overlap = v.constants.get("PDL", False)
    return KernelEntry(v.kernel, v.kernel.split(".")[1], v.types, 2, v.num_warps, 0, 32, 0, "0", *hashes, overlap)


def fake_cuda(bundle: Bundle, capability: int = 87, device: int | None = None, **options) -> FakeCuda:
    """A driver that can run the bundle's kernels for `capability`, on a GPU of capability `device`."""
    path = bundle.file(f"{index.folder(f'sm_{capability}')}/{index.PROGRAMS}")
    variants = ProgramSet.loads(path.read_bytes(), str(path)).variants()
    return FakeCuda(variants, capability=device or capability, **options)


def open_cuda(bundle: Bundle, **options) -> CudaBackend:
    return CudaBackend.open(bundle, api=fake_cuda(bundle, **options))
