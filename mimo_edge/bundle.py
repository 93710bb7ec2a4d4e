"""The folder that is deployed: opened only when complete and unchanged, written whole or not at all.

    manifest.json  spec.json  tokenizer.json  [chat_template.jinja]  model.<form>.onnx  weights.safetensors  ...

The manifest names every other file with its size and SHA-256.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from mimo_edge.disk import sync
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.spec import ModelSpec, dumps, from_json
from mimo_edge.tensors import read_tensors

__all__ = ["LAYOUT_VERSION", "WEIGHTS", "Bundle", "BundleWriter", "FileEntry", "Manifest", "read_tensors"]

LAYOUT_VERSION = 1
MANIFEST, SPEC, TOKENIZER, CHAT_TEMPLATE = "manifest.json", "spec.json", "tokenizer.json", "chat_template.jinja"
WEIGHTS = "weights.safetensors"
BUILT_IN = Path(__file__).parent / "reference_model"  # shipped with the package; docs/reference_model.md
_NEEDED = (SPEC, TOKENIZER, WEIGHTS)
_MAKE_ONE = "make one with `mimo-edge export SRC --target cpu -o DIR`"
_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`fingerprint` identifies what the model computes: caches made with one bundle are valid for all of the same
    fingerprint. `checksum` covers the manifest itself."""

    layout: int
    name: str
    target: str
    fingerprint: str
    files: dict[str, FileEntry]
    checksum: str = ""


@dataclass(frozen=True)
class Bundle:
    path: Path
    spec: ModelSpec
    manifest: Manifest

    @staticmethod
    def open(path: str | Path, verify: bool = True) -> Bundle:
        """Raises BadInputError if anything is missing, of another size or changed, or if the layout is newer.

        Without `verify` the big files (weights, graphs) are checked by size alone.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        for name, entry in manifest.files.items():
            _check_file(path, name, entry, hashed=verify or name in (SPEC, TOKENIZER))
        missing = [name for name in _NEEDED if name not in manifest.files]
        if missing:
            raise BadInputError(f"{path}: the bundle lacks {', '.join(missing)}: export the model again")
        if manifest.fingerprint != _fingerprint(manifest.files):
            raise BadInputError(f"{path}: the fingerprint does not match the files: export the model again")
        spec = ModelSpec.from_json(_parse(path / SPEC, (path / SPEC).read_bytes()))
        return Bundle(path, spec, manifest)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def has(self, name: str) -> bool:
        return name in self.manifest.files

    def file(self, name: str) -> Path:
        """Raises BadInputError if the bundle has no such file."""
        if not self.has(name):
            raise BadInputError(f"{self.path}: the bundle has no {name} (it has: {', '.join(self.manifest.files)})")
        return self.path / name

    @property
    def chat_template(self) -> str | None:
        return self.file(CHAT_TEMPLATE).read_text(encoding="utf-8") if self.has(CHAT_TEMPLATE) else None


def head_graphs(model: str, spec: ModelSpec) -> list[str]:
    """Names of the graphs of MTP heads that belong to the graph `model`; older bundles have none."""
    return [f"{model.removesuffix('.onnx')}.mtp{m}.onnx" for m in range(spec.mtp.heads if spec.mtp else 0)]


class BundleWriter:
    """Builds a bundle in a hidden folder beside `out`, which appears under its name only when complete and on disk.

        with BundleWriter(out) as writer:
            writer.reserve(bytes)
            writer.path("model.cpu.onnx").write_bytes(...)
            bundle = writer.finish(spec, target="cpu", name="Gemma 3 270M")

    Whatever ends the block early (Ctrl-C too) removes the hidden folder. Raises BadInputError if `out` exists or its
    parent does not, MimoEdgeError if the disk is full.
    """

    def __init__(self, out: str | Path):
        self.out = Path(out)
        self._reserved = 0
        self._temp: Path | None = None
        self._check_out()

    def __enter__(self) -> BundleWriter:
        parent, prefix = self.out.absolute().parent, f".{self.out.name}."
        try:
            self._temp = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=parent))
        except OSError as e:
            raise BadInputError(f"cannot write to {parent}: {e.strerror}: choose another folder") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise self._disk_full() from error

    def reserve(self, needed: int) -> None:
        """Raises MimoEdgeError unless `needed` bytes are free; call it before the first byte is written."""
        self._reserved = needed
        if shutil.disk_usage(self.out.absolute().parent).free < needed:
            raise self._disk_full()

    def path(self, name: str) -> Path:
        """Where to write the file that the bundle will hold as `name`."""
        assert self._temp is not None, "use BundleWriter in a with statement"
        return self._temp / name

    def finish(self, spec: ModelSpec, target: str, name: str) -> Bundle:
        """Writes spec and manifest, flushes everything to disk, and moves the folder to its place."""
        self.path(SPEC).write_text(dumps(spec), encoding="utf-8")
        temp = self.path(".").resolve()
        names = sorted(p.relative_to(temp).as_posix() for p in temp.rglob("*") if p.is_file())
        files = {n: FileEntry((temp / n).stat().st_size, _sha256(temp / n)) for n in names}
        manifest = Manifest(LAYOUT_VERSION, name, target, _fingerprint(files), files)
        (temp / MANIFEST).write_text(_manifest_text(manifest), encoding="utf-8")
        for path in [*temp.rglob("*"), temp]:
            sync(path)
        umask = os.umask(0)
        os.umask(umask)
        temp.chmod(0o777 & ~umask)  # mkdtemp makes folders that only their owner may enter
        self._check_out()
        os.rename(temp, self.out)
        self._temp = None
        sync(self.out.absolute().parent)
        return Bundle.open(self.out, verify=False)

    def _check_out(self) -> None:
        if os.path.lexists(self.out):
            raise BadInputError(f"{self.out} exists: choose another name, or remove it first")
        if not self.out.absolute().parent.is_dir():
            parent = self.out.parent
            raise BadInputError(f"{parent} is not a folder: create it first (mkdir -p {parent})")

    def _disk_full(self) -> MimoEdgeError:
        parent = self.out.absolute().parent
        free = shutil.disk_usage(parent).free
        return MimoEdgeError(
            f"disk full: the bundle needs {self._reserved:,} bytes and {parent} has {free:,} free: "
            "free some space, or choose another folder"
        )


def _read_manifest(path: Path) -> Manifest:
    if not path.exists():
        raise BadInputError(f"{path} does not exist: a bundle is a folder, {_MAKE_ONE}")
    if not (path / MANIFEST).is_file():
        kind = "folder without manifest.json" if path.is_dir() else "file"
        raise BadInputError(f"{path} is a {kind}, not a bundle: a bundle is a folder, {_MAKE_ONE}")
    raw = _read(path / MANIFEST)
    data = _parse(path / MANIFEST, raw)
    layout = data.get("layout") if isinstance(data, dict) else None
    if isinstance(layout, int) and layout > LAYOUT_VERSION:
        raise BadInputError(f"{path}: bundle layout {layout}, this version reads {LAYOUT_VERSION}: upgrade mimo-edge")
    try:
        manifest = from_json(Manifest, data, f"{path / MANIFEST}")
    except BadInputError as e:
        raise BadInputError(f"{e}: {_MAKE_ONE}") from None
    if manifest.layout != LAYOUT_VERSION:
        raise BadInputError(f"{path}: bundle layout {layout}, this version reads {LAYOUT_VERSION}: export again")
    if raw != _manifest_text(manifest).encode():
        raise BadInputError(f"{path / MANIFEST} was changed: export the model again")
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise BadInputError(f"{path / MANIFEST}: file name {name!r} leads out of the bundle")
    return manifest


def _manifest_text(manifest: Manifest) -> str:
    """Canonical, so that any changed byte shows: the checksum covers the values, the comparison the spaces."""
    data: dict[str, Any] = dataclasses.asdict(manifest)
    del data["checksum"]
    data["checksum"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _fingerprint(files: dict[str, FileEntry]) -> str:
    parts = [f"layout {LAYOUT_VERSION}", *(f"{name} {files[name].sha256}" for name in _NEEDED)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _check_file(path: Path, name: str, entry: FileEntry, hashed: bool) -> None:
    file = path / name
    if not file.is_file():
        raise BadInputError(f"{path}: {name} is missing: copy the bundle again, or export the model again")
    size = file.stat().st_size
    if size != entry.bytes:
        raise BadInputError(f"{file}: {size} bytes instead of {entry.bytes}: copy or export the bundle again")
    if hashed and _sha256(file) != entry.sha256:
        raise BadInputError(f"{file} was changed (its SHA-256 differs): copy or export the bundle again")


def _sha256(path: Path) -> str:
    """hashlib.file_digest came with Python 3.11."""
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                digest.update(view[:n])
    except OSError as e:
        raise BadInputError(f"cannot read {path}: {e.strerror}") from None
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise BadInputError(f"cannot read {path}: {e.strerror}") from None


def _parse(path: Path, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as e:  # ValueError: also invalid UTF-8
        raise BadInputError(f"{path} is not JSON ({e}): copy or export the bundle again") from None
