"""Prevents: choosing the slower of loading and computing, or being led by one bad measurement for ever."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spans.offload.cost import (
    CPU,
    ENOUGH,
    FILE,
    FIRST_TRY,
    LAST_TRY,
    TIERS,
    WINDOW,
    CostModel,
    Line,
    LinearCost,
    Run,
    StepTimes,
)

SECONDS = st.floats(0, 10)
RUNS = st.lists(st.builds(Run, st.sampled_from(TIERS), st.integers(1, 40)), max_size=6)
LINES = st.builds(Line, st.floats(0, 3), st.floats(1e-4, 0.2))


def learned(line: Line) -> LinearCost:
    """An estimate from samples that lie on a line."""
    cost = LinearCost()
    for size in range(1, WINDOW + 1):
        cost.add(size, line(size))
    return cost


def model_of(copy: Line, read: Line, step: Line) -> CostModel:
    """A model with a block of one token and one byte that has measured three lines."""
    model = CostModel(1, 1)
    model.loads = {CPU: learned(copy), FILE: learned(read)}
    model.steps = learned(step)
    return model


def seconds_of(
    model: CostModel, runs: list[Run], taken: tuple[bool, ...] | list[bool], queued: int
) -> float:
    """What a choice takes, from the description of the model."""
    loaded = [run for run, take in zip(runs, taken, strict=True) if take]
    computed = sum(run.blocks for run in runs) - sum(run.blocks for run in loaded)
    from_files = sum(run.blocks for run in loaded if run.tier == FILE)
    seconds = computed * model.steps.line.per_unit
    if loaded:
        seconds += model.loads[CPU].line(sum(run.blocks for run in loaded))
    if from_files:
        seconds += model.loads[FILE].line(queued + from_files)
    return seconds


@given(LINES, st.data())
def test_a_quarter_of_wild_samples_changes_nothing(line: Line, data: st.DataObject) -> None:
    """As when a step compiles, or storage stalls."""
    sizes = data.draw(
        st.lists(st.integers(1, 10**6), min_size=WINDOW, max_size=WINDOW, unique=True).filter(
            lambda sizes: max(sizes) >= 2 * min(sizes)
        )
    )
    wild = data.draw(st.sets(st.integers(0, WINDOW - 1), max_size=WINDOW // 4))
    cost = LinearCost()
    for index, size in enumerate(sizes):
        cost.add(size, data.draw(st.floats(0, 1e6)) if index in wild else line(size))
    assert cost.line.per_unit == pytest.approx(line.per_unit, rel=1e-6)
    assert cost.line.fixed == pytest.approx(line.fixed, abs=1e-6 * (1 + line(max(sizes))))


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1, 1e6)), max_size=40))
def test_an_estimate_is_never_negative(samples: list[tuple[float, float]]) -> None:
    cost = LinearCost()
    for size, seconds in samples:
        cost.add(size, seconds)
    assert cost.known == (sum(size > 0 for size, _ in samples) >= ENOUGH)
    if cost.known:
        assert cost.line.fixed >= 0 and cost.line.per_unit >= 0
        assert cost.line(10) <= cost.line(20)


def test_equal_sizes_tell_nothing_of_a_fixed_part() -> None:
    cost = LinearCost()
    for _ in range(ENOUGH):
        cost.add(100, 2.0)
    assert cost.line == Line(0.0, 0.02)


@given(RUNS, LINES, LINES, LINES, st.integers(0, 30))
@settings(max_examples=200)
def test_the_choice_is_the_fastest_of_all(
    runs: list[Run], copy: Line, read: Line, step: Line, queued: int
) -> None:
    model = model_of(copy, read, step)
    got = seconds_of(model, runs, model.choose(runs, queued), queued)
    everything = itertools.product([False, True], repeat=len(runs))
    best = min(seconds_of(model, runs, taken, queued) for taken in everything)
    assert got == pytest.approx(best, abs=1e-6)


@given(RUNS, LINES, LINES, LINES, st.integers(0, 30))
@settings(max_examples=200)
def test_a_prefix_is_cut_at_the_best_place(
    runs: list[Run], copy: Line, read: Line, step: Line, queued: int
) -> None:
    """What comes after a run that is not loaded is of no use to a request without spans."""
    model = model_of(copy, read, step)
    taken = model.choose(runs, queued, prefix=True)
    assert taken == sorted(taken, reverse=True)
    lengths = range(len(runs) + 1)
    cuts = [[index < length for index in range(len(runs))] for length in lengths]
    best = min(seconds_of(model, runs, cut, queued) for cut in cuts)
    assert seconds_of(model, runs, taken, queued) == pytest.approx(best, abs=1e-6)


@given(RUNS, st.booleans(), st.sampled_from(["steps", CPU, FILE]))
def test_what_is_not_known_is_loaded(runs: list[Run], prefix: bool, unknown: str) -> None:
    """Loads are ruinous here; a tier is used until enough has been measured to say so."""
    model = model_of(Line(9.0, 9.0), Line(9.0, 9.0), Line(0.0, 1e-9))
    fresh = LinearCost()
    for size in range(1, ENOUGH):
        fresh.add(size, 9.0 * size)
    if unknown == "steps":
        model.steps = fresh
    else:
        model.loads[unknown] = fresh
    taken = model.choose(runs, 0, prefix)
    for index, run in enumerate(runs):
        if unknown in ("steps", CPU) or run.tier == FILE:
            assert taken[index]
        elif not prefix:
            assert not taken[index]
    fresh.add(9, 81.0)
    if unknown != "steps":
        assert not any(model.choose(runs, 0, prefix))


def test_small_runs_share_what_a_job_costs_anyway() -> None:
    """One run alone is not worth its job; three of them are, and so is a file beside what comes from CPU memory."""
    model = model_of(Line(1.0, 0.0), Line(0.5, 0.0), Line(0.0, 0.1))
    assert model.choose([Run(CPU, 4)]) == [False]
    assert model.choose([Run(CPU, 4)] * 3) == [True] * 3
    assert model.choose([Run(FILE, 12)]) == [False]
    assert model.choose([Run(CPU, 12), Run(FILE, 6)]) == [True, True]
    assert model.choose([Run(CPU, 12), Run(FILE, 6)], queued_blocks=0) == [True, True]


def test_a_queue_before_the_files_makes_them_slower() -> None:
    model = model_of(Line(0.0, 0.001), Line(0.0, 0.01), Line(0.0, 0.1))
    assert model.choose([Run(FILE, 10)], queued_blocks=50) == [True]
    assert model.choose([Run(FILE, 10)], queued_blocks=100) == [False]


def test_prefetched_blocks_are_judged_as_if_they_were_there() -> None:
    model = model_of(Line(1.0, 0.0), Line(100.0, 1.0), Line(0.0, 0.1))
    assert model.pays_from_cpu([20]) == [True]
    assert model.pays_from_cpu([5]) == [False]


def test_a_bad_hour_does_not_end_a_tier_for_ever() -> None:
    """Storage was a thousand times slower while the window filled, and is well again; nothing else is ever loaded."""
    model = model_of(Line(0.0, 0.001), Line(0.0, 100.0), Line(0.0, 1.0))
    tried, since = [], 0
    for _ in range(10 * LAST_TRY):
        since += 1
        if model.choose([Run(FILE, 10)]) == [True]:
            tried.append(since)
            since = 0
            model.add_load(FILE, 10, 0.1)
    first, second, third, *later = tried
    assert (first, second, third) == (FIRST_TRY, 2 * FIRST_TRY, 4 * FIRST_TRY)
    assert set(later) == {1}, "used for every request again"


def test_a_tier_that_stays_bad_is_tried_rarely() -> None:
    model = model_of(Line(0.0, 0.001), Line(0.0, 100.0), Line(0.0, 1.0))
    rounds, tries = 4 * LAST_TRY, 0
    for _ in range(rounds):
        if model.choose([Run(FILE, 10), Run(CPU, 3)])[0]:
            tries += 1
            model.add_load(FILE, 10, 1000.0)
    assert 0 < tries <= 6


@given(st.integers(0, 2**32))
def test_the_same_history_gives_the_same_choices(seed: int) -> None:
    def history() -> list[list[bool]]:
        rng = random.Random(seed)
        model = CostModel(32, 4096)
        choices = []
        for _ in range(60):
            model.add_load(rng.choice(TIERS), rng.randint(1, 50), rng.random())
            model.steps.add(rng.randint(1, 2000), rng.random())
            runs = [Run(rng.choice(TIERS), rng.randint(1, 9)) for _ in range(rng.randint(0, 5))]
            choices.append(model.choose(runs, rng.randint(0, 9), rng.random() < 0.3))
        return choices

    assert history() == history()


def test_given_rates_are_not_measured_and_not_tried() -> None:
    model = CostModel(
        32, 1000, cpu_bandwidth=1e9, file_bandwidth=1e3, recompute_tokens_per_second=64
    )
    # Two blocks take a second to compute, and two to read.
    for _ in range(2 * WINDOW):
        model.add_load(FILE, 1, 1e-9)
        model.add_load(CPU, 1, 1e9)
        model.steps.add(1, 1e-9)
    for _ in range(2 * LAST_TRY):
        assert model.choose([Run(CPU, 2), Run(FILE, 2)]) == [True, False]


@given(
    st.lists(
        st.tuples(SECONDS, SECONDS, SECONDS, st.integers(1, 8), st.integers(0, 64)), max_size=20
    ),
    st.booleans(),
)
def test_the_time_of_steps_in_a_row_is_counted_once(
    history: list[tuple[float, float, float, int, int]], ahead: bool
) -> None:
    """With asynchronous scheduling a step is planned while the one before still runs."""
    now, samples = 0.0, []
    times = StepTimes(lambda tokens, seconds: samples.append((tokens, seconds)), lambda: now)
    expected = []
    running: tuple[object, float, int, int] | None = None
    last_end = 0.0

    def end(step: tuple[object, float, int, int]) -> None:
        nonlocal last_end
        name, planned, sequences, tokens = step
        times.end(name, sequences, tokens)
        if tokens >= 2 * sequences:
            expected.append((tokens, now - max(planned, last_end)))
        last_end = now

    for idle, before, after, sequences, tokens in history:
        now += idle
        step = (object(), now, sequences, tokens)
        times.begin(step[0])
        now += before
        if running is not None:
            end(running)
        now += after
        running = step
        if not ahead:
            end(step)
            running = None
    assert samples == expected
    assert sum(seconds for _, seconds in samples) <= now


def test_steps_without_an_end_are_passed_over() -> None:
    now = 0.0
    cost = LinearCost()
    times = StepTimes(cost.add, lambda: now)
    lost, kept = object(), object()
    times.begin(lost)
    now = 5.0
    times.begin(kept)
    now = 6.0
    times.end(object(), 1, 10)
    for _ in range(ENOUGH):
        times.end(kept, 1, 10)
        times.begin(kept)
        now += 1.0
    times.end(kept, 1, 10)
    assert cost.line == Line(0.0, 0.1)
