"""The generator's process, as locust runs it: ``python -m loadtests run`` starts one for every worker.

An open loop has one locust user that sends all of the worker's sessions at their times; a closed loop has one for every
user. locust's own statistics show TTFT and E2E of each path; the report is made of the workers' records.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from locust import User, events, task
from locust.exception import StopUser

from loadtests.arrivals import Closed
from loadtests.job import JOB_VARIABLE, KEY_VARIABLE, WORKER_VARIABLE, Job
from loadtests.outcome import Outcome
from loadtests.stream import Answer
from loadtests.worker import Worker

_logger = logging.getLogger(__name__)


def _show(path: str, answer: Answer) -> None:
    failure = None if answer.outcome is Outcome.OK else RuntimeError(str(answer.outcome))
    for kind, seconds in (("TTFT", answer.ttft), ("E2E", answer.e2e)):
        if seconds is not None:
            events.request.fire(  # type: ignore[no-untyped-call]
                request_type=kind,
                name=path,
                response_time=seconds * 1000.0,
                response_length=0,
                exception=failure,
                context={},
            )


_worker = Worker(
    Job.read(Path(os.environ[JOB_VARIABLE])),
    int(os.environ[WORKER_VARIABLE]),
    os.environ.get(KEY_VARIABLE),
    _show,
)
_waiting = _worker.users()
_running = len(_waiting)


class SessionUser(User):
    """A user of a closed loop, or all users of an open one."""

    fixed_count = len(_waiting)

    @task
    def run_sessions(self) -> None:
        """All that this user does."""
        global _running
        number = _waiting.pop(0)
        try:
            if isinstance(_worker.plan.arrivals, Closed):
                _worker.run_closed(number)
            else:
                _worker.run_open()
        except Exception:
            # Without `finish` the run counts this worker as dead, which it is.
            _logger.exception("the worker cannot go on")
            self.environment.runner.quit()
            raise StopUser from None
        _running -= 1
        if not _running:
            _worker.finish()
            self.environment.runner.quit()
        raise StopUser


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Any, **_: Any) -> None:
    _worker.wait_for_start()


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _end(environment: Any, **_: Any) -> None:
    _worker.cancel()
    environment.process_exit_code = 0
