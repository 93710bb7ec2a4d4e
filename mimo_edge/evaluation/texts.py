"""How close replies are to their references: BLEU (sacrebleu) and ROUGE-L (rouge-score), both also for Chinese."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mimo_edge.extras import needs_extra

_WORD = re.compile(r"[^\W_\u3400-\u9fff]+|[\u3400-\u9fff]")  # a Han character is a word of its own


class Words:
    """rouge-score's tokenizer knows a to z only and would find nothing in other languages."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        return _WORD.findall(text.lower())


def rouge_l(replies: Sequence[str], references: Sequence[str]) -> list[float]:
    """ROUGE-L F1 of every reply, 0 to 1. Raises UnsupportedError without rouge-score."""
    with needs_extra("eval", "ROUGE-L"):
        from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer(["rougeL"], tokenizer=Words())
    return [
        1.0 if reply == reference else scorer.score(reference, reply)["rougeL"].fmeasure
        for reply, reference in zip(replies, references, strict=True)
    ]


def bleu(replies: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100, with sacrebleu's "zh" tokens: Han characters apart, the rest as by default.
    Raises UnsupportedError without sacrebleu."""
    with needs_extra("eval", "BLEU"):
        from sacrebleu.metrics.bleu import BLEU
    return float(BLEU(tokenize="zh").corpus_score(list(replies), [list(references)]).score)


def chrf(replies: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF, 0 to 100. Raises UnsupportedError without sacrebleu."""
    with needs_extra("eval", "chrF"):
        from sacrebleu.metrics.chrf import CHRF
    return float(CHRF().corpus_score(list(replies), [list(references)]).score)
