"""The choice of the number of drafts, against a simulated device whose seconds and acceptance are known."""

import random

import pytest

from mimo_edge.decoding.adaptive import Acceptance, Chooser, Costs, Latest
from mimo_edge.spec import MAX_DRAFTS

RUN, DRAFT, MISSING = (1.0, 1.3, 1.5, 1.7), 0.1, 0.001  # of 1 to 4 rows; of a head; of a head's row to catch up
WINDOW = 130


class Device:
    """Decodes, drafting as a Chooser says. `shares`: of drafts that hold, by position, if all before them do."""

    def __init__(self, seed=0, run=RUN, draft=DRAFT):
        self.random, self.run, self.draft = random.Random(seed), run, draft
        self.costs, self.usual = Costs(), Acceptance(256)
        self.slow = 1.0  # what slows everything down now
        self.change, self.last = 0.5, 0  # what a step of another size than the last costs

    def reply(self, tokens, shares, drafts="auto", ends=False):
        """Seconds of a reply. `ends`: no more drafts than tokens are left."""
        chooser = Chooser(self.costs, self.usual, MAX_DRAFTS)
        made, seconds, behind, self.used = 0, 0.0, WINDOW, [0] * 4
        while made < tokens:
            missing = behind if behind > 1 else 0
            room = min(MAX_DRAFTS, tokens - made - 1) if ends else MAX_DRAFTS
            k = (chooser.choose(room, missing) if room else 0) if drafts == "auto" else drafts
            held = next((i for i in range(k) if self.random.random() >= shares[i]), k)
            draft = k * (self.draft + missing * MISSING) * self.slow
            run = self.run[k] * self.slow
            if k:
                self.costs.drafted(k, missing, draft)
            changed = self.change if k != self.last else 0.0
            self.last = k
            self.costs.ran(1 + k, run + changed, chooser.in_use)
            chooser.learn(k, min(k, held + 1), held, draft + run + changed)
            behind = 0 if k else min(WINDOW, behind + 1)
            made, seconds, self.used[k] = made + held + 1, seconds + draft + run + changed, self.used[k] + 1
        self.chooser = chooser
        return seconds


@pytest.mark.parametrize(
    "shares", [(0.99, 0.98, 0.96), (0.8, 0.8, 0.8), (0.58, 0.55, 0.57), (0.4, 0.3, 0.2), (0.1, 0.1, 0.1), (0, 0, 0)]
)
@pytest.mark.parametrize("tokens", [300, 3000])
def test_it_comes_close_to_the_best_number_of_drafts(shares, tokens):
    device = Device()
    device.reply(200, shares)  # costs get known
    auto = sum(device.reply(tokens, shares) for _ in range(10))
    fixed = [sum(Device(k).reply(tokens, shares, k) for _ in range(10)) for k in range(4)]
    assert auto < 1.06 * min(fixed)
    assert auto < 1.02 * 10 * tokens * RUN[0]  # plain decoding


UNPREDICTABLE, COMMANDS = (0.1, 0.1, 0.1), (0.99, 0.99, 0.99)


@pytest.mark.parametrize("shares", [UNPREDICTABLE, (0, 0, 0)])
def test_unpredictable_text_costs_little(shares):
    """Of replies of 300 tokens: an engine's first, the first after commands, and later ones; changing costs 3 %."""

    def speed(*before, replies=1):
        """Of plain decoding; the mean of engines that have generated `before`."""
        total = 0.0
        for seed in range(8):
            device = Device(seed)
            device.change = 0.03
            for kind in before:
                device.reply(300, kind)
            total += sum(device.reply(300, shares) for _ in range(replies))
        return 8 * replies * 300 * RUN[0] / total

    assert speed() > 0.96
    assert speed(COMMANDS, COMMANDS) > 0.96
    assert speed(shares, COMMANDS, replies=5) > 0.98


def test_commands_in_turns_with_unpredictable_text_lose_little():
    adaptive = fixed = 0.0
    for seed in range(8):
        device, other = Device(seed), Device(seed)
        device.change = other.change = 0.03
        for _ in range(6):
            device.reply(300, UNPREDICTABLE)
            adaptive += device.reply(300, COMMANDS)
            fixed += other.reply(300, COMMANDS, 3)
    assert adaptive < 1.04 * fixed


def test_the_reason_names_both_costs():
    device = Device()
    device.reply(500, (0.9, 0.9, 0.9))
    why = device.chooser.why()
    assert "tokens in 2000.0 ms with 3 drafts, 1 in 1000.0 ms without" in why


def test_where_verifying_is_dear_no_drafts_are_made():
    device = Device(run=(1.0, 2.0, 3.0, 4.0))
    device.reply(2000, (0.9, 0.8, 0.7))
    assert device.used[0] > 0.9 * sum(device.used)


def test_where_more_rows_are_dear_few_drafts_are_made():
    device = Device(run=(1.0, 1.1, 2.6, 3.0))
    device.reply(2000, (0.9, 0.8, 0.7))
    assert device.used[1] > 0.8 * sum(device.used)


def test_text_that_becomes_predictable_is_noticed():
    device = Device()
    device.reply(2000, (0, 0, 0))
    assert device.used[0] > 0.9 * sum(device.used)
    seconds = device.reply(2000, (0.99, 0.98, 0.97))
    assert seconds < 0.75 * 2000 and device.used[3] > 200


def test_a_disturbed_first_measurement_is_got_over():
    device = Device(run=(1.0, 1.3, 1.5, 30.0), draft=3.0)
    device.reply(30, (0.9, 0.9, 0.9))
    device.run, device.draft = RUN, DRAFT
    device.reply(1500, (0.9, 0.9, 0.9))
    assert device.reply(1500, (0.9, 0.9, 0.9)) < 1500 / 1.4


@pytest.mark.parametrize("shares", [(0.1, 0.1, 0.1), (0.9, 0.9, 0.9)])
def test_a_device_that_slows_down_is_no_reason_to_change(shares):
    device = Device()
    device.reply(500, shares)
    used = 0 if shares[0] < 0.5 else 3
    for slow in (2.0, 0.7, 3.0):
        device.slow = slow
        device.reply(500, shares)
        assert device.used[used] > 0.85 * sum(device.used)


def test_it_never_makes_more_drafts_than_there_is_room_for():
    chooser = Chooser(Costs(), Acceptance(256), 3)
    assert [chooser.choose(room, 0) for room in (0, 1, 2, 3)] == [0, 1, 2, 3]


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_short_replies_find_out_that_drafts_do_not_pay(tokens):
    """Hardly any of their steps has the size of the one before it."""
    device = Device(run=(1.0, 2.0, 3.0, 4.0), draft=2.0)
    for _ in range(40):
        device.reply(tokens, COMMANDS, ends=True)
    drafted = 0
    for _ in range(50):
        device.reply(tokens, COMMANDS, ends=True)
        drafted += sum(device.used[1:])
    assert drafted <= 2


def test_a_single_outlier_hardly_counts():
    latest = Latest()
    for seconds in (5.0, 1.0, 1.2, 1.0, 100.0):
        latest.add(seconds)
    assert 1 <= latest.value <= 1.3


def test_costs_between_measured_rows_lie_on_a_line():
    costs = Costs()
    assert costs.run(2) == 0
    for _ in range(2):  # the first of another size is not measured
        costs.ran(1, 1.0)
    assert costs.run(4) == 1.0
    for _ in range(2):
        costs.ran(4, 2.5)
    assert [costs.run(r) for r in (1, 2, 3, 4)] == pytest.approx([1, 1.5, 2, 2.5])
    for _ in range(2):
        costs.ran(2, 9.0)
    assert costs.run(2) == 9.0 and costs.run(1) == 1.0
