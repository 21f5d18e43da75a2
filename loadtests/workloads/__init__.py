"""Workloads: what is sent, and when, as a data file says it (docs/loadtests.md); the same for the same seed."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loadtests.arrivals import Arrival, Arrivals, Bursts, Closed, Constant, Poisson, Ramp
from loadtests.fields import Fields, WorkloadError
from loadtests.forms import FORMS, Form
from loadtests.prompts import Session
from loadtests.workloads.agent import Agent
from loadtests.workloads.conversation import Conversation
from loadtests.workloads.plain import Plain
from loadtests.workloads.questions import Questions
from loadtests.workloads.shared_documents import SharedDocuments
from loadtests.workloads.trace import Trace

__all__ = ["KINDS", "Plan", "Workload", "WorkloadError", "load", "parse", "planned"]

KINDS = ("shared_documents", "conversation", "agent", "plain", "trace", "questions")
_ARRIVALS = ("constant", "poisson", "bursts", "ramp", "recorded", "closed")
_OWN_KEYS = [
    "model",
    "messages",
    "prompt",
    "documents",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "spans",
    "vllm_xargs",
]


class Workload(Protocol):
    """Sessions by number, each made when it is asked for."""

    def session(self, number: int) -> Session:
        """The session of a number, from 0; always the same one."""

    def size(self) -> int | None:
        """How many sessions there are; ``None``: no end."""


@dataclass(frozen=True)
class Plan:
    """A workload file that has been read.

    Attributes:
        name: The file's name without its ending.
        seed: Of everything random in it.
        workload: What is sent.
        arrivals: When.
        form: How, but for the model.
        gap_length: Gap of a reused span in tokens, for the best possible reuse.
    """

    name: str
    seed: int
    workload: Workload
    arrivals: Arrivals
    form: Form
    gap_length: int
    settings: dict[str, Any] = field(default_factory=dict)

    def form_for(self, model: str, marked: bool) -> Form:
        """The form for one server."""
        return dataclasses.replace(self.form, model=model, marked=marked)


def load(path: Path, data: Path | None = None) -> Plan:
    """Read a workload file.

    Args:
        path: The file, in TOML.
        data: The file that a trace or questions are read from; else as the workload file says.

    Raises:
        WorkloadError: It is wrong; the text names the key and the remedy.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{path} is no TOML: {error}") from error
    return parse(settings, path.stem, path.parent, data)


def parse(settings: dict[str, Any], name: str, folder: Path, data: Path | None = None) -> Plan:
    """Check the tables of a workload file and make what they describe.

    Args:
        settings: The tables.
        name: The workload's name.
        folder: Where a relative ``data`` is looked for.
        data: As for ``load``.

    Raises:
        WorkloadError: They are wrong.
    """
    fields = Fields(settings, "")
    kind = fields.choice("kind", KINDS)
    seed = fields.integer("seed", 0)
    form_name = fields.choice("form", FORMS, "parts")

    output = fields.table("output")
    max_tokens = output.span("max_tokens", (32, 32))
    ignore_eos = output.flag("ignore_eos", False)
    temperature = output.number("temperature", 0.0)
    output.finish()

    spans = fields.table("spans")
    form = Form(
        name=form_name,
        model="",
        delimiter=spans.text("delimiter", Form.delimiter),
        block_size=spans.integer("block_size", Form.block_size, low=1),
        vocabulary=spans.span("vocabulary", Form.vocabulary, low=0),
        gap_policy=spans.text("gap_policy") if spans.has("gap_policy") else None,
        gap_length=spans.integer("gap_length", low=1) if spans.has("gap_length") else None,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra=_extra(fields),
    )
    spans.finish()
    if form.vocabulary[1] - form.vocabulary[0] < 2:
        raise WorkloadError("spans.vocabulary holds fewer than two words and a pad; widen it")

    if not fields.has(kind):
        raise WorkloadError(f"the table [{kind}] is missing; it says what such a workload sends")
    own = fields.table(kind)
    workload = _workload(kind, own, seed, max_tokens, data, folder)
    own.finish()
    arrivals = _arrivals(fields.table("arrivals"), workload)
    fields.finish()
    default_gap = 0 if form.gap_policy == "none" else 32
    return Plan(name, seed, workload, arrivals, form, form.gap_length or default_gap, settings)


def planned(plan: Plan) -> Iterator[tuple[int, Arrival]]:
    """Number and time of each session of an open loop, in order.

    Raises:
        WorkloadError: The loop is closed: its times depend on the server.
    """
    if isinstance(plan.arrivals, Closed):
        raise WorkloadError("a closed loop has no planned times")
    return zip(_numbers(plan.workload.size()), plan.arrivals.times(plan.seed), strict=False)


def _numbers(size: int | None) -> Iterator[int]:
    return iter(itertools.count() if size is None else range(size))


def _extra(fields: Fields) -> dict[str, Any]:
    body = fields.free_table("body")
    for key in body:
        if key in _OWN_KEYS:
            raise WorkloadError(f"body.{key} is set by the workload itself; take it out of [body]")
    return body


def _workload(
    kind: str,
    fields: Fields,
    seed: int,
    max_tokens: tuple[int, int],
    data: Path | None,
    folder: Path,
) -> Workload:
    if kind in ("trace", "questions"):
        given = folder / fields.text("data") if fields.has("data") else None
        reader = Trace if kind == "trace" else Questions
        return reader.read(fields, seed, max_tokens, data or given)
    if data is not None:
        raise WorkloadError(f"--data is given, but a workload of the kind {kind} reads no file")
    kinds: dict[str, Any] = {
        "shared_documents": SharedDocuments,
        "conversation": Conversation,
        "agent": Agent,
        "plain": Plain,
    }
    workload: Workload = kinds[kind].read(fields, seed, max_tokens)
    return workload


def _arrivals(fields: Fields, workload: Workload) -> Arrivals:
    kind = fields.choice("kind", _ARRIVALS)
    arrivals: Arrivals
    if kind == "recorded":
        if not isinstance(workload, Trace):
            raise WorkloadError(
                f"{fields.name('kind')} is 'recorded', which only a trace has; choose another kind"
            )
        arrivals = workload.recorded(fields.number("speed", 1.0, above=True))
    elif kind == "ramp":
        arrivals = Ramp(
            first=fields.number("first", above=True),
            last=fields.number("last", above=True),
            steps=fields.integer("steps", low=1),
            step_seconds=fields.number("step_seconds", above=True),
            even=fields.flag("even", False),
        )
    elif kind == "closed":
        arrivals = Closed(
            users=fields.integer("users", low=1),
            duration=fields.number("duration", above=True),
            sessions=fields.integer("sessions", low=1)
            if fields.has("sessions")
            else workload.size(),
        )
    else:
        rate = fields.number("rate", above=True)
        duration = fields.number("duration", above=True)
        if kind == "bursts":
            arrivals = Bursts(rate, duration, fields.integer("size", low=1))
        else:
            arrivals = (Constant if kind == "constant" else Poisson)(rate, duration)
    fields.finish()
    return arrivals
