"""Gates on any checkpoint: blocks of feed-forward channels that a row may skip, and what skipping costs.

Channels are reordered so that those that matter together share a block (permute.py), what dropping a block does to a
row is measured in the loss it causes (importance.py, sensitivity.py), a small network learns to tell from the row which
blocks matter (train.py), and thresholds set how much is skipped (threshold.py). The model's own weights stay as they
are. add.py puts it together; curve.py says what it costs, beside an oracle that sees the blocks themselves.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from mimo_edge.errors import BadInputError
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.gates.add import GateReport, GateRequest, Progress, add_gates
from mimo_edge.export.gates.budget import gate_spec
from mimo_edge.export.quantize.calibration_data import read_calibration
from mimo_edge.export.quantize.choose import measuring_texts
from mimo_edge.text import Text

__all__ = ["GateReport", "GateRequest", "add_gates", "gate_checkpoint"]


def gate_checkpoint(
    checkpoint: Checkpoint, request: GateRequest, calib: str | Path | None, tokens: int | None, progress: Progress
) -> tuple[Checkpoint, GateReport]:
    """add_gates with the text of the JSON lines file `calib`, measured on the exporter's own two texts.

    Raises BadInputError without `calib`, and what read_calibration and add_gates raise.
    """
    gate_spec(checkpoint.spec, request.block)  # refuses before anything is read
    if calib is None:
        raise BadInputError("gates are trained on calibration text: give it with --calib FILE.jsonl")
    spec = checkpoint.spec
    text = Text(Tokenizer.from_str(checkpoint.tokenizer_json), spec, checkpoint.chat_template)
    texts = read_calibration(Path(calib), text, spec.eos_ids[:1], tokens, stratified=True)
    return add_gates(checkpoint, request, texts, measuring_texts(spec, checkpoint.tokenizer_json), progress)
