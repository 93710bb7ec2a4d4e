"""Bytes of tokens, and texts as tokens whose bytes are exactly the text."""

import random

import pytest
from fakes import EOS, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from mimo_edge.decoding.vocabulary import BYTE_OF, SPACE, Vocabulary
from mimo_edge.errors import UnsupportedError

PIECES = ["ab", "abc", "ing", f"{SPACE}the", f"{SPACE}", '{"', '":', "ü", "猫"]


def sentencepiece(prepend=False, normalizer=None):
    """A byte-fallback BPE; with `prepend` it puts a space in front of every text, as Llama 2 did."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    characters = sorted(set("".join(PIECES) + "abcdefghijklmnopqrstuvwxyz0123456789,:.[]{}\"'"))
    vocab |= {c: 256 + i for i, c in enumerate(characters)}
    merges = []
    for piece in PIECES:
        for n in range(2, len(piece) + 1):
            if piece[:n] not in vocab:
                vocab[piece[:n]] = len(vocab)
                merges.append((piece[: n - 1], piece[n - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    steps = [*([normalizer] if normalizer else []), *([normalizers.Prepend(SPACE)] if prepend else [])]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<plain tag>", special=False)])
    return tokenizer


def adapted(tokenizer, size=None):
    size = tokenizer.get_vocab_size() if size is None else size
    return Vocabulary(tokenizer, size, [size - 1])


def texts(seed):
    r = random.Random(seed)
    alphabet = 'abcing the {}":,.[]0123\n\t\\ü猫🦙\u0301e\x02\x7f'
    return ["", " ", "  a", "\x02", "\u0301"] + ["".join(r.choices(alphabet, k=r.randint(1, 40))) for _ in range(200)]


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(),
        sentencepiece(),
        sentencepiece(prepend=True),
        sentencepiece(normalizer=normalizers.NFC()),
        sentencepiece(prepend=True, normalizer=normalizers.Lowercase()),
    ],
    ids=["byte level", "byte fallback", "space in front", "NFC", "lower case"],
)
def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer):
    vocabulary = adapted(tokenizer)
    special = set(vocabulary.special_token_ids)
    for text in [*texts(1), "E\u0301 and É"]:
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()
        assert not special & set(ids)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), sentencepiece()], ids=["byte level", "byte fallback"])
def test_a_text_that_the_tokenizer_keeps_is_split_as_it_splits_it(tokenizer):
    for text in texts(2):
        assert adapted(tokenizer)(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), sentencepiece()], ids=["byte level", "byte fallback"])
def test_a_token_adds_its_bytes_to_the_decoded_text(tokenizer):
    vocabulary = adapted(tokenizer)
    start = tokenizer.encode("abc", add_special_tokens=False).ids
    for i, data in enumerate(vocabulary.tokens):
        added = tokenizer.decode([*start, i], skip_special_tokens=False)
        assert added == b"abc".decode() + data.decode(errors="replace"), i


def test_special_tokens_are_named_and_others_are_not():
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [7])
    end, tag = tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<plain tag>")
    assert vocabulary.special_token_ids == [7, end]
    assert vocabulary.tokens[tag] == b"<plain tag>"  # as it is, though its space is not written like others


@pytest.mark.parametrize("size", [200, 300, 1000])
def test_ids_beyond_the_models_are_left_out_and_unused_ones_are_empty(size):
    vocabulary = Vocabulary(byte_tokenizer(), size, [0])
    assert len(vocabulary.tokens) == size
    assert vocabulary.tokens[:200] == [bytes([b]) for b in range(200)]
    assert set(vocabulary.tokens[258:]) <= {b""}


def test_the_names_of_bytes_are_gpt2s():
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert (BYTE_OF["Ġ"], BYTE_OF["Ċ"], BYTE_OF["A"]) == (ord(" "), ord("\n"), ord("A"))


def test_a_decoder_that_names_no_bytes_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for decoder in (None, decoders.WordPiece()):
        if decoder:
            tokenizer.decoder = decoder
        with pytest.raises(UnsupportedError, match="does not say what bytes"):
            Vocabulary(tokenizer, 2, [EOS])
