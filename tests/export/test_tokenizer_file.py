"""Compact tokenizer files: the same tokens, merges as strings."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models

from mimo_edge.export.tokenizer_file import compact


def _tokenizer(pieces: list[str], merges: list[tuple[str, str]]) -> str:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab, merges)).to_str()


def test_tokens_are_the_same_and_merges_are_strings() -> None:
    pieces = ["a", "b", "c", "ä", "ab", "abc", "äc"]
    before = _tokenizer(pieces, [("a", "b"), ("ab", "c"), ("ä", "c")])
    after = compact(before)
    assert json.loads(after)["model"]["merges"] == ["a b", "ab c", "ä c"]
    for text in ("abc", "cab", "äcab", "bbb"):
        assert Tokenizer.from_str(after).encode(text).ids == Tokenizer.from_str(before).encode(text).ids
    assert compact(after) == after


def test_pieces_with_spaces_stay_pairs() -> None:
    before = _tokenizer([" ", "a", "b", " a", " ab"], [(" ", "a"), (" a", "b")])
    assert compact(before) == before


def test_other_models_are_left_alone() -> None:
    for text in ('{"model": {"type": "WordLevel", "vocab": {}}}', '{"model": {"merges": []}}', "{}"):
        assert compact(text) == text
