"""Trains the byte-level BPE tokenizer on general text and generated conversations.

python -m scripts.reference_model.tokenizer GENERAL.txt.xz TOKENIZER.json
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.reference_model.chat import BOS, PAD, SPECIAL, prompt
from scripts.reference_model.collect import SEPARATOR
from scripts.reference_model.dialogue import make_sample

VOCAB = 8192
# Words keep underscores, so that an intent's name can be one token; digits stand alone, so that numbers are copied.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"
GENERAL_SHARE = 4  # every fourth document is enough for the merges
CONVERSATIONS = 12_000


def train(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))])
    return tokenizer


def corpus(general: Path) -> Iterator[str]:
    yield from lzma.decompress(general.read_bytes()).decode().split(SEPARATOR)[::GENERAL_SHARE]
    for i in range(CONVERSATIONS):
        sample = make_sample(Random(f"tokenizer:{i}"), "train")
        text = prompt(sample) + sample.answer
        for token in SPECIAL:
            text = text.replace(token, "\n")
        yield text


def main(general: Path, out: Path) -> None:
    tokenizer = train(corpus(general))
    out.write_text(tokenizer.to_str(), "utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens, {PAD} is {tokenizer.token_to_id(PAD)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
