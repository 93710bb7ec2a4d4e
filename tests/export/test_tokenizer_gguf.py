"""Tokenizers rebuilt from GGUF metadata: golden ids of the real Gemma, and references for each kind on random text."""

import itertools
import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.gguf_file import read_gguf
from mimo_edge.export.families.gguf_tokenizer import end_ids, tokenizer_json

# Ids that llama.cpp gives for the same file (special tokens parsed, no BOS).
GOLDEN = [
    ("Hello world", [9259, 1902]),
    ("The window is 512 tokens wide.", [818, 4771, 563, 236743, 236810, 236770, 236778, 21739, 5777, 236761]),
    ("  two leading, three   inside, two trailing  ", [138, 13498, 5830, 236764, 1806, 139, 49431, 236764, 1156, 45330,
                                                       138]),
    ("line one\nline two\n\n\n", [1257, 886, 107, 1257, 1156, 109]),
    ("\tif x:\n\t\treturn 1\n", [255968, 584, 1123, 236787, 107, 255969, 2060, 236743, 236770, 107]),
    ("def f(x):\n    return x**2  # square\n", [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778,
                                                138, 236865, 6281, 107]),
    ("你好，世界！", [144626, 236900, 12811, 237354]),  # noqa: RUF001
    ("日本語のテキスト", [94951, 236945, 95830]),
    ("Привет, мир", [116130, 236764, 58562]),
    ("naïve café, don\u2019t", [1789, 238527, 560, 33443, 236764, 1537, 236858, 236745]),
    ("\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467", [242398, 243874, 237243, 243767, 237243, 244814]),
    ("1234567890 3.14159", [236770, 236778, 236800, 236812, 236810, 236825, 236832, 236828, 236819, 236771, 236743,
                            236800, 236761, 236770, 236812, 236770, 236810, 236819]),
    ("<bos>hi<eos>", [2, 2202, 1]),
    ("< bos >", [236820, 25835, 1890]),
    ("<start_of_turn>user\nHi<end_of_turn>\n", [105, 2364, 107, 10979, 106, 107]),
    ("<table><tr></b>", [168, 173, 209]),
    ("\U0010ffff\x01", [482, 381, 429, 429, 249732]),  # four bytes, each a token of its own
    ("\u0378", [443, 422]),
    ("e\u0301 \xe9", [236744, 238288, 1559]),
    ("<0x41>", [236820, 236771, 236781, 236812, 236770, 236813]),  # text, not the byte
    (" " * 40, [167, 145]),
    ("\n" * 35, [137, 110]),
    ("\r\n", [251, 107]),
    ("", []),
]  # fmt: skip
WORDS = ["a", "the ", " ", "   ", "\n", "\n\n", "<", "don't", "WE'LL", "中文", "é", "e\u0301", "😀", "\t", "7",
         "1234567", "_", "\r\n", "。", "ß", "foo_bar", "x=1;", "<|end|>", "<tool>", "..."]  # fmt: skip


@pytest.fixture(scope="module")
def gemma(gemma_gguf):
    return Tokenizer.from_str(tokenizer_json(Fields(read_gguf(gemma_gguf).metadata, "gemma"), 262_144))


@pytest.mark.parametrize(("text", "ids"), GOLDEN, ids=range(len(GOLDEN)))
def test_gemma_golden(gemma, text, ids):
    assert gemma.encode(text, add_special_tokens=False).ids == ids
    assert gemma.encode(text).ids == [2, *ids]
    assert gemma.decode(ids, skip_special_tokens=False) == text


def test_gemma_specials_are_skipped_and_user_defined_tokens_are_not(gemma):
    assert gemma.decode([2, 105, 2364, 107, 168, 139, 106]) == "user\n<table>   "


def random_texts(seed: int, count: int = 150) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 25))) for _ in range(count)]


def byte_level_fields(pre: str, size: int = 600, **changes) -> Fields:
    """A byte-level vocabulary trained on random text, one control and one user-defined token behind it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(random_texts(1, 400), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    data = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", "<tool>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 4, 3],
        "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    return Fields(data | changes, "test")


def build(fields: Fields) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(fields, len(fields.data["tokenizer.ggml.tokens"])))


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "default"])
def test_byte_level_equals_transformers(pre):
    import transformers as tf

    fields = byte_level_fields(pre)
    ours = build(fields)
    vocab = {t: i for i, t in enumerate(fields.data["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in fields.data["tokenizer.ggml.merges"]]
    reference = tf.Qwen2Tokenizer if pre == "qwen2" else tf.GPT2Tokenizer
    theirs = reference(vocab, merges, unk_token="<|end|>", eos_token="<|end|>", bos_token="<|end|>")
    theirs.add_tokens(["<tool>", "<|im_end|>"])
    for text in random_texts(2):
        assert ours.encode(text).ids == theirs.encode(text), text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["We", "'LL", " see", "  ", " ", "1", "2", "3", "4", "5", ".\n\n", "(x", ")==", "y", "\t"]),
        ("llama-bpe", ["We", "'LL", " see", "  ", " ", "123", "45", ".\n\n", "(x", ")==", "y", "\t"]),
        ("gpt-2", ["We", "'", "LL", " see", "  ", " 12345", ".", "\n", "\n", "(", "x", ")==", "y", "\t"]),
    ],
)
def test_how_text_is_split(pre, pieces):
    """Digits one by one, by three, or together; punctuation keeps line ends; contractions in either case."""
    text = "We'LL see   12345.\n\n(x)==y\t"
    split = build(byte_level_fields(pre)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in split] == pieces


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2"])
def test_byte_level_round_trip_and_bos(pre):
    fields = byte_level_fields(pre)
    tokenizer = build(fields)
    for text in random_texts(3):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        want = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == want
        bos = [fields.data["tokenizer.ggml.bos_token_id"]] if pre == "llama-bpe" else []
        assert tokenizer.encode(text).ids == bos + ids
    forced = build(byte_level_fields(pre, **{"tokenizer.ggml.add_bos_token": pre != "llama-bpe"}))
    assert len(forced.encode("a").ids) == (1 if pre == "llama-bpe" else 2)


def test_llama_3_takes_whole_words_that_no_merge_makes():
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        fields = byte_level_fields(pre)
        fields.data["tokenizer.ggml.tokens"][-1] = "zqzqzq"
        fields.data["tokenizer.ggml.token_type"][-1] = 1
        tokens = build(fields).encode("zqzqzq", add_special_tokens=False).tokens
        assert (tokens == ["zqzqzq"]) == whole and "".join(tokens) == "zqzqzq"


def sentencepiece_fields(prefix: bool, byte_tokens: bool = True, **changes) -> Fields:
    rng = random.Random(5)
    letters = list(dict.fromkeys(c for w in WORDS for c in w.replace(" ", "\u2581") if c not in "😀ß"))
    pieces = list(letters)
    while len(pieces) < 260:  # merges of merges
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) < 9:
            pieces.append(piece)
    rng.shuffle(pieces)
    raw = [f"<0x{b:02X}>" for b in range(256)] if byte_tokens else []
    tokens = ["<unk>", "<s>", "</s>", *raw, *pieces, "<tool>", "<|end|>"]
    data = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * len(raw), *[1] * len(pieces), 4, 3],
        "tokenizer.ggml.scores": [0.0] * (3 + len(raw)) + [-float(i) for i in range(len(pieces))] + [0.0, 0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return Fields(data | changes, "test")


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: join the neighbours whose piece has the best score, leftmost first, until none is left."""
    symbols = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def sentencepiece_reference(text: str, fields: Fields) -> list[int]:
    """Ids by the definition: added tokens first, then a visible space before and for each space, merges, bytes."""
    tokens = fields.data["tokenizer.ggml.tokens"]
    ids, kinds = {t: i for i, t in enumerate(tokens)}, fields.data["tokenizer.ggml.token_type"]
    scores = {t: s for t, s, k in zip(tokens, fields.data["tokenizer.ggml.scores"], kinds, strict=True) if k == 1}
    out = []
    while text:
        cuts = [(text.find(t), t) for t in ("<tool>", "<|end|>") if t in text]
        at, added = min(cuts, default=(len(text), ""))
        plain, text = text[:at], text[at + len(added) :]
        if plain:
            plain = plain.replace(" ", "\u2581")
            for piece in merge_by_score("\u2581" * fields.data["tokenizer.ggml.add_space_prefix"] + plain, scores):
                out += [ids[piece]] if piece in scores else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
        out += [ids[added]] if added else []
    return out


@pytest.mark.parametrize("prefix", [True, False], ids=["space-prefix", "no-prefix"])
def test_sentencepiece_equals_its_definition(prefix):
    fields = sentencepiece_fields(prefix)
    tokenizer = build(fields)
    for text in random_texts(4):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_reference(text, fields), text
        assert tokenizer.encode(text).ids == [1, *ids]
        if not prefix or ("<tool>" not in text and "<|end|>" not in text):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_without_byte_tokens_the_unknown_token_stands_for_a_run():
    tokenizer = build(sentencepiece_fields(False, byte_tokens=False))
    assert tokenizer.encode("a😀ßa", add_special_tokens=False).tokens == ["a", "<unk>", "a"]


def test_ends_of_a_reply():
    fields = byte_level_fields("qwen2")
    tokens = fields.data["tokenizer.ggml.tokens"]
    assert end_ids(fields) == (tokens.index("<|end|>"), tokens.index("<|im_end|>"))
    eot = Fields(fields.data | {"tokenizer.ggml.eot_token_id": 7}, "test")
    assert end_ids(eot) == (tokens.index("<|end|>"), 7, tokens.index("<|im_end|>"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedError, "tokenizer.ggml.model 't5'"),
        ({"tokenizer.ggml.model": None}, BadInputError, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "jina-v2"}, UnsupportedError, "'jina-v2' is not supported (supported: default, gpt-2"),
        ({"tokenizer.ggml.add_eos_token": True}, UnsupportedError, "add_eos_token"),
        ({"tokenizer.ggml.tokens": []}, BadInputError, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, BadInputError, "token 'a' has 2 ids"),
        ({"tokenizer.ggml.token_type": [1]}, BadInputError, "tokenizer.ggml.token_type has 1 entries"),
        ({"tokenizer.ggml.merges": None}, BadInputError, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q zz"]}, BadInputError, "makes 'zz', which is no token"),
        ({"tokenizer.ggml.bos_token_id": 9999, "tokenizer.ggml.add_bos_token": True}, BadInputError, "9999 is outside"),
    ],
)
def test_refusals(changes, error, words):
    fields = byte_level_fields("qwen2", **changes)
    with pytest.raises(error) as raised:
        tokenizer_json(fields, 10_000)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_sentencepiece_refusals():
    with pytest.raises(BadInputError, match="scores has 2 entries"):
        tokenizer_json(sentencepiece_fields(True, **{"tokenizer.ggml.scores": [0.0, 1.0]}), 10_000)
    with pytest.raises(BadInputError, match="unknown_token_id 9999 is outside"):
        tokenizer_json(sentencepiece_fields(True, **{"tokenizer.ggml.unknown_token_id": 9999}), 10_000)
    with pytest.raises(BadInputError, match="tokens but the embedding has 5 rows"):
        tokenizer_json(sentencepiece_fields(True), 5)
