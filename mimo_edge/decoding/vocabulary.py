"""The bytes of every token, and texts as tokens, the way llguidance asks for them (its TokenizerWrapper protocol).

llguidance can read a tokenizer.json itself, but that holds the tokenizer a second time: for 262k tokens 180 MB and 5 s
where this takes 50 MB and 1.5 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from mimo_edge.errors import UnsupportedError

SPACE = "\u2581"  # how SentencePiece writes a space
_MARK = "\x02"  # what texts begin with where a tokenizer puts a space in front of every text
_PRINTABLE = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]  # bytes that GPT-2's byte-level BPE writes as they are
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Vocabulary:
    """`tokens[i]` are the bytes that token i adds to a text; empty where the model has ids that no token uses.

    Raises UnsupportedError when the tokenizer's decoder does not say what bytes tokens stand for.
    """

    is_tokenizer_wrapper = True  # how llguidance tells
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        to_bytes = _rule(tokenizer)
        tokens = [b""] * size
        for name, i in tokenizer.get_vocab(with_added_tokens=True).items():
            if i < size:
                tokens[i] = added[i].content.encode() if i in added else to_bytes(name)
        self.tokens = tokens
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({*eos_ids, *(i for i, token in added.items() if token.special and i < size)})
        self._mark = self._encode(_MARK)

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly `text`: as the tokenizer splits it, where it keeps texts as they are."""
        data = text.encode()
        plain = self._encode(text)
        if self._spells(plain, data):
            return plain
        marked = self._encode(_MARK + text)
        if marked[: len(self._mark)] == self._mark and self._spells(rest := marked[len(self._mark) :], data):
            return rest
        return self._longest_first(data)  # a normaliser changes the text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        return all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == data

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            piece = next((p for n in range(self._longest, 0, -1) if (p := data[:n]) in self._ids), None)
            if piece is None:
                raise UnsupportedError(f"no token of this model begins {data[:16]!r}")
            ids.append(self._ids[piece])
            data = data[len(piece) :]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


def _rule(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """From a token's name to its bytes."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    raise UnsupportedError(
        f"this model's tokenizer (decoder {decoder.get('type')}) does not say what bytes its tokens stand for: "
        "leave the schema, regex or grammar out"
    )


def _byte_level(name: str) -> bytes:
    try:
        return bytes(BYTE_OF[c] for c in name)
    except KeyError:  # a character that stands for no byte stands for itself
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE, " ").encode()
