"""What a path names, as something to plan for: a bundle, a checkpoint that was not exported yet, or a spec.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mimo_edge.backends.cuda_kernels import targets
from mimo_edge.bundle import MANIFEST, TOKENIZER, Bundle
from mimo_edge.device.footprint import Subject
from mimo_edge.errors import BadInputError
from mimo_edge.extras import needs_extra
from mimo_edge.kernels.index import PROGRAMS, folder
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.params import parameters
from mimo_edge.spec import MAX_DRAFTS, QuantSpec, TensorQuant, read_spec

HEAD_GRAPHS = tuple(f"model.cpu.mtp{m}.onnx" for m in range(MAX_DRAFTS))  # of the onnxruntime backend
KINDS = ("attention", "ffn", "embedding", "head")


def open_subject(path: Path, capability: int, bits: int | None = None, group: int | None = None) -> Subject:
    """`capability` of the GPU whose programs of a bundle are meant. `bits` and `group` as in `mimo-edge export`, for
    what is not quantised yet (4 bits in groups of 32 where they are not given).

    Raises BadInputError on a path that is none of the three, and on bits for a bundle, which has its own.
    """
    if (path / MANIFEST).is_file():
        if bits or group:
            raise BadInputError(f"{path} is a bundle, which is quantised already: leave --bits and --group-size out")
        return of_bundle(Bundle.open(path, verify=False), capability)
    if path.suffix == ".json" and path.is_file():
        return assume(Subject.of(read_spec(path), path.stem), QuantSpec(), bits, group)
    with needs_extra("export", "planning for a checkpoint"):
        from mimo_edge.export.families import open_checkpoint
    checkpoint = open_checkpoint(path)
    size = len(checkpoint.tokenizer_json.encode())
    model = replace(Subject.of(checkpoint.spec, checkpoint.name), tokenizer_bytes=size)
    return assume(model, checkpoint.packed, bits, group)


def of_bundle(bundle: Bundle, capability: int) -> Subject:
    """With the programs that the bundle has for GPUs of `capability`, if it has any."""
    files = bundle.manifest.files
    programs, code = None, 0
    if capability in targets(bundle):
        kernels = folder(f"sm_{capability}")
        path = bundle.file(f"{kernels}/{PROGRAMS}")
        programs = ProgramSet.loads(path.read_bytes(), str(path))
        code = sum(f.bytes for name, f in files.items() if name.startswith(kernels) and name.endswith(".cubin"))
    nbytes = sum(f.bytes for f in files.values())
    return Subject(
        bundle.manifest.name,
        bundle.spec,
        files[TOKENIZER].bytes,
        programs=programs,
        code_bytes=code,
        load_bytes=nbytes,
        heads=sum(name in files for name in HEAD_GRAPHS),
    )


def assume(subject: Subject, packed: QuantSpec, bits: int | None, group: int | None) -> Subject:
    """The quantisation that `mimo-edge export --bits --group-size` gives: the same for all kinds of tensors, but that a
    kind keeps the format in which the checkpoint has it (`packed`) unless bits or a group are asked for."""
    if subject.spec.quant != QuantSpec():
        return subject
    wanted = TensorQuant(bits or 4, group or 32)
    asked = bits is not None or group is not None
    spec, quant = subject.spec, {}
    for kind in KINDS:
        sizes = [
            p.shape[1] for p in parameters(spec) if p.kind == ("embedding" if kind == "head" and spec.tied else kind)
        ]
        format = wanted if asked else packed.of(kind) or wanted
        if wrong := [k for k in sizes if k % format.group]:
            raise BadInputError(
                f"groups of {format.group} do not divide {kind} rows of {wrong[0]}: use --group-size 32"
            )
        quant[kind] = format
    said = ", ".join(f"{kind} {q.bits} bits in groups of {q.group}" for kind, q in quant.items())
    if len(set(quant.values())) == 1:
        said = f"{wanted.bits} bits in groups of {wanted.group} throughout"
    return replace(subject, spec=replace(spec, quant=QuantSpec(**quant)), assumed=said)
