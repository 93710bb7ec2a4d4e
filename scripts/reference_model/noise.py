"""How people type: letter case, punctuation, typing errors."""

from __future__ import annotations

from random import Random

KEPT = ("don't", "without")  # a typo here would change the meaning
TYPOS = 0.14  # share of English commands with typing errors
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def noisy(text: str, language: str, rng: Random) -> str:
    """The command as typed. Words of fewer than four letters, digits and negations stay intact."""
    if language == "zh":
        return text + rng.choice(["", "", "。"])
    if rng.random() < TYPOS:
        words = text.split(" ")
        spots = [i for i, w in enumerate(words) if len(w) >= 4 and w.isalpha() and w not in KEPT]
        for i in rng.sample(spots, min(len(spots), rng.choice([1, 1, 2]))):
            words[i] = typo(words[i], rng)
        text = " ".join(words)
    if rng.random() < 0.15:
        text = text.lower()
    elif rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return text + rng.choice(["", "", "", ".", "!"])


def typo(word: str, rng: Random) -> str:
    """One error inside the word: a swap, a lost or doubled letter, or a neighbouring key. The first letter stays."""
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    row = next((r for r in ROWS if word[at].lower() in r), ROWS[0])
    near = max(0, min(len(row) - 1, row.find(word[at].lower()) + rng.choice([-1, 1])))
    return word[:at] + row[near] + word[at + 1 :]
