"""Schemas, expressions and grammars: what may follow, what must, and that whole replies are what was asked for."""

import json
import re
import sys
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from fakes import EOS, assert_nothing_is_taken, fake_engine, fake_spec, fake_text, reply, script
from fakes_mtp import heads_engine

from mimo_edge.decoding.guided import Guides, mask_behind
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.options import grammar_of
from mimo_edge.request import Grammar, SamplingParams

ACTION = {
    "type": "object",
    "properties": {"action": {"enum": ["pick_up", "stop", "move_to"]}, "object": {"type": "string", "maxLength": 12}},
    "required": ["action", "object"],
    "additionalProperties": False,
}
NUMBER = "-?(0|[1-9][0-9]{0,5})(\\.[0-9]{1,3})?"
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: /[0-9]{1,3}/ | "(" sum ")"
"""
GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= "yes" | "no"\n'
GRAMMARS = {
    "schema": {"schema": ACTION},
    "regex": {"regex": NUMBER},
    "lark": {"grammar": ARITHMETIC},
    "gbnf": {"grammar": GBNF},
    "free": {"schema": {"type": "object"}},
}
WARM = SamplingParams(temperature=1.0, seed=4)


def guide_of(options, text=None):
    return Guides(text or fake_text(fake_spec())).start(grammar_of(**options))


def walk(guide, seed, most=300):
    """Random allowed tokens until the end; forced ones are followed."""
    r, tokens = np.random.default_rng(seed), []
    while not guide.finished and len(tokens) < most:
        token = int(r.choice(np.flatnonzero(guide.mask())))
        if token == EOS:
            return tokens
        guide.advance(token)
        tokens.append(token)
    return tokens if guide.finished else None


def whole(kind, text):
    """Whether a finished reply is what was asked for."""
    if kind == "schema":
        jsonschema.validate(json.loads(text), ACTION)
        return True
    if kind == "free":
        return isinstance(json.loads(text), dict)
    pattern = {"regex": NUMBER, "lark": r"[0-9+\-*/()]+", "gbnf": r"\[(yes|no)(,(yes|no))*\]"}[kind]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("kind", GRAMMARS)
def test_random_allowed_tokens_make_what_was_asked_for(kind):
    guides = Guides(fake_text(fake_spec()))
    ended = 0
    for seed in range(30):
        tokens = walk(guides.start(grammar_of(**GRAMMARS[kind])), seed)
        if tokens is not None:
            assert whole(kind, bytes(tokens).decode())
            ended += 1
    assert ended >= 5


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_forced_token_is_the_only_one_allowed_and_taking_them_one_by_one_is_the_same(kind):
    for seed in range(5):
        guide, r, forced_at_all = guide_of(GRAMMARS[kind]), np.random.default_rng(seed), False
        for _ in range(60):
            if guide.finished:
                break
            forced = guide.forced()
            for i, token in enumerate(forced):
                assert np.flatnonzero(guide.mask()).tolist() == [token]
                assert guide.forced() == forced[i:]
                guide.advance(token)
            forced_at_all |= bool(forced)
            allowed = np.flatnonzero(guide.mask())
            token = int(r.choice(allowed))
            if token == EOS or guide.finished:
                break
            assert len(allowed) > 1 or not forced
            guide.advance(token)
        assert forced_at_all or kind in ("regex", "lark")


@pytest.mark.parametrize("kind", GRAMMARS)
def test_looking_ahead_and_back_changes_nothing(kind):
    """Also over the end: whoever drafts may run into it."""
    guides, grammar = Guides(fake_text(fake_spec())), grammar_of(**GRAMMARS[kind])
    tokens = next(t for seed in range(99) if (t := walk(guides.start(grammar), seed, 60)) is not None)
    straight, guide = guides.start(grammar), guides.start(grammar)
    for i, token in enumerate(tokens):
        for ahead in (1, 2, 3, len(tokens)):
            draft = tokens[i : i + ahead]
            other = guides.start(grammar)
            for t in tokens[: i + len(draft)]:
                other.advance(t)
            assert np.array_equal(mask_behind(guide, draft), other.mask())
        assert np.array_equal(guide.mask(), straight.mask()) and guide.forced() == straight.forced()
        guide.advance(token)
        straight.advance(token)
    assert guide.finished == straight.finished
    if guide.mask()[EOS] and not guide.finished:
        guide.advance(EOS)
        assert guide.finished
        guide.rollback(1)
        assert np.array_equal(guide.mask(), straight.mask())


def test_a_token_that_is_not_allowed_is_an_error_and_changes_nothing():
    guide = guide_of({"regex": "ab|ac"})
    guide.advance(ord("a"))
    with pytest.raises(MimoEdgeError, match="token 120 cannot follow"):
        guide.advance(ord("x"))
    assert np.flatnonzero(guide.mask()).tolist() == [ord("b"), ord("c")]


def test_guides_do_not_share_their_place():
    guides, grammar = Guides(fake_text(fake_spec())), Grammar("regex", "ab|cd")
    first, second = guides.start(grammar), guides.start(grammar)
    first.advance(ord("a"))
    assert np.flatnonzero(second.mask()).tolist() == [ord("a"), ord("c")]
    assert np.flatnonzero(guides.start(grammar).mask()).tolist() == [ord("a"), ord("c")]


@pytest.mark.parametrize("ends", [(EOS,), (EOS, 10), ()])
def test_all_end_tokens_end_a_reply_and_none_is_text(ends):
    text = fake_text(replace(fake_spec(), eos_ids=ends))
    guide = guide_of({"regex": "a*"}, text)
    assert set(np.flatnonzero(guide.mask())) == {ord("a"), *ends}
    guide = guide_of({"regex": "[^q]{2}"}, text)
    assert not guide.mask()[list({*ends, 256, EOS})].any()


def test_ids_that_no_token_uses_are_never_allowed():
    guide = guide_of({"regex": "(?s:.{3})"}, fake_text(replace(fake_spec(), vocab_size=300)))
    mask = guide.mask()
    assert mask.size == 300 and not mask[256:].any() and mask[97]


BAD = [
    ({"schema": {"type": "foo"}}, "schema cannot be used: Invalid type: foo"),
    ({"schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
    ({"schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum"),
    ({"schema": {"enum": []}}, "Unsatisfiable"),
    ({"schema": "{"}, "not JSON: Expecting property name .* line 1 column 2"),
    ({"schema": {"const": float("nan")}}, "not JSON"),
    ({"schema": {"const": {1, 2}}}, "not JSON"),
    ({"schema": [1]}, "schema .1. is not a JSON object"),
    ({"regex": "a("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "no text satisfies it"),
    ({"grammar": 'start: "a" rest\nrest: /[^\\s\\S]/'}, "no text satisfies it"),
    ({"schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2100)}}}, "items; max is 2000"),
    ({"regex": ""}, "no text but the empty one satisfies it"),
    ({"regex": 5}, "regex must be a string, not int"),
    ({"grammar": "garbage"}, "grammar cannot be used"),
    ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ({"grammar": "root ::= missing"}, "missing"),
    ({"grammar": b"start: x"}, "grammar must be a string"),
    ({"schema": ACTION, "regex": "a"}, "schema and regex were given"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[m[:20] for _, m in BAD])
def test_what_cannot_be_followed_is_refused_in_one_line_before_anything_is_taken(options, message):
    engine = fake_engine()
    with pytest.raises(BadInputError, match=message) as error:
        engine.generate("abc", **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 320
    assert engine.backend.runs == []
    assert_nothing_is_taken(engine)


def test_a_regex_beyond_what_can_be_compiled_is_refused_by_its_text():
    with pytest.raises(BadInputError, match=r"regex .* too complex .*simpler") as error:
        fake_engine().generate("abc", regex="(a?){9000}a{9000}")
    assert "non-verbose" not in str(error.value) and len(str(error.value)) < 320


def test_a_schema_too_deep_to_read_is_refused():
    schema = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadInputError, match="schema"):
        fake_engine().generate("abc", schema=schema)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = fake_engine()
    with pytest.raises(UnsupportedError, match=r"pip install 'mimo-edge\[guided\]'"):
        engine.generate("abc", regex="a")
    assert reply(engine, "abc", max_tokens=3).tokens


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_replies_follow_and_are_the_same_however_rows_are_grouped(kind, sampling, chunk):
    def ask(chunk):
        engine = fake_engine(context=256, chunk=chunk)
        result = reply(engine, "abc", sampling=sampling, **GRAMMARS[kind], max_tokens=150)
        assert max(rows for [rows] in engine.backend.runs) <= chunk
        assert_nothing_is_taken(engine)
        return result

    result = ask(chunk)
    assert (result.tokens, result.finish_reason) == (ask(256).tokens, result.finish_reason)
    if result.finish_reason == "stop":
        assert whole(kind, result.text)
    else:
        assert (result.finish_reason, len(result.tokens)) == ("length", 150)


def test_forced_tokens_are_one_step():
    engine = fake_engine(script('{"action":"stop","object":"cup"}', 4))
    result = reply(engine, "abc", schema=ACTION)
    assert json.loads(result.text) == {"action": "stop", "object": "cup"} and result.finish_reason == "stop"
    rows = [rows for [rows] in engine.backend.runs]
    assert rows[0] == 4 and rows[1] == len('{"action":"') and len('stop","object":"') in rows
    assert len(rows) < 10 and sum(rows) < 4 + len(result.tokens)  # what the end forces is not evaluated


def test_the_end_is_free_where_the_grammar_allows_it():
    assert reply(fake_engine(script("123", 4)), "abc", regex="[0-9]+").text == "123"
    assert reply(fake_engine(script("12", 4)), "abc", regex="[0-9]{4,}", max_tokens=3).finish_reason == "length"


@pytest.mark.parametrize("limit", range(1, 20))
def test_limits_and_stop_strings_hold_inside_forced_tokens(limit):
    said = '{"action":"stop","object":"cup"}'
    engine = fake_engine(script(said, 4))
    cut = reply(engine, "abc", schema=ACTION, max_tokens=limit)
    assert (cut.text, cut.finish_reason, len(cut.tokens)) == (said[:limit], "length", limit)
    stopped = reply(engine, "abc", schema=ACTION, stop=said[limit : limit + 3])
    assert (stopped.text, stopped.finish_reason) == (said[: said.index(said[limit : limit + 3])], "stop")
    full = reply(fake_engine(script(said, 4), context=4 + limit), "abc", schema=ACTION, max_tokens=99)
    assert (full.text, full.finish_reason) == (said[: limit + 1], "length")


def test_forced_tokens_count_as_seen_for_the_penalty():
    """The rule prefers a; a penalty makes what the grammar forced less likely than what was not seen."""
    engine = fake_engine(lambda tokens: ord("a"))
    options = {"regex": "xa(a|b)", "sampling": SamplingParams(repetition_penalty=100.0)}
    engine.backend.run = _tilted(engine.backend.run)
    assert reply(engine, "_", regex="xa(a|b)").text == "xaa"
    assert reply(engine, "_", **options).text == "xab"


def _tilted(run):
    def tilted(steps):
        outputs = run(steps)
        for output in outputs:
            output.logits[:, ord("b")] = 0.5
        return outputs

    return tilted


def test_the_devices_own_best_token_is_not_asked_for():
    engine = fake_engine()
    engine.backend.best = lambda step: pytest.fail("the mask would be ignored")
    assert re.fullmatch("[0-9]{3}", reply(engine, "abc", regex="[0-9]{3}").text)


def test_a_grammar_that_ends_in_nothing_is_an_error_when_it_gets_there():
    engine = fake_engine()
    grammar = 'start: /[ab]/ rest\nrest: "c" /[^\\s\\S]/'
    with pytest.raises(MimoEdgeError, match="cannot go on") as error:
        reply(engine, "abc", grammar=grammar)
    assert not isinstance(error.value, BadInputError)
    assert_nothing_is_taken(engine)


def test_conversations_can_ask_for_a_form_in_one_turn():
    with fake_engine(context=256).session() as session:
        first = reply_to(session.chat("hi", max_tokens=5))
        second = reply_to(session.chat("go", schema=ACTION, max_tokens=80))
        assert second.finish_reason == "length" or jsonschema.validate(json.loads(second.text), ACTION) is None
        assert second.text.startswith('{"action":"') and not first.text.startswith("{")
        assert [m["content"] for m in session.messages] == ["hi", first.text, "go", second.text]


def reply_to(generation):
    list(generation)
    return generation.result


@pytest.mark.parametrize("full", [False, True], ids=["window", "full"])
@pytest.mark.parametrize("drafts", [1, 2, 3, "auto"])
@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM, SamplingParams(1.0, seed=2, repetition_penalty=1.4)])
def test_any_number_of_drafts_gives_the_same_tokens_and_rows(full, drafts, kind, sampling):
    """Also where drafts are behind, in front of and inside what is forced, and where the end is among them."""
    results = []
    for d in (0, drafts):
        engine = heads_engine(full=full, drafts=d, context=200, chunk=7)
        with engine.session() as session:
            result = reply(session, "abc", sampling=sampling, max_tokens=90, **GRAMMARS[kind])
            results.append((result, session.sequence.tokens))
        assert_nothing_is_taken(engine)
    (want, rows), (got, their_rows) = results
    assert (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
    assert rows == their_rows


def test_drafts_are_what_the_grammar_allows():
    """Of what the heads would say, which is never allowed here, the best that is."""
    drafted = []
    engine = heads_engine(drafts=3, context=200)
    engine.step = watched(engine.step, lambda generation: drafted.extend(generation.speculation.drafts))
    result = reply(engine, "abc", regex="[0-9]{30}", max_tokens=40)
    assert re.fullmatch("[0-9]{30}", result.text) and result.mtp.drafted == len(drafted) > 10
    assert all(chr(d).isdigit() or d == EOS for d in drafted)


def watched(step, look):
    def stepping(generation):
        step(generation)
        look(generation)

    return stepping
