"""Prevents: a judgement of answers that is blunt where it must be sharp, or judges noise."""

from __future__ import annotations

import pytest

from benchmarks.correctness_check import Check
from benchmarks.forced_steps import Answers, Comparison, Step, step_requests
from benchmarks.workloads import Corpus

STEPS = 200


def answers(shift: float = 0.0, flips: int = 0, margin: float = 2.0) -> Answers:
    """One prompt whose steps are off by ``shift``; at the first ``flips`` of them another token is best."""
    steps = []
    for number in range(STEPS):
        scores = {"7": -0.1 - shift, "8": -0.1 - margin - shift, "9": -5.0 - shift}
        if number < flips:
            scores["7"], scores["8"] = scores["8"], scores["7"]
        best = max(scores, key=lambda token: scores[token])
        steps.append(Step(int(best), scores, 0))
    return [steps]


def noisy(noise: float) -> Check:
    check = Check(0.0)
    check.noise("stock", answers(noise), answers())
    return check


@pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (0.019, True), (0.021, False)])
def test_differences_are_judged_by_the_noise(shift: float, passes: bool) -> None:
    check = noisy(0.01)
    check.like_stock("spans", answers(shift), answers())
    assert check.result()["ok"] is passes
    check = noisy(0.01)
    check.different("spans", answers(shift), answers())
    assert check.result()["ok"] is not passes


def test_noise_between_engines_does_not_excuse_one_engine() -> None:
    check = noisy(0.01)
    check.noise("two engines", answers(0.5), answers(), engines=True)
    check.like_stock("spans / stock", answers(0.6), answers())
    assert check.result()["ok"]
    check.unchanged("warm / cold", answers(0.6), answers())
    assert check.result()["failures"] == ["warm / cold"]


@pytest.mark.parametrize(("flips", "passes"), [(6, True), (7, False)])
def test_a_hundredth_of_the_tokens_may_flip_and_what_chance_adds(flips: int, passes: bool) -> None:
    check = Check(0.5)
    check.unchanged("spans", answers(flips=flips, margin=0.4), answers(margin=0.4))
    assert check.result()["ok"] is passes


def test_clear_steps_are_those_that_noise_does_not_flip() -> None:
    comparison = Comparison(answers(flips=3, margin=0.4), answers(margin=0.4))
    assert comparison.result(0.5)["clear_steps"] == 0
    result = comparison.result(0.3)
    assert result["clear_steps"] == STEPS
    assert result["same_clear"] == result["same"] == 1 - 3 / STEPS
    assert result["max"] == pytest.approx(0.4)


def test_a_likely_token_that_the_other_does_not_even_list_counts() -> None:
    left = [[Step(1, {"1": -0.1, "2": -3.0}, 0)]]
    right = [[Step(3, {"3": -0.1, "4": -4.0}, 0)]]
    assert Comparison(left, right).difference.most == pytest.approx(3.9)


@pytest.mark.parametrize(
    ("counts", "some", "passes"),
    [
        ((0, 0), False, True),
        ((0, 32), False, False),
        ((32, 64), True, True),
        ((0, 64), True, False),
    ],
)
def test_states_of_the_cache_are_what_they_are_called(
    counts: tuple[int, int], some: bool, passes: bool
) -> None:
    check = Check(0.0)
    check.cached("state", [[Step(1, {"1": 0.0, "2": -1.0}, count)] for count in counts], some)
    assert check.result()["ok"] is passes


def test_spans_stay_where_they_are_while_the_text_grows() -> None:
    corpus = Corpus(0, 2000, question=5)
    request = corpus.request(corpus.documents(2, 32))
    steps = step_requests(request, [4, 5, 6])
    assert [step["tokens"][69:] for step in steps] == [[], [4], [4, 5]]
    assert all(
        step["extra_args"] == {"span_starts": [0, 32], "cross_span_starts": [64]} for step in steps
    )


def test_no_clear_token_may_flip() -> None:
    check = noisy(0.5)
    check.unchanged("spans", answers(flips=3, margin=3.0), answers(margin=3.0))
    assert not check.result()["ok"]
