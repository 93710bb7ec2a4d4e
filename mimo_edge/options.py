"""What can be asked of a reply by name, and the request that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from mimo_edge.errors import BadInputError
from mimo_edge.request import Drafts, Grammar, OnToken, Request, SamplingParams

if TYPE_CHECKING:
    from mimo_edge.kv.layout import KvLayout
    from mimo_edge.text import Text

LONGEST_TOKEN = 256  # characters; vocabularies stay well below


class Options(TypedDict, total=False):
    """What every way to generate a reply takes by name.

    max_tokens: the longest reply. sampling: how tokens are chosen. stop: texts before which the reply ends.
    marks, drafts: as in Request.
    schema: a JSON schema as JSON text or what json.loads makes of it; regex: a regular expression for the whole reply;
    grammar: one in Lark's or llama.cpp's notation. At most one of the three (docs/structured.md).
    deadline: seconds from the call after which the reply ends where it is, with reason "deadline".
    logprobs: also return the model's log-probability of every token (Result.logprobs).
    on_token: called with (token, text that became final with it, seconds since the call) as soon as a token is known.
    """

    max_tokens: int
    sampling: SamplingParams
    stop: str | Iterable[str]
    marks: Sequence[int]
    drafts: Drafts | None
    schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    deadline: float | None
    on_token: OnToken | None
    logprobs: bool


def make_request(text: Text, layout: KvLayout, prompt: str | Sequence[int], tenant: str, options: Options) -> Request:
    """What was asked, checked: token ids that the model knows and that leave room in the context.

    Raises BadInputError on what cannot be right, TypeError on an option that does not exist.
    """
    from mimo_edge.decoding.mtp import check_drafts  # not needed by the command line before a model is loaded

    given: dict[str, Any] = dict(options)
    stop = given.pop("stop", ())
    forms = {kind: given.pop(kind, None) for kind in ("schema", "regex", "grammar")}
    request = Request(
        _tokens(text, layout, prompt),
        tenant=tenant,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        marks=tuple(given.pop("marks", ())),
        grammar=grammar_of(**forms),
        **given,
    )
    if request.drafts is not None:
        check_drafts(request.drafts, layout.heads)
    return request


def _tokens(text: Text, layout: KvLayout, prompt: str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if len(prompt) > layout.context * LONGEST_TOKEN:  # do not spend minutes on tokenising it
            raise BadInputError(
                f"the prompt has {len(prompt):,} characters, more than the context of {layout.context} tokens "
                "can hold: shorten the prompt"
            )
        tokens = text.encode(prompt) if prompt else []
    else:
        tokens = list(prompt)
        text.check(tokens)
    if len(tokens) > layout.context:
        raise BadInputError(
            f"the prompt has {len(tokens)} tokens and the context {layout.context}: shorten the prompt, or "
            f"raise --context (this model allows {text.spec.max_context})"
        )
    return tuple(tokens)


def grammar_of(**forms: Any) -> Grammar | None:
    """Of `schema`, `regex` and `grammar`, the one that is not None, checked as far as it can be without a model."""
    given: list[Any] = [kind for kind, value in forms.items() if value is not None]
    if len(given) > 1:
        raise BadInputError(f"{' and '.join(given)} were given: a reply can follow only one of them")
    if not given:
        return None
    [kind] = given
    value = forms[kind]
    if kind == "schema":
        value = _schema_text(value)
    if not isinstance(value, str):
        raise BadInputError(f"the {kind} must be a string, not {type(value).__name__}")
    return Grammar(kind, value)


def _schema_text(schema: Any) -> str:
    """The schema as JSON of one line; properties keep their order."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as e:
        raise BadInputError(f"the schema is not JSON: {e}") from None
    if not isinstance(schema, dict):
        raise BadInputError(f"the schema {text[:40]} is not a JSON object")
    return text
