"""What a workload would send, and the best reuse that it allows, without sending anything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from loadtests.arrivals import Closed
from loadtests.prompts import Turn, request_id
from loadtests.reuse import Best, Segment, Units, best
from loadtests.workloads import Plan, planned

# Without a tokenizer: what people reckon with for English.
CHARACTERS_PER_TOKEN = 4
_PREVIEW = 160


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that would be sent.

    Attributes:
        at: Planned seconds from the start; later turns without the time that answers take. ``None`` in a closed loop.
        name: Its id.
        turn: What it says.
    """

    at: float | None
    name: str
    turn: Turn


def requests(plan: Plan, limit: int | None) -> Iterator[Sent]:
    """Requests in the order of their planned times.

    Args:
        plan: The workload.
        limit: Most sessions; a closed loop without an end needs one.

    Raises:
        ValueError: There is no limit and no end.
    """
    if isinstance(plan.arrivals, Closed):
        count = plan.arrivals.sessions if limit is None else limit
        if count is None:
            raise ValueError(
                "a closed loop sends as many sessions as the server answers; say how many to look at"
            )
        if plan.arrivals.sessions is not None:
            count = min(count, plan.arrivals.sessions)
        for number in range(count):
            for index, turn in enumerate(plan.workload.session(number).turns):
                yield Sent(None, request_id(number, index), turn)
        return
    found = []
    for number, arrival in itertools.islice(planned(plan), limit):
        at = arrival.at
        for index, turn in enumerate(plan.workload.session(number).turns):
            at += turn.pause
            found.append(Sent(at, request_id(number, index), turn))
    yield from sorted(found, key=lambda sent: sent.at or 0.0)


@dataclass(frozen=True, slots=True)
class Counting:
    """In what a prompt is counted.

    Attributes:
        unit: Its name for people.
        units: Text to units.
        per_token: Units of a token.
    """

    unit: str
    units: Callable[[str], Units]
    per_token: int


CHARACTERS = Counting("characters", lambda text: text, CHARACTERS_PER_TOKEN)


def tokens_of(path: str) -> Counting:
    """Count tokens of a ``tokenizer.json``.

    Args:
        path: The file.

    Raises:
        ValueError: It cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
    return Counting("tokens", lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 1)


def segments(turn: Turn, counting: Counting) -> list[Segment]:
    """A turn as the ideal caches see it: each message's role, then its pieces."""
    found = []
    for message in turn.messages:
        found.append(Segment(counting.units(f"{message.role}\n")))
        found += [Segment(counting.units(p.text), p.is_span) for p in message.pieces]
    return found


def best_reuse(plan: Plan, sent: Sequence[Sent], counting: Counting) -> Best:
    """What ideal caches would reuse of these requests."""
    prompts = (segments(one.turn, counting) for one in sent)
    scale = counting.per_token
    return best(prompts, plan.form.block_size * scale, plan.gap_length * scale)


def describe(plan: Plan, sent: Sequence[Sent], counting: Counting, show: int) -> Iterator[str]:
    """Lines for the terminal.

    Args:
        plan: The workload.
        sent: Its requests.
        counting: In what prompts are counted.
        show: How many requests to print.
    """
    if not sent:
        yield f"{plan.name}: nothing would be sent"
        return
    arrivals = ", ".join(f"{key} {value}" for key, value in plan.settings["arrivals"].items())
    yield f"{plan.name}: {plan.settings['kind']}, seed {plan.seed}, form {plan.form.name}"
    yield f"arrivals: {arrivals}"
    times = [one.at for one in sent if one.at is not None]
    over = f" over {max(times):.1f} s" if times else ", as fast as they are answered"
    sessions = len({one.name.partition(".")[0] for one in sent})
    yield f"{len(sent)} requests in {sessions} sessions{over}"
    found = best_reuse(plan, sent, counting)
    spans = [one.turn.spans for one in sent]
    answers = [one.turn.max_tokens for one in sent]
    yield (
        f"prompt: {found.units / found.prompts:.0f} {counting.unit} on average, {_share(found.span_units, found)} of "
        f"them in spans; spans per request: {min(spans)} to {max(spans)}, {mean(spans):.1f} on average"
    )
    yield f"answer: {min(answers)} to {max(answers)} tokens, {sum(answers)} in all"
    yield (
        f"best possible reuse of {found.units} {counting.unit} (block {plan.form.block_size}, gap {plan.gap_length} "
        f"tokens{'' if counting.per_token == 1 else f', a token taken as {counting.per_token} characters'}):"
    )
    yield f"  ideal prefix cache {_share(found.prefix_reused, found)}"
    yield f"  ideal span cache   {_share(found.span_reused, found)}, gaps {_share(found.gap_units, found)}"
    for one in sent[:show]:
        path, body = plan.form_for("MODEL", True).request(one.turn)
        at = "" if one.at is None else f" at {one.at:.3f} s"
        yield f"{one.name}{at}: POST {path}"
        yield f"  {_short(json.dumps(body, ensure_ascii=False))}"


def _share(units: int, of: Best) -> str:
    return f"{units / of.units:.1%}" if of.units else "0 %"


def _short(text: str) -> str:
    if len(text) <= 2 * _PREVIEW:
        return text
    return f"{text[:_PREVIEW]} ...({len(text) - 2 * _PREVIEW} more)... {text[-_PREVIEW:]}"
