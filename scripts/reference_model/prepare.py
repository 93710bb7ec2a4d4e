"""Makes the training data out of collected text: tokens, held-out tokens, held-out commands.

    python -m scripts.reference_model.prepare TEXT TOKENIZER.json OUT

TEXT is collect.py's output folder. OUT receives general.txt.xz (train.py tokenises it), heldout.u16.xz (uint16 tokens),
commands.jsonl (the test set) and commands.npz (the same, encoded), calibration.jsonl (training split), tokenizer.json.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import sys
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from scripts.reference_model.chat import messages
from scripts.reference_model.dialogue import Sample, make_sample
from scripts.reference_model.intents import frequencies
from scripts.reference_model.packing import Encoded, encode_sample, tokenize_general

PER_INTENT = 100  # test commands of every intent
BY_FREQUENCY = 1_000  # and as many more, drawn as people would


def held_out(seed: int = 7) -> list[Sample]:
    """The test set."""
    samples = [
        make_sample(Random(f"test:{seed}:{name}:{i}"), "test", name)
        for name in frequencies()[0]
        for i in range(PER_INTENT)
    ]
    return samples + [make_sample(Random(f"test:{seed}:{i}"), "test") for i in range(BY_FREQUENCY)]


def calibration(count: int, seed: int = 7) -> list[Sample]:
    """Samples of the training split, drawn by frequency."""
    return [make_sample(Random(f"calibration:{seed}:{i}"), "train") for i in range(count)]


def line(sample: Sample) -> str:
    """One JSON line: the conversation as messages, the right answer and what the sample is."""
    told = {
        k: v for k, v in dataclasses.asdict(sample).items() if k in ("intent", "language", "variant", "action", "reply")
    }
    return json.dumps({**told, "messages": messages(sample)}, ensure_ascii=False)


GROUPS = ("intent", "variant", "language")


def save_encoded(path: Path, samples: list[Sample], encoded: list[Encoded]) -> None:
    ids, kinds = (np.concatenate([np.array(e[i]) for e in encoded]) for i in (0, 1))
    lengths = np.array([len(e[0]) for e in encoded], np.int32)
    groups = {g: np.array([getattr(s, g) for s in samples]) for g in GROUPS}
    np.savez_compressed(path, ids=ids.astype(np.uint16), kinds=kinds.astype(np.uint8), lengths=lengths, **groups)


def load_encoded(path: Path) -> tuple[list[Encoded], dict[str, list[str]]]:
    """(samples as tokens and kinds, for each of GROUPS the group of every sample)."""
    with np.load(path) as f:
        ids, kinds, ends = f["ids"].tolist(), f["kinds"].tolist(), f["lengths"].cumsum().tolist()
        groups = {g: f[g].tolist() for g in GROUPS}
    return [(ids[a:b], kinds[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)], groups


def load_tokens(path: Path) -> np.ndarray:
    return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2")


def main(text: Path, tokenizer_file: Path, out: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    out.mkdir(parents=True, exist_ok=True)
    test = held_out()
    (out / "commands.jsonl").write_text("\n".join(map(line, test)) + "\n", "utf-8")
    (out / "calibration.jsonl").write_text("\n".join(map(line, calibration(4_000))) + "\n", "utf-8")
    encoded = [encode_sample(s, tokenizer) for s in test]
    save_encoded(out / "commands.npz", test, encoded)
    (out / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    sizes = [(len(ids), sum(k > 0 for k in kinds)) for ids, kinds in encoded]
    whole, answer = np.mean(sizes, axis=0)
    print(
        f"{len(test)} held-out commands of {len(frequencies()[0])} intents, {whole:.0f} tokens, {answer:.0f} in answers"
    )
    long = [a for _, a in sizes if a >= 300]
    print(f"replies of 300 tokens and more: {len(long)} of {len(sizes)}")
    tokens = tokenize_general(text / "heldout.txt.xz", tokenizer)
    (out / "heldout.u16.xz").write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=6))
    (out / "general.txt.xz").write_bytes((text / "general.txt.xz").read_bytes())
    print(f"held-out general text: {len(tokens) / 1e6:.2f}M tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
