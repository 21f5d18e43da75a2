"""One process of the generator: sends its share of the sessions at their times and writes what happens.

It runs under gevent, inside locust. A session is a greenlet; everything that costs time (making text, writing JSON) is
done before a request's time has come, not at it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import gevent
from gevent.pool import Group
from gevent.queue import Queue

from loadtests.arrivals import Closed
from loadtests.forms import Form
from loadtests.job import Job
from loadtests.prompts import Session, Turn, request_id
from loadtests.records import Place, Writer, answer_line, sent_line, unsent_line
from loadtests.stream import Answer
from loadtests.transport import Target, send
from loadtests.workloads import Plan, planned

_TICK = 0.02
_AHEAD = 64  # sessions that are ready before their time
_HEALTH_SECONDS = 1.0
_PAUSE = 1e-3  # between two sessions being made; after a pause of 0 the network and the timers would still wait


@dataclass(frozen=True, slots=True)
class _Prepared:
    path: str
    body: bytes


class Worker:
    """A share of a run.

    Args:
        job: The run.
        index: Which of its workers this is.
        api_key: The server's key.
        on_answer: Called with path and answer of each request that was sent.
    """

    def __init__(
        self, job: Job, index: int, api_key: str | None, on_answer: Callable[[str, Answer], None]
    ) -> None:
        self.plan: Plan = job.plan()
        self._job = job
        self._index = index
        self._form: Form = self.plan.form_for(job.model, job.marked)
        self._target = Target(job.url, api_key, job.limits)
        self._on_answer = on_answer
        self._writer = Writer(job.records_path(index))
        self._group = Group()
        self._ahead: Queue = Queue(_AHEAD)
        self._maker: gevent.Greenlet | None = None
        self._start = 0.0
        self._parent = os.getppid()

    def users(self) -> list[int]:
        """Numbers of the users of a closed loop that are this worker's; one for the whole of an open loop."""
        if isinstance(self.plan.arrivals, Closed):
            return list(range(self._index, self.plan.arrivals.users, self._job.workers))
        return [0]

    # -- phases ---------------------------------------------------------------------------------

    def wait_for_start(self) -> None:
        """Tell that this worker is ready, and wait until all are."""
        if not isinstance(self.plan.arrivals, Closed):
            self._make_first_sessions()
        self._writer.write({"type": "ready", "worker": self._index, "pid": os.getpid()})
        while not self._job.start_path.exists():
            self._end_with_parent()
            gevent.sleep(_TICK)
        self._start = json.loads(self._job.start_path.read_text(encoding="utf-8"))["start"]
        gevent.spawn(self._watch)

    def run_open(self) -> None:
        """Send this worker's sessions at their planned times; returns when all have ended.

        An exception in making them comes out here.
        """
        assert self._maker is not None
        for session, first, arrival in iter(self._ahead.get, None):
            self._sleep_until(arrival.at)
            self._group.spawn(self._session, session, first, arrival.at, arrival.stage)
        self._maker.get()
        self._group.join()

    @property
    def sessions_ahead(self) -> int:
        """Sessions of an open loop that are ready to be sent."""
        return int(self._ahead.qsize())

    def _make_first_sessions(self) -> None:
        # In the first second of the run, making long prompts would delay the ones that are due.
        self._maker = gevent.spawn(self._prepare_ahead)
        while not (self._ahead.full() or self._maker.ready()):
            gevent.sleep(_TICK)

    def _prepare_ahead(self) -> None:
        try:
            for number, arrival in planned(self.plan):
                if number % self._job.workers == self._index:
                    session = self.plan.workload.session(number)
                    self._ahead.put((session, self._prepare(session.turns[0]), arrival))
                    gevent.sleep(_PAUSE)
        finally:
            self._ahead.put(None)

    def run_closed(self, user: int) -> None:
        """One user of a closed loop: session after session until the time is over."""
        arrivals = self.plan.arrivals
        assert isinstance(arrivals, Closed)
        at = 0.0
        for number in arrivals.shares(user):
            session = self.plan.workload.session(number)
            first = self._prepare(session.turns[0])
            self._sleep_until(at)
            if self._now() >= arrivals.duration:
                return
            at = max(at, self._session(session, first, self._now(), 0))

    def finish(self) -> None:
        """Everything has been sent and has ended."""
        self._writer.write({"type": "end", "worker": self._index})

    def cancel(self) -> None:
        """End what is in flight; each request leaves its record."""
        self._group.kill(block=True)

    # -- requests -------------------------------------------------------------------------------

    def _prepare(self, turn: Turn) -> _Prepared:
        path, body = self._form.request(turn)
        return _Prepared(path, json.dumps(body, ensure_ascii=False).encode())

    def _session(self, session: Session, first: _Prepared, at: float, stage: int) -> float:
        """Send the turns of a session; returns when the last one ended."""
        prepared = first
        for index, turn in enumerate(session.turns):
            if index:
                at += turn.pause
                prepared = self._prepare(turn)
                self._sleep_until(at)
            place = Place(session.number, index, stage, at, self._index)
            self._writer.write(sent_line(place))
            answer = self._send(place, prepared)
            assert answer.outcome is not None and answer.ended_at is not None
            at = answer.ended_at - self._start
            if answer.outcome.value != "ok":
                for later in range(index + 1, len(session.turns)):
                    lost = Place(session.number, later, stage, at, self._index)
                    self._writer.write(unsent_line(lost, "the turn before it failed"))
                break
        return at

    def _send(self, place: Place, prepared: _Prepared) -> Answer:
        answer = self._target.answer()
        try:
            send(
                self._target,
                prepared.path,
                prepared.body,
                request_id(place.session, place.turn),
                answer,
            )
        finally:
            self._writer.write(answer_line(place, answer, self._start))
        self._on_answer(prepared.path, answer)
        return answer

    # -- time -----------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _sleep_until(self, at: float) -> None:
        while (wait := at - self._now()) > 0:
            gevent.sleep(wait)

    def _watch(self) -> None:
        """Note how late this process's own timer rings: by so much everything that it measures may be wrong."""
        lag, cpu, begin = 0.0, time.process_time(), self._now()
        while True:
            before = time.monotonic()
            gevent.sleep(_TICK)
            lag = max(lag, time.monotonic() - before - _TICK)
            now = self._now()
            if now - begin >= _HEALTH_SECONDS:
                self._end_with_parent()
                used = time.process_time()
                self._writer.write(
                    {
                        "type": "health",
                        "worker": self._index,
                        "at": round(now, 3),
                        "lag": round(lag, 6),
                        "cpu": round((used - cpu) / (now - begin), 4),
                        "open": len(self._group),
                    }
                )
                lag, cpu, begin = 0.0, used, now

    def _end_with_parent(self) -> None:
        # A runner that was killed cannot end its workers, and nobody would look at what they send.
        if os.getppid() != self._parent:
            os.kill(os.getpid(), signal.SIGTERM)
