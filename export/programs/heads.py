"""MTP heads as launches, in pieces that the runtime joins into graphs (mimo_edge/backends/cuda_heads.py):

    begin.drafts        what all heads share: the rotation of the K + 1 rows in front of the pending token
    draft.M             head M evaluates these rows: ends in the logits behind the last
    best.M, sample.M    from logits to the head's draft
    verify              the pending token and its drafts through the main model: ends in logits
    accept.best, .sample  from logits to tokens, how many drafts hold, and the token behind them
    catchup.T.M         stores head M's keys and values of T earlier rows

All of them read `ahead`, tokens i32: t_{n-K} .. t_n and then the drafts, so that head M's rows [n-K-1, n) find their
look-ahead tokens from place M on, its draft goes to place K + 1 + M, and the main model's rows begin at place K.
"""

from __future__ import annotations

from mimo_edge.export.programs import model
from mimo_edge.export.programs.layer import Layer, Rows
from mimo_edge.export.programs.step import Step
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels.int4_linear import variants as linear
from mimo_edge.kernels.launch import Buffer, Program
from mimo_edge.kernels.mtp import variants as mtp
from mimo_edge.kernels.sampling import variants as sampling
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS
from mimo_edge.spec import MAX_DRAFTS, LayerSpec, ModelSpec, MtpSpec

ROWS = MAX_DRAFTS + 1
HIDDEN, OWN = "mtp.hidden", "mtp.own"  # the main model's states; in a chain, those of the head that went before
AHEAD, ROUND = "mtp.ahead", "mtp.round"
_WHERE = Rows("mtp.positions", "mtp.lengths", "mtp.counts", HEAD_ROWS, held=True)


def head_rings(spec: ModelSpec, longest: int) -> dict[str, int]:
    """Rings as kv/layout.py plans them for steps of at most `longest` rows, with room for the K + 1 rows that a short
    step writes before anybody accepts them."""
    if spec.mtp is None:
        return {}
    window = spec.attention[spec.mtp.attention].window
    if window is None:
        return {HIDDEN_ROWS: min(spec.max_context, longest + 3 * ROWS)}
    rings = {HEAD_ROWS: window + MAX_DRAFTS, HIDDEN_ROWS: window + MAX_DRAFTS + 2 * ROWS}
    return {name: min(spec.max_context, slots) for name, slots in rings.items()}


def head_inputs(spec: ModelSpec, longest: int) -> dict[str, Buffer]:
    """`mtp.lengths`: rows in front of the head's, and the first of these that counts."""
    if spec.mtp is None:
        return {}
    shapes = {AHEAD: (longest + MAX_DRAFTS,), "mtp.positions": (longest,), "mtp.lengths": (2,), "mtp.counts": (1,)}
    inputs = {name: Buffer("i32", shape, "input") for name, shape in shapes.items()}
    inputs["sampling.floats"] = Buffer("fp32", (1, 3), "input")
    inputs["sampling.integers"] = Buffer("i32", (1, 3), "input")
    return inputs


def head_pools(spec: ModelSpec, rings: dict[str, int], page: int) -> dict[str, Buffer]:
    """Hidden states, and every head's keys and values."""
    s = spec.mtp
    if s is None:
        return {}
    a, hidden = spec.attention[s.attention], Buffer("fp32", (1, rings[HIDDEN_ROWS], spec.hidden_size), "kv", 0, "ring")
    pools = {HIDDEN: hidden} | ({OWN: hidden} if s.chained else {})
    block = (1, page) if a.window is None else (1, rings[HEAD_ROWS])
    for m in range(s.heads):
        for name, size in (("k", a.head_dim), ("v", a.v_head_dim)):
            shape = (*block, a.kv_heads, size)
            pools[f"mtp.{m}.layer.{name}"] = Buffer("fp16", shape, "kv", 0, "page" if a.window is None else "ring")
    return pools


def keep_hidden(s: Step) -> None:
    """The main model's rows go into their ring: at once where keys and values do, too."""
    if s.spec.mtp is None:
        return
    names = {"x": "x", "hidden": HIDDEN, "positions": "positions", "lengths": "lengths", "counts": "counts"}
    rows, ring = s.rows, s.rings[HIDDEN_ROWS]
    launch = mtp.keep(rows, s.spec.hidden_size, ring, table="table.rings", counted=not s.short, **names)
    if s.short:
        s.add(launch)
    else:
        s.commit.append(launch)


def head_programs(
    spec: ModelSpec, tuning: Tuning, pages: int, rings: dict[str, int], prefill_rows: tuple[int, ...]
) -> dict[str, Program]:
    """Every piece, by name."""
    if spec.mtp is None:
        return {}

    def new(rows: int = ROWS) -> Step:
        return Step(spec, tuning, rows, pages, rings)

    steps: dict[str, Step] = {"begin.drafts": new(), "verify": new()}
    model.rotation(steps["begin.drafts"], spec.mtp.attention, "mtp.positions")
    for m in range(spec.mtp.heads):
        _draft(steps.setdefault(f"draft.{m}", new()), spec.mtp, m)
        model.best(steps.setdefault(f"best.{m}", new()), 1, AHEAD, ROWS + m)
        _sample(steps.setdefault(f"sample.{m}", new()), 1, m, AHEAD, ROWS + m)
        for rows in prefill_rows:
            _catch_up(steps.setdefault(f"catchup.{rows}.{m}", new(rows)), spec.mtp, m)
    model.body(steps["verify"], AHEAD, MAX_DRAFTS)
    keep_hidden(steps["verify"])
    model.logits(steps["verify"], "x", ROWS)
    model.best(steps.setdefault("accept.best", new()), ROWS, ROUND, 2)
    _sample(steps.setdefault("accept.sample", new()), ROWS, 0, ROUND, 2)
    for name in ("accept.best", "accept.sample"):
        _accept(steps[name])
    return {name: step.program() for name, step in steps.items()}


def _draft(s: Step, spec: MtpSpec, m: int) -> None:
    _pair(s, spec, m)
    Layer(s, f"mtp.{m}.layer", LayerSpec(spec.attention, spec.ffn), _WHERE).add()
    _pass_on(s, spec, m)
    model.logits(s, "x", 1, f"mtp.{m}.norm", first=ROWS - 1)


def _catch_up(s: Step, spec: MtpSpec, m: int) -> None:
    model.rotation(s, spec.attention, "mtp.positions")
    _pair(s, spec, m)
    layer = Layer(s, f"mtp.{m}.layer", LayerSpec(spec.attention, spec.ffn), _WHERE)
    if spec.chained:  # the next head sees this one's states
        layer.add()
        _pass_on(s, spec, m)
    else:
        layer.add_keys()
    s.add(tuple(s.commit))  # these rows are known to be right
    s.commit = []


def _pair(s: Step, spec: MtpSpec, m: int) -> None:
    """From tokens and hidden states to x, what the head's block sees."""
    model_spec, k, quant = s.spec, s.spec.hidden_size, s.spec.quant
    assert quant.embedding is not None and quant.attention is not None
    pair = s.buffer("mtp.pair", "fp16", (s.rows, 2 * k))
    names = {
        "tokens": AHEAD,
        "embed": "embed",
        "hidden": OWN if spec.chained and m else HIDDEN,
        "table": "table.rings",
        "positions": "mtp.positions",
        "token_norm": f"mtp.{m}.token_norm",
        "hidden_norm": f"mtp.{m}.hidden_norm",
        "final_norm": "norm",
        "y": pair,
    }
    eps, scale, ring = model_spec.norm_eps, model_spec.embed_scale, s.rings[HIDDEN_ROWS]
    n = model_spec.vocab_size
    s.add(mtp.pair(s.rows, n, k, quant.embedding, spec, eps, ring, first=m, scale=scale, **names))
    product = {"x": pair, "w": f"mtp.{m}.proj", "y": s.buffer("x", "fp32", (s.rows, k), "output")}
    if s.short:
        tuned = s.tuning.product("linear", k, 2 * k)
        s.add(linear.decode(s.rows, k, 2 * k, quant.attention, out="fp32", tuned=tuned, **product))
    else:
        s.add(linear.prefill(s.rows, k, 2 * k, quant.attention, out="fp32", tuned=s.tuning.many(s.rows), **product))


def _pass_on(s: Step, spec: MtpSpec, m: int) -> None:
    """In a chain, leaves the head's own states for the next one."""
    if spec.chained and m + 1 < spec.heads:
        inputs = {n: f"mtp.{n}" for n in ("positions", "lengths", "counts")} | {"table": "table.rings"}
        rows, ring = s.rows, s.rings[HIDDEN_ROWS]
        s.add(mtp.keep(rows, s.spec.hidden_size, ring, x="x", hidden=OWN, counted=False, **inputs))


def _sample(s: Step, rows: int, position: int, tokens: str, first: int) -> None:
    """From logits to tokens of the processed distribution; the noise is that behind the main model's rows from
    `position` on."""
    vocab, parts = s.spec.vocab_size, sampling.parts(s.spec.vocab_size)
    of = {"logits": "logits", "sequences": "sequences", "floats": "sampling.floats"}
    kept = {
        "tops": s.buffer("sampling.tops", "fp32", (rows, parts, sampling.KEPT)),
        "masses": s.buffer("sampling.masses", "fp32", (rows, parts)),
    }
    limits = s.buffer("sampling.limits", "fp32", (rows, 2))
    scores = {
        "values": s.buffer("sampling.values", "fp32", (rows, parts)),
        "ids": s.buffer("sampling.ids", "i32", (rows, parts)),
    }
    more = {"integers": "sampling.integers", "limits": limits}
    s.add(sampling.chunk_top(rows, vocab, **of, **kept))
    s.add(sampling.threshold(rows, vocab, **of, **kept, **more))
    s.add(sampling.perturb(rows, vocab, positions="positions", first=position, **of, **more, **scores))
    s.add(sampling.best(rows, parts, tokens=tokens, first=first, **scores))


def _accept(s: Step) -> None:
    """`mtp.round` i32: drafts that hold, the token behind them, and what each row's token is followed by."""
    s.buffer(ROUND, "i32", (2 + ROWS,), "output")
    names = {"tokens": AHEAD, "sampled": ROUND, "positions": "positions", "sequences": "sequences", "out": ROUND}
    s.add(sampling.accept(ROWS, 1, first=MAX_DRAFTS, at=2, **names))
