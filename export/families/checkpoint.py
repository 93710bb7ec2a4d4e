"""What every importer hands on: a model's description, its weights by rows, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mimo_edge.spec import ModelSpec, QuantSpec


class Source(Protocol):
    """Float weights under the canonical names of mimo_edge/params.py, read a block of rows at a time."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows [start, stop) of a 2-D parameter, contiguous float32 [stop - start, K], or elements of a 1-D one.

        Holds no more than what is asked and one raw copy of it. Raises BadInputError naming the tensor when a value
        is NaN or infinite, when the file has become shorter, or when there is no such parameter or row.
        """
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: every parameter of `spec` was found with its shape and a readable dtype, none was read.

    tokenizer_json: a tokenizers tokenizer.json whose ids are all below spec.vocab_size. chat_template: jinja source.
    packed: the format of each kind of tensor that is already quantised; `source` then is a ReadySource too
    (export/quantize/perplexity.py).
    """

    spec: ModelSpec
    source: Source = field(repr=False)
    tokenizer_json: str = field(repr=False)
    chat_template: str | None = field(repr=False)
    name: str
    packed: QuantSpec = field(default_factory=QuantSpec)
