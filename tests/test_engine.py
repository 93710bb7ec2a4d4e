"""The engine's loop, its limits and unplanned ends, with a model that has no weights."""

import gc

import pytest
from fakes import EOS, assert_nothing_is_taken, fake_engine, reply, script

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.request import SamplingParams


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 256])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_any_chunking_gives_the_same_tokens(chunk, temperature):
    sampling = SamplingParams(temperature=temperature, seed=5)
    expected = reply(fake_engine(), "a prompt of some length", max_tokens=30, sampling=sampling)
    engine = fake_engine(chunk=chunk)
    result = reply(engine, "a prompt of some length", max_tokens=30, sampling=sampling)
    assert result.tokens == expected.tokens and len(result.tokens) == 30
    assert max(rows for [rows] in engine.backend.runs) <= chunk
    assert_nothing_is_taken(engine)


def test_sampling_at_a_temperature_differs_from_greedy_and_between_seeds():
    outputs = {
        reply(fake_engine(), "abc", sampling=SamplingParams(temperature=t, seed=s), max_tokens=8).tokens
        for t, s in [(0, 0), (1, 0), (1, 1)]
    }
    assert len(outputs) == 3


def test_logits_are_asked_for_behind_the_last_row_of_a_prompt_only():
    engine = fake_engine(chunk=4)
    asked = []
    run = engine.backend.run
    engine.backend.run = lambda steps: asked.append(steps[0].logit_rows.tolist()) or run(steps)
    reply(engine, list(range(10)), max_tokens=3)
    assert asked == [[], [], [1], [0], [0]]


def test_the_reply_ends_at_the_end_token_which_is_not_text():
    result = reply(fake_engine(script("fine", 4)), "abc")
    assert (result.text, result.finish_reason) == ("fine", "stop")
    assert result.tokens == (*b"fine", EOS)


def test_the_reply_ends_at_max_tokens():
    result = reply(fake_engine(script("unending", 4)), "abc", max_tokens=3)
    assert (result.text, result.finish_reason) == ("une", "length")


@pytest.mark.parametrize("prompt_length", [1, 8, 15, 16])
def test_the_reply_ends_where_the_context_ends(prompt_length):
    engine = fake_engine(context=16)
    result = reply(engine, [97] * prompt_length, max_tokens=1000)
    assert result.finish_reason == "length"
    assert len(result.tokens) == 16 - prompt_length + 1  # the last token need not be evaluated
    assert sum(rows for [rows] in engine.backend.runs) == 16


def test_a_prompt_longer_than_the_context_names_both_numbers():
    engine = fake_engine(context=16)
    with pytest.raises(BadInputError, match="17 tokens and the context 16"):
        engine.generate([97] * 17)
    assert_nothing_is_taken(engine)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([5, 258], {}, "token 258 .* 0 to 257"),
        ([-1], {}, "token -1"),
        ("x\udcff", {}, "not valid Unicode at character 1"),
        ("x", {"max_tokens": 0}, "max_tokens 0"),
        ("x", {"stop": ["fine", ""]}, "stop string is empty"),
    ],
)
def test_bad_requests_are_refused_and_take_nothing(prompt, options, message):
    engine = fake_engine()
    with pytest.raises(BadInputError, match=message):
        engine.generate(prompt, **options)
    assert_nothing_is_taken(engine)


@pytest.mark.parametrize("stop", ["stop", ("never", "stop")])
def test_a_stop_string_across_tokens_is_never_shown(stop):
    pieces = list(fake_engine(script("go on, st. stop here", 4)).generate("abc", stop=stop))
    assert "".join(pieces) == "go on, st. "


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end():
    assert reply(fake_engine(script("one sto", 4)), "abc", stop="stop").text == "one sto"
    assert reply(fake_engine(script("one stop", 4)), "abc", stop="stop", max_tokens=7).text == "one sto"


def test_characters_are_never_split():
    said = "häuser 🦙🏔️ 猫"
    generation = fake_engine(script(said, 4)).generate("abc")
    pieces = list(generation)
    assert "".join(pieces) == said and "🦙" in pieces
    assert all(piece.encode().decode() == piece and "\ufffd" not in piece for piece in pieces)


def test_a_character_cut_off_by_the_limit_is_shown_as_incomplete():
    assert reply(fake_engine(script("ab🦙", 4)), "abc", max_tokens=4).text == "ab\ufffd"


def test_timings_and_counts_describe_the_run():
    engine = fake_engine(chunk=2)
    generation = engine.generate("abcdef", max_tokens=4)
    with pytest.raises(MimoEdgeError, match="not finished"):
        _ = generation.result
    list(generation)
    result = generation.result
    t = result.timings
    assert t.ttft_s > 0 and t.prefill_tok_s > 0 and t.decode_tok_s > 0 and t.load_s == 0
    assert (result.cache.prompt_tokens, result.cache.reused_tokens) == (7, 0)
    assert result.memory.full_kv_bytes == engine.layout.full_bytes == 64 * 4 * 4
    assert result.memory.window_kv_bytes == (4 + 4) * 4 * 4
    assert result.memory.peak_rss_bytes > 1 << 20
    assert reply(engine, "a", max_tokens=1).timings.decode_tok_s is None
    assert set(result.to_json()) == {"text", "tokens", "finish_reason", "timings", "cache", "memory", "mtp", "logprobs"}


def test_cancel_ends_the_reply_before_its_next_step():
    engine = fake_engine()
    generation = engine.generate("abc", max_tokens=50)
    first = next(generation)
    generation.cancel()
    assert list(generation) == []
    assert generation.result.finish_reason == "cancelled" and generation.result.text == first
    assert_nothing_is_taken(engine)


def test_cancel_shows_what_was_held_back_for_a_stop_string():
    generation = fake_engine(script("xsto", 4)).generate("abc", stop="stop")
    pieces = [next(generation)]
    generation._advance()
    generation.cancel()
    assert "".join(pieces + list(generation)) == "xs"


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_an_abandoned_reply_gives_its_memory_back(how):
    engine = fake_engine()
    if how == "break":
        for _ in engine.generate("abc"):
            break
    else:
        generation = engine.generate("abc")
        next(generation)
        assert engine.pools.rings.used == 1
        if how == "close":
            generation.close()
            assert list(generation) == [] and generation.result.finish_reason == "cancelled"
        del generation
    gc.collect()
    assert_nothing_is_taken(engine)


class FailingOnce:
    """Replaces one method of the backend: fails at the n-th call, after doing the work if `late`."""

    def __init__(self, engine, method, n, error, late=False):
        self.inner, self.n, self.error, self.late = getattr(engine.backend, method), n, error, late
        setattr(engine.backend, method, self)

    def __call__(self, *arguments):
        self.n -= 1
        if self.n == 0 and not self.late:
            raise self.error
        value = self.inner(*arguments)
        if self.n == 0:
            raise self.error
        return value


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt(), "cancelled"), (RuntimeError("gone"), "error")])
@pytest.mark.parametrize("method", ["run", "commit"])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_an_exception_in_a_step_leaves_the_session_usable(method, n, error, reason):
    engine = fake_engine(chunk=3)
    with engine.session() as session:
        late = method == "commit"  # rows are written, the engine does not learn how far
        FailingOnce(engine, method, n, error, late)
        generation = session.generate("abcdefg", max_tokens=20)
        with pytest.raises(type(error)):
            list(generation)
        assert generation.result.finish_reason == reason
        again = reply(session, "abcdefg", max_tokens=20)
        assert again.tokens == reply(fake_engine(), "abcdefg", max_tokens=20).tokens
        if method == "commit":
            assert again.cache.reused_tokens == 0
    assert_nothing_is_taken(engine)


def test_logits_that_are_not_finite_are_an_error():
    engine = fake_engine()
    run = engine.backend.run

    def poisoned(steps):
        outputs = run(steps)
        outputs[0].logits[:, 3] = float("nan")
        return outputs

    engine.backend.run = poisoned
    with pytest.raises(MimoEdgeError, match="position 4 are not finite"):
        list(engine.generate("abc"))
    assert_nothing_is_taken(engine)


def test_a_closed_engine_refuses_everything_and_closes_once():
    with fake_engine() as engine:
        session = engine.session()
    assert engine.backend.closed
    engine.close()
    for use in (lambda: engine.generate("a"), lambda: engine.session(), lambda: list(session.generate("a"))):
        with pytest.raises(MimoEdgeError, match="engine is closed"):
            use()
    session.close()
    assert_nothing_is_taken(engine)
