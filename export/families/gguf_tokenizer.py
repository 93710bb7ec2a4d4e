"""The tokenizer in a GGUF file as a tokenizers tokenizer.json.

Two models: "llama", SentencePiece BPE with scores and byte fallback, and "gpt2", byte-level BPE with merges. Control
and user-defined tokens become added tokens, which are matched before anything else, as llama.cpp does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # llama.h, llama_token_type
SPACE = "\u2581"  # SentencePiece's visible space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS = {  # by tokenizer.ggml.pre; "default" is what old converters wrote for GPT-2
    "gpt-2": _GPT2,
    "default": _GPT2,
    "llama-bpe": _CONTRACTIONS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|\p{N}" + _REST,
}
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")


def tokenizer_json(fields: Fields, vocab_size: int) -> str:
    """Builds tokenizer.json from the keys under tokenizer.ggml.

    Decoding gives the text back, except that U+2581 comes back as a space (SentencePiece's own ambiguity), that Qwen
    text comes back in NFC, and that files with add_space_prefix gain a space behind added tokens.
    Raises UnsupportedError for another model or pre-tokenizer, BadInputError when lists are missing, contradictory or
    longer than the embedding.
    """
    model = fields.text("tokenizer.ggml.model")
    tokens = _tokens(fields, vocab_size)
    types = fields.items("tokenizer.ggml.token_type", len(tokens)) if fields.has("tokenizer.ggml.token_type") else None
    if fields.flag("tokenizer.ggml.add_eos_token", False):
        raise UnsupportedError(
            f"{fields.where}: tokenizer.ggml.add_eos_token true is not supported (prompts must stay open)"
        )
    if model == "llama":
        tokenizer = _sentencepiece(fields, tokens, types or [NORMAL] * len(tokens))
        add_bos = True
    elif model == "gpt2":
        tokenizer = _byte_level(fields, tokens)
        add_bos = fields.data.get("tokenizer.ggml.pre") == "llama-bpe"
    else:
        raise UnsupportedError(
            f"{fields.where}: tokenizer.ggml.model {model!r} is not supported (supported: llama, gpt2)"
        )
    _add_tokens(tokenizer, tokens, types)
    if fields.flag("tokenizer.ggml.add_bos_token", add_bos):
        _add_bos(tokenizer, tokens, fields)
    return tokenizer.to_str()


def end_ids(fields: Fields) -> tuple[int, ...]:
    """Ids that end a reply: eos, eot, eom, and control tokens that are known ends of a turn (as llama.cpp finds them:
    files of chat models often name only the end of text)."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [i for n in names for i in fields.ids(f"tokenizer.ggml.{n}")]
    types = fields.data.get("tokenizer.ggml.token_type") or []
    tokens = fields.data.get("tokenizer.ggml.tokens") or []
    ids += [i for i, (t, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and t in _TURN_ENDS]
    return tuple(dict.fromkeys(ids))


def _tokens(fields: Fields, vocab_size: int) -> list[str]:
    tokens = fields.data.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise BadInputError(f"{fields.where}: no tokenizer.ggml.tokens; convert the model again, with its tokenizer")
    if len(tokens) > vocab_size:
        raise BadInputError(f"{fields.where}: {len(tokens)} tokens but the embedding has {vocab_size} rows")
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise BadInputError(f"{fields.where}: token {token!r} has {count} ids")
    return tokens


def _sentencepiece(fields: Fields, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    scores = fields.items("tokenizer.ggml.scores", len(tokens))
    pieces = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    unknown = _token(fields, "tokenizer.ggml.unknown_token_id", tokens, 0)
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges_of(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types)
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_of(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Merges that make BPE choose as SentencePiece does: the pair whose piece has the best score first."""
    merges = []
    for piece, _ in sorted(pieces.items(), key=lambda item: -item[1]):
        for cut in range(1, len(piece)):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                merges.append((piece[:cut], piece[cut:]))
    return merges


def _byte_level(fields: Fields, tokens: list[str]) -> Tokenizer:
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise UnsupportedError(f"{fields.where}: tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")
    lines = fields.data.get("tokenizer.ggml.merges")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise BadInputError(f"{fields.where}: no tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocab = {t: i for i, t in enumerate(tokens)}
    missing = next((t for m in merges for t in (*m, "".join(m)) if t not in vocab), None)
    if missing is not None:
        raise BadInputError(f"{fields.where}: tokenizer.ggml.merges makes {missing!r}, which is no token")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as Qwen's own tokenizer; llama.cpp leaves it out
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: Sequence[int] | None) -> None:
    """Ids are found by text, since the model's vocabulary already holds every token."""
    kinds = list(zip(tokens, types or (), strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, k in kinds if k in (CONTROL, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == USER_DEFINED])


def _add_bos(tokenizer: Tokenizer, tokens: list[str], fields: Fields) -> None:
    bos = _token(fields, "tokenizer.ggml.bos_token_id", tokens, None)
    special = [(bos, tokens.index(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=special)


def _token(fields: Fields, name: str, tokens: list[str], default: int | None) -> str:
    """The token whose id the field gives."""
    number = fields.integer(name) if default is None else fields.integer(name, default)
    if not 0 <= number < len(tokens):
        raise BadInputError(f"{fields.where}: {name} {number} is outside the {len(tokens)} tokens")
    return tokens[number]
