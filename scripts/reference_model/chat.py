"""The chat format. chat_template.jinja renders the same text; volatile parts (the state) come last."""

from __future__ import annotations

from pathlib import Path

from scripts.reference_model.dialogue import Sample

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, TOOLS, USER, ASSISTANT, STATE = "<|system|>", "<|tools|>", "<|user|>", "<|assistant|>", "<|state|>"
SPECIAL = (PAD, BOS, END, SYSTEM, TOOLS, USER, ASSISTANT, STATE)  # ids 0, 1, 2, ... in this order
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def prompt(sample: Sample) -> str:
    """Everything before the answer, ending in the assistant's token."""
    parts = [BOS, SYSTEM, sample.system, END]
    if sample.tools:
        parts += [TOOLS, "\n".join(sample.tools), END]
    for user, assistant in sample.history:
        parts += [USER, user, END, ASSISTANT, assistant, END]
    parts += [USER, sample.user, END]
    if sample.state:
        parts += [STATE, sample.state, END]
    return "".join([*parts, ASSISTANT])


def messages(sample: Sample) -> list[dict[str, str]]:
    """The same conversation as a list of messages for the template."""
    out = [{"role": "system", "content": sample.system}]
    if sample.tools:
        out.append({"role": "tools", "content": "\n".join(sample.tools)})
    for user, assistant in sample.history:
        out += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    out.append({"role": "user", "content": sample.user})
    if sample.state:
        out.append({"role": "state", "content": sample.state})
    return out
