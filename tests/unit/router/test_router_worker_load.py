"""What a router learns from its legs: costs, queues, waits."""

from __future__ import annotations

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvloop.common.v1 import common_pb2
from services.router.cost_lines import CostLine
from services.router.prompt_sizes import PromptSizes
from services.router.speeds import ASSUMED, SpeedLines, Speeds
from services.router.worker_load import DecodeLoad, PrefillLoad

SPEED = Speeds(100e-6, 4e-9, 0.02, 5e-6, 0.03, 8e-6)


def report(prompt: int, pulled: int = 0, **fields) -> common_pb2.PrefillReport:
    if pulled:
        seconds = SPEED.pull_base + SPEED.pull_token * pulled
        fields["pull_duration"] = fields["expected_pull"] = duration(seconds)
        fields["expected_recompute"] = duration(SPEED.prefill(pulled, 0))
        fields["proven_tokens"] = pulled
    return common_pb2.PrefillReport(
        prompt_tokens=prompt, pulled_tokens=pulled, recomputed_tokens=prompt - pulled, **fields
    )


def duration(seconds: float) -> duration_pb2.Duration:
    made = duration_pb2.Duration()
    made.FromNanoseconds(int(seconds * 1e9))
    return made


class TestCostLine:
    def test_two_sizes_tell_base_and_slope(self) -> None:
        line = CostLine(proportional=True)
        for size in (1000, 5000, 2000, 9000):
            line.add(size, 0.5 + size * 1e-3)
        assert line.base == pytest.approx(0.5)
        assert line.slope == pytest.approx(1e-3)

    def test_one_size_is_all_slope_or_all_base(self) -> None:
        slope, base = CostLine(proportional=True), CostLine(proportional=False)
        for line in (slope, base):
            line.add(1000, 2.0)
        assert (slope.base, slope.slope) == (0.0, 0.002)
        assert (base.base, base.slope) == (2.0, 0.0)

    def test_noise_moves_it_little_and_a_change_moves_it_in_the_end(self) -> None:
        line = CostLine(proportional=False)
        for _ in range(20):
            line.add(1000, 1.0)
        line.add(1000, 10.0)
        assert line.at(1000) < 1.1
        for _ in range(100):
            line.add(1000, 10.0)
        assert line.at(1000) > 5

    @given(
        st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e3), st.floats(0.01, 10)), min_size=1)
    )
    def test_costs_are_never_negative(self, samples) -> None:
        line = CostLine(proportional=True)
        for size, cost, weight in samples:
            line.add(size, cost, weight)
        assert line.base >= 0
        assert line.slope >= 0
        assert line.at(1e6) < 1e12


class TestPrefillLoad:
    def run(self, load: PrefillLoad, prompt: int, pulled: int = 0, now: float = 0.0) -> float:
        """One leg that is alone; returns when it ended."""
        leg = load.started(now, prompt=prompt, held=pulled, in_flight=0)
        now += SPEED.prefill(prompt, pulled)
        load.ended(leg, now, report(prompt, pulled))
        return now

    def test_a_worker_that_says_what_it_expected_has_figures_of_its_own(self) -> None:
        load, other, now = PrefillLoad(), PrefillLoad(), 0.0
        for prompt in (1000, 8000, 16_000, 30_000):
            now = self.run(load, prompt, prompt - 500, now=now)
        assert load.own is not None
        assert load.own.prefill(12_000, 0) == pytest.approx(SPEED.prefill(12_000, 0), rel=0.02)
        expected = SPEED.prefill(12_000, 11_000)
        assert load.own.prefill(12_000, 11_000) == pytest.approx(expected, rel=0.02)
        assert other.own is None

    def test_what_workers_say_counts_for_more_than_what_was_timed(self) -> None:
        load, now = PrefillLoad(), 0.0
        for _ in range(9):  # queues of other routers make it look slow
            leg = load.started(now, prompt=8000, held=0, in_flight=0)
            now += 30 * SPEED.prefill(8000, 0)
            load.ended(leg, now, report(8000))
        for prompt in (4000, 8000, 16_000):
            now = self.run(load, prompt, prompt - 500, now=now)
        assert load.speeds.prefill(8000, 0) == pytest.approx(SPEED.prefill(8000, 0), rel=0.02)

    def test_when_those_that_said_something_have_left_timed_legs_count_again(self) -> None:
        fleet = SpeedLines()
        telling, silent, now = PrefillLoad(fleet), PrefillLoad(fleet), 0.0
        for prompt in (4000, 8000, 16_000):
            now = self.run(telling, prompt, prompt - 500, now=now)
        for legs in range(300):
            leg = silent.started(now, prompt=8000, held=0, in_flight=0)
            now += 30 * SPEED.prefill(8000, 0)
            silent.ended(leg, now, report(8000))
            if legs == 100:
                now = self.run(telling, 8000, 7500, now=now)
        assert fleet.speeds.prefill(8000, 0) == pytest.approx(SPEED.prefill(8000, 0), rel=0.02)
        for _ in range(10):
            leg = silent.started(now, prompt=8000, held=0, in_flight=0)
            now += 30 * SPEED.prefill(8000, 0)
            silent.ended(leg, now, report(8000))
        assert fleet.speeds.prefill(8000, 0) == pytest.approx(30 * SPEED.prefill(8000, 0))

    def test_a_worker_without_figures_has_those_of_its_model(self) -> None:
        fleet = SpeedLines()
        known, new = PrefillLoad(fleet), PrefillLoad(fleet)
        assert new.speeds == ASSUMED
        for now in range(0, 30, 10):
            self.run(known, 4000, now=now)
        assert new.own is None
        assert new.speeds.prefill(4000, 0) == pytest.approx(SPEED.prefill(4000, 0))

    def test_the_queue_is_what_is_left_of_the_legs_in_flight(self) -> None:
        load = PrefillLoad()
        first = load.started(0.0, prompt=10_000, held=0, in_flight=0)  # assumed: a second
        load.started(0.0, prompt=20_000, held=0, in_flight=1)
        assert load.wait(2, 0.0) == pytest.approx(3.0)
        assert load.wait(2, 0.5) == pytest.approx(2.5)
        load.ended(first, 1.0, report(10_000))
        assert load.wait(1, 1.0) == pytest.approx(2.0)

    def test_legs_that_are_overdue_are_expected_to_take_as_long_again(self) -> None:
        load = PrefillLoad()
        load.started(0.0, prompt=10_000, held=0, in_flight=0)
        assert load.wait(1, 31.0) == pytest.approx(30.0)

    def test_more_turns_never_make_an_overdue_worker_look_free(self) -> None:
        load = PrefillLoad()
        load.started(0.0, prompt=50_000, held=0, in_flight=0)  # assumed: five seconds
        waits = [load.wait(1, 10.0)]
        for in_flight in (1, 2):
            load.started(10.0, prompt=50_000, held=0, in_flight=in_flight)
            waits.append(load.wait(in_flight + 1, 10.0))
        waits.append(load.wait(3, 20.0))
        assert waits == pytest.approx([5.0, 10.0, 15.0, 25.0])

    @pytest.mark.parametrize("computed", [True, False])
    def test_a_queued_leg_that_leaves_takes_only_its_own_work_along(self, computed) -> None:
        load = PrefillLoad()
        first = load.started(0.0, prompt=100_000, held=0, in_flight=0)  # assumed: 10 s
        second = load.started(0.0, prompt=10_000, held=0, in_flight=1)
        third = load.started(0.0, prompt=1_000, held=0, in_flight=2)
        if computed:
            load.ended(second, 9.0, report(0))
        else:
            load.gave_up(second, 9.0)
        remembered = load.fading * (load.calm_at - 9.0)
        assert load.wait(2, 9.0) - remembered == pytest.approx(1.0 + 0.1)
        load.gave_up(first, 9.5)
        assert load.wait(1, 9.5) <= remembered + 0.1
        load.gave_up(third, 9.5)
        assert load.wait(0, 20.0) == 0.0

    def test_the_speed_is_told_even_if_queued_legs_are_cut_off(self) -> None:
        load, now = PrefillLoad(), 0.0
        for _ in range(3):
            first = load.started(now, prompt=10_000, held=0, in_flight=0)
            queued = load.started(now, prompt=10_000, held=0, in_flight=1)
            load.gave_up(queued, now + 4.0)
            now += 5.0
            load.ended(first, now, report(10_000))
        assert load.speeds.prefill(10_000, 0) == pytest.approx(5.0)

    def test_what_others_have_in_flight_shows_as_a_wait_and_is_forgotten(self) -> None:
        load = PrefillLoad()
        for now in (0.0, 10.0, 20.0, 30.0):
            leg = load.started(now, prompt=10_000, held=0, in_flight=0)
            load.ended(leg, now + 1.0 + (4.0 if now == 30.0 else 0.0), report(10_000))
        assert load.wait(0, 35.0) == pytest.approx(0.3 * 4.0, rel=0.2)
        assert load.wait(0, 45.1) == 0.0

    def test_legs_beside_each_other_still_tell_the_speed(self) -> None:
        load, now = PrefillLoad(), 0.0
        legs = [load.started(now, prompt=10_000, held=0, in_flight=n) for n in range(4)]
        for leg in legs:  # one after the other, as the engine computes them
            now += SPEED.prefill(10_000, 0)
            load.ended(leg, now, report(10_000))
        assert load.speeds.prefill(10_000, 0) == pytest.approx(SPEED.prefill(10_000, 0))

    def test_a_wrong_guess_of_the_length_is_no_wait(self) -> None:
        load, now = PrefillLoad(), 0.0
        for _ in range(3):
            now = self.run(load, 10_000, now=now)
        calm = load.wait(0, now)
        leg = load.started(now, prompt=1000, held=0, in_flight=0)
        now += SPEED.prefill(10_000, 0)
        load.ended(leg, now, report(10_000))
        assert load.wait(0, now) <= calm

    def test_a_pull_that_was_held_back_teaches_what_it_would_have_taken(self) -> None:
        load, now = PrefillLoad(), 0.0
        for _ in range(3):
            leg = load.started(now, prompt=10_000, held=9_000, in_flight=0)
            now += 1.0
            held_back = common_pb2.PrefillReport(
                prompt_tokens=10_000,
                proven_tokens=9_000,
                recomputed_tokens=10_000,
                miss_reason=common_pb2.MISS_REASON_SLOWER_THAN_RECOMPUTE,
                expected_pull=duration(45.0),
            )
            load.ended(leg, now, held_back)
        assert load.speeds.pull_token == pytest.approx(0.005)
        assert load.speeds.prefill(10_000, 9_000) == load.speeds.prefill(10_000, 0)

    def test_a_leg_that_failed_teaches_nothing(self) -> None:
        load = PrefillLoad()
        for now in range(5):
            load.gave_up(load.started(now, prompt=10_000, held=0, in_flight=0), now + 0.5)
        assert load.own is None
        assert load.wait(0, 5.0) == 0.0


class TestDecodeLoad:
    def test_reading_from_prefill_is_learnt(self) -> None:
        load, now = DecodeLoad(), 0.0
        for tokens in (1000, 20_000, 5000, 9000):
            leg = load.started(now, prompt=tokens + 400, held=400, in_flight=0)
            now += SPEED.hand_over(tokens)
            load.first_chunk(leg, now)
        assert load.speeds.hand_over(15_000) == pytest.approx(SPEED.hand_over(15_000), rel=0.02)

    def test_a_wait_shrinks_with_the_turns_in_flight(self) -> None:
        load, now = DecodeLoad(), 0.0
        for _ in range(5):
            leg = load.started(now, prompt=1000, held=0, in_flight=0)
            now += 0.03
            load.first_chunk(leg, now)
        calm = load.wait(0, now)
        leg = load.started(now, prompt=1000, held=0, in_flight=9)
        now += 10.03
        load.first_chunk(leg, now)
        assert calm < 0.01
        assert load.wait(9, now) == pytest.approx(3.0, rel=0.05)
        assert load.wait(4, now) == pytest.approx(1.5, rel=0.05)

    def test_the_oldest_turn_without_an_answer_says_how_long_the_wait_is_at_least(self) -> None:
        load = DecodeLoad()
        old = load.started(0.0, prompt=0, held=0, in_flight=0)
        load.started(4.0, prompt=0, held=0, in_flight=1)
        assert load.wait(2, 0.01) == 0.0
        assert load.wait(2, 5.0) == pytest.approx(5.0 - ASSUMED.hand_over_base)
        load.gave_up(old, 5.0)
        assert load.wait(1, 5.0) == pytest.approx(1.0 - ASSUMED.hand_over_base)


def test_prompts_are_sized_by_those_before() -> None:
    sizes = PromptSizes()
    assert sizes.tokens("m", 4000) == 1000
    sizes.learn("m", 1000, 500)
    sizes.learn("m", 1000, 0)  # an engine that counts nothing
    assert sizes.tokens("m", 4000) == 2000
    assert sizes.tokens("other", 4000) == 1000


def test_pictures_do_not_change_what_text_is_taken_to_have() -> None:
    sizes = PromptSizes()
    for _ in range(100):
        sizes.learn("m", 20_000, 5000)
        sizes.learn("m", 4_000_000, 1500)
    assert sizes.tokens("m", 20_000) == 5000
    assert sizes.tokens("m", 4_000_000) == 1500


def test_bodies_of_a_new_size_are_like_those_of_the_nearest() -> None:
    sizes = PromptSizes()
    sizes.learn("m", 20_000, 10_000)
    sizes.learn("m", 4_000_000, 1500)
    assert sizes.tokens("m", 2000) == 1000
    assert sizes.tokens("m", 100_000) == 50_000
