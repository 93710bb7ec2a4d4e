"""mimo-edge run: text from a bundle, once or as a conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mimo_edge.cli.caching import Conversation, Size, cache_from, cache_options
from mimo_edge.cli.common import debug_option, drafts_option, note, progress
from mimo_edge.cli.guided import form_of, guided_options
from mimo_edge.errors import BadInputError
from mimo_edge.request import DEFAULT_MAX_TOKENS, EMPTY_PROMPT, Drafts, Request, Result, SamplingParams

if TYPE_CHECKING:
    from mimo_edge.generation import Generation
    from mimo_edge.session import Session

EXAMPLES = """
\b
Examples:
  mimo-edge run -p "pick up the red cup"
  mimo-edge run gemma -p "The old lighthouse" --max-tokens 60
  mimo-edge run gemma --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt
  mimo-edge run --chat
  mimo-edge run --chat -p "bring me the red cup" --cache-dir ~/.cache/mimo-edge --session kitchen
  mimo-edge run -p "pick up the red cup" --schema action.json
  mimo-edge run gemma -p "2 + 2 =" --stop $'\\n' --json | jq .timings

Without --prompt the prompt is read from stdin; one newline at its end is dropped. Ctrl-C ends a reply early and
keeps what was generated.
"""
SAMPLING_HELP = {
    "temperature": "0 takes the best token; higher is more varied.",
    "top_k": "Sample among the K best tokens; 0 is off.",
    "top_p": "Sample among the best tokens that together have this probability; 1 is off.",
    "min_p": "Drop tokens less likely than this share of the best one; 0 is off.",
    "repetition_penalty": "Above 1, tokens that occurred before become less likely.",
    "seed": "The same seed gives the same text.",
}


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option a field of SamplingParams, with its default."""
    for field in reversed(dataclasses.fields(SamplingParams)):
        kind = type(field.default)
        flag = "--" + field.name.replace("_", "-")
        command = click.option(
            flag, type=kind, default=field.default, show_default=True, help=SAMPLING_HELP[field.name]
        )(command)
    return command


@click.command(epilog=EXAMPLES)
@click.argument("bundle", required=False, type=click.Path())
@click.option("-p", "--prompt", metavar="TEXT", help="Text to continue; with --chat, the one message to answer.")
@click.option("--chat", is_flag=True, help="Use the chat template; without --prompt, talk line by line until /exit.")
@click.option("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True, help="Longest reply.")
@sampling_options
@click.option("--stop", metavar="TEXT", multiple=True, help="End the reply before this text; may be given again.")
@guided_options
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    help="onnxruntime, onnxruntime-float (exact activations), cuda, cuda-ptx (an older GPU's kernels), tensorrt, "
    "reference, or auto.",
)
@click.option("--threads", type=int, help="Processor threads  [default: the backend's choice]")
@click.option("--context", type=int, help="Tokens of KV cache to allocate  [default: the bundle's context]")
@drafts_option(
    "Tokens that MTP heads draft for a step to verify, 0 to 3, or auto: as many as pay. The text is the same."
)
@click.option(
    "--memory-budget", type=Size(), metavar="SIZE", help="Refuse, by item, what would take more memory, such as 3G."
)
@cache_options
@click.option(
    "--session", "name", metavar="NAME", help="Go on with a conversation that --cache-dir keeps by this name."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@debug_option
def run(
    bundle: str | None,
    prompt: str | None,
    chat: bool,
    max_tokens: int,
    stop: tuple[str, ...],
    schema: str | None,
    regex: str | None,
    grammar: str | None,
    backend: str,
    threads: int | None,
    context: int | None,
    drafts: Drafts,
    memory_budget: int | None,
    cache_bytes: int | None,
    cache_dir: Path | None,
    cache_disk_bytes: int | None,
    cache_record: bool,
    name: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue a text, or talk.

    Without BUNDLE the built-in reference model answers: commands to a home robot, as a JSON action and a short reply.
    """
    if chat and prompt is None and as_json:
        raise click.UsageError("--json prints one reply: give --chat a --prompt as well")
    ask: dict[str, Any] = {"max_tokens": max_tokens, "sampling": SamplingParams(**sampling), "stop": stop}
    Request((0,), **ask)  # mistakes are heard of before a model is loaded
    ask |= form_of(schema, regex, grammar)
    if prompt is None and not chat:
        prompt = read_prompt()
    if prompt == "":  # the engine would say so too, after loading
        raise BadInputError(EMPTY_PROMPT)
    speaks = chat or bundle is None  # the built-in model knows conversations only
    if name is not None and not speaks:
        raise click.UsageError("--session NAME keeps a conversation: give --chat as well")
    conversation = Conversation(cache_dir, name) if name is not None else None
    messages = conversation.load() if conversation else []
    cache = cache_from(cache_bytes, cache_dir, cache_disk_bytes, cache_record)
    from mimo_edge.bundle import BUILT_IN
    from mimo_edge.device.process import volunteer
    from mimo_edge.engine import Engine

    volunteer()
    with progress() as report:
        report(None, None, f"loading {bundle or 'the built-in model'}")
        path = BUILT_IN if bundle is None else bundle
        engine = Engine.open(
            path,
            backend,
            max_context=context,
            threads=threads,
            cache=cache,
            drafts=drafts,
            memory_budget=memory_budget,
        )
    with engine:
        if speaks:
            engine.text.need_chat_template()
            with engine.session(messages=messages) as session:
                result = answer(session, prompt, ask, as_json)
                if conversation is not None:
                    conversation.save(session.messages)
        else:
            result = show(engine.generate(prompt or "", **ask), quiet=as_json)
    if result is None:
        return
    if as_json:
        write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
    if result.finish_reason == "cancelled":
        sys.exit(130)


def answer(session: Session, prompt: str | None, ask: dict[str, Any], quiet: bool) -> Result | None:
    """Answers one message, or stdin line by line; Ctrl-C ends one reply."""
    if prompt is not None:
        return show(session.chat(prompt, **ask), quiet)
    note("talk to the model; /exit or Ctrl-D ends, Ctrl-C stops a reply")
    while (line := read_line()) is not None and line != "/exit":
        if line:
            show(session.chat(line, **ask))
    return None


def show(generation: Generation, quiet: bool = False) -> Result:
    """Writes text as it comes, unless `quiet`; Ctrl-C ends it early."""
    try:
        for piece in generation:
            if not quiet:
                write(piece)
    except KeyboardInterrupt:
        generation.close()
    if not quiet:
        write("\n")
    result = generation.result
    speed = f", {result.timings.decode_tok_s:.1f} tokens/s" if result.timings.decode_tok_s else ""
    reused = f", {result.cache.reused_tokens} of {result.cache.prompt_tokens} prompt tokens reused"
    note(f"{len(result.tokens)} tokens{speed}{reused if result.cache.reused_tokens else ''} ({result.finish_reason})")
    if result.mtp.steps:
        per_step = (len(result.tokens) - 1) / result.mtp.steps
        note(f"{per_step:.2f} tokens a step; {result.mtp.reason}")
    return result


def write(text: str) -> None:
    """UTF-8 to stdout, whatever the locale says."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def read_prompt() -> str:
    """All of stdin, less one newline at the end."""
    if sys.stdin.isatty():
        raise click.UsageError("no prompt: give --prompt TEXT, pipe a text in, or use --chat")
    return decode(sys.stdin.buffer.read()).removesuffix("\n")


def read_line() -> str | None:
    """The next line of the conversation without spaces around it; None at the end of stdin."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())

        try:
            return input("> ").strip()
        except EOFError:
            return None
    line = sys.stdin.buffer.readline()
    return decode(line).strip() if line else None


def decode(data: bytes) -> str:
    """Raises BadInputError naming the first byte that is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        bad = f"byte {e.start} (0x{data[e.start]:02x})"
        raise BadInputError(f"stdin is not valid UTF-8 at {bad}: convert it, for example with iconv") from None
