"""Options of sub-commands that can keep a prefix cache, and conversations that go on another day."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mimo_edge.disk import open_file, sync
from mimo_edge.errors import BadInputError, MimoEdgeError

if TYPE_CHECKING:
    from mimo_edge.cache import CacheOptions
    from mimo_edge.text import Message

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):
    """Bytes, with K, M, G or T behind the number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)(?:i?B)?", str(value), re.IGNORECASE)
        if not found or not 1 <= float(found[1]) * UNITS[found[2].upper()] < 1 << 60:
            self.fail(f"{value!r} is not a size (allowed: 1 or more bytes, such as 500000000, 512M or 2G)", param, ctx)
        return int(float(found[1]) * UNITS[found[2].upper()])


class FolderName(click.Path):
    """A folder; the empty name, which pathlib takes for the current one, is a mistake (an unset variable)."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("'' is not a folder: name one, or `.` for the current folder", param, ctx)
        return super().convert(value, param, ctx)


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--cache-bytes and its kin, for cache_from."""
    size, folder = Size(), FolderName()
    memory = "Memory that keeps prompts for reuse  [default: none; 256M, or one context, with --cache-dir]"
    for option in (
        click.option("--cache-record", is_flag=True, help="Record requests there for `mimo-edge cache export-trace`."),
        click.option("--cache-disk-bytes", type=size, metavar="SIZE", help="Most bytes in that folder  [default: 4G]"),
        click.option("--cache-dir", type=folder, metavar="DIR", help="Folder in which the cache outlives the run."),
        click.option("--cache-bytes", type=size, metavar="SIZE", help=memory),
    ):
        command = option(command)
    return command


def cache_from(
    cache_bytes: int | None, cache_dir: Path | None, cache_disk_bytes: int | None, cache_record: bool
) -> CacheOptions | None:
    """The options as the engine takes them; None without a cache."""
    from mimo_edge.cache import CacheOptions

    if cache_dir is None and (cache_record or cache_disk_bytes is not None):
        raise click.UsageError("--cache-record and --cache-disk-bytes need --cache-dir DIR")
    if cache_bytes is None and cache_dir is None:
        return None
    disk = {} if cache_disk_bytes is None else {"disk_bytes": cache_disk_bytes}
    return CacheOptions(bytes=cache_bytes, folder=cache_dir, record=cache_record, **disk)


class Conversation:
    """Messages kept under a name in the cache folder. Raises BadInputError on a name or a file that cannot be right."""

    def __init__(self, folder: Path | None, name: str):
        if folder is None:
            raise click.UsageError("--session NAME needs --cache-dir DIR, where the conversation is kept")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name):
            raise BadInputError(f"session name {name!r} (allowed: up to 64 letters, digits, dots, - and _)")
        self._path = folder / "sessions" / f"{name}.json"

    def load(self) -> list[Message]:
        try:
            with open_file(self._path) as file:
                messages = json.load(file)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as e:
            raise BadInputError(f"cannot read {self._path} ({e}): remove it to start anew") from None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and set(m) == {"role", "content"} and all(isinstance(v, str) for v in m.values())
            for m in messages
        ):
            raise BadInputError(f"{self._path} does not hold a conversation: remove it to start anew")
        return messages

    def save(self, messages: list[Message]) -> None:
        """Raises MimoEdgeError."""
        temp = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False)
                file.flush()
                os.fsync(fd)
            os.replace(temp, self._path)
            for folder in self._path.parents[:2]:  # it may be new itself
                sync(folder)
        except OSError as e:
            temp.unlink(missing_ok=True)
            raise MimoEdgeError(f"the conversation was not kept in {self._path}: {e.strerror}") from None
