"""The loop: at every interval each target is scraped, and none waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from vllm_spans.exporter.collector import FleetCollector, OwnMetrics
from vllm_spans.exporter.fleet import Fleet, FleetView, Limits
from vllm_spans.exporter.history import OlderProcessError
from vllm_spans.exporter.quiet_log import QuietLog
from vllm_spans.exporter.scraper import MAX_BYTES, Scrape, Scraper
from vllm_spans.exporter.targets import Source, Target

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
RESULTS = ("ok", "unreachable", "timeout", "invalid", "too_large", "http_error")


@dataclass(frozen=True)
class Settings:
    """How the fleet is scraped.

    Attributes:
        interval: Seconds between two scrapes of a pod.
        timeout: Seconds that one scrape may take.
        concurrency: Scrapes at a time of pods that answered last time, and as many again of those that did not.
        max_bytes: Size at which the reading of a page is broken off.
        limits: Bounds of what is exported.
    """

    interval: float = 15.0
    timeout: float = 5.0
    concurrency: int = 64
    max_bytes: int = MAX_BYTES
    limits: Limits = field(default_factory=Limits)


class Exporter:
    """Scrapes what a source finds.

    Args:
        settings: How.
        watching_since: See ``Fleet``.
    """

    def __init__(self, settings: Settings, watching_since: float | None = None) -> None:
        self._settings = settings
        self.registry = CollectorRegistry()
        self.metrics = OwnMetrics(self.registry, RESULTS)
        self.registry.register(FleetCollector(self.view))
        since = time.time() if watching_since is None else watching_since
        self._fleet = Fleet(since, settings.limits)
        self._lock = threading.Lock()  # the page is written by another thread
        self._log = QuietLog(logger)
        self._names: dict[str, str] = {}
        self._slow: set[str] = set()
        self._in_flight: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = False
        self._source: Source | None = None

    def view(self) -> FleetView:
        """The fleet as it is now."""
        with self._lock:
            return self._fleet.view(time.time())

    def not_ready(self) -> str | None:
        """Why the view is not whole yet; ``None`` once the first cycle over a list of targets has ended."""
        if self._ready:
            return None
        problem = self._source.problem() if self._source is not None else "not started"
        return problem or "the first cycle has not ended"

    async def run(self, source: Source, stop: asyncio.Event) -> None:
        """Scrape until told to stop.

        Args:
            source: Finds the targets. It is started and stopped here.
            stop: Ends the loop.
        """
        self._source = source
        source.start()
        scraper = Scraper(self._settings.timeout, self._settings.max_bytes)
        slots = _Slots(self._settings.concurrency)
        loop = asyncio.get_running_loop()
        try:
            while source.problem() and not source.targets() and not stop.is_set():
                await _wait(stop, _POLL_SECONDS)  # for the first list
            due = loop.time()
            while not stop.is_set():
                self._begin_cycle(scraper, source, slots)
                # A cycle that is late is not made up for by two at once.
                due = max(due + self._settings.interval, loop.time())
                await _wait(stop, due - loop.time())
        finally:
            source.stop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await scraper.close()

    async def run_once(self, source: Source) -> None:
        """Scrape every target once.

        Args:
            source: Finds the targets; it has been started and has a list.
        """
        scraper = Scraper(self._settings.timeout, self._settings.max_bytes)
        self._source = source
        self._begin_cycle(scraper, source, _Slots(self._settings.concurrency))
        await asyncio.gather(*self._tasks)
        await scraper.close()

    def _begin_cycle(self, scraper: Scraper, source: Source, slots: _Slots) -> None:
        began = time.monotonic()
        listed = source.problem() is None
        targets = source.targets()
        self._keep({target.key: target.name for target in targets})
        scrapes = []
        for target in targets:
            if target.key in self._in_flight:
                continue
            self._in_flight.add(target.key)
            own = slots.slow if target.key in self._slow else slots.usual
            scrapes.append(self._start(self._scrape(scraper, target, own)))
        if listed:
            self._start(self._end_cycle(scrapes, began))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _keep(self, names: dict[str, str]) -> None:
        with self._lock:
            self._fleet.keep(names, time.time())
        for key in self._names.keys() - names.keys():
            self._log.forget(self._names[key])
            self._slow.discard(key)
        self._names = names

    async def _end_cycle(self, scrapes: list[asyncio.Task[None]], began: float) -> None:
        await asyncio.gather(*scrapes, return_exceptions=True)
        self.metrics.last_cycle_seconds.set(time.monotonic() - began)
        self._ready = True

    async def _scrape(self, scraper: Scraper, target: Target, slots: asyncio.Semaphore) -> None:
        try:
            if target.url is None:
                self._failed(target, "not_ready", "has no address yet")
                return
            async with slots:
                began = time.monotonic()
                scrape = await scraper.scrape(target.url)
                self.metrics.scrape_seconds.observe(time.monotonic() - began)
            self._take_in(target, scrape)
        except Exception:  # one pod may cost its own sample, never the loop
            logger.exception("%s: its sample is lost", target.name)
        finally:
            self._in_flight.discard(target.key)

    def _take_in(self, target: Target, scrape: Scrape) -> None:
        if scrape.page is not None:
            try:
                with self._lock:
                    state = self._fleet.read(
                        target.key,
                        scrape.page,
                        time.time(),
                        ready=target.ready,
                        incarnation=target.incarnation,
                        started=target.started,
                    )
            except OlderProcessError as error:
                scrape = Scrape(failure="invalid", reason=str(error))
            else:
                self._slow.discard(target.key)
                self.metrics.scrapes.labels("ok").inc()
                if state == "no_spans":
                    self._log.say(target.name, "no_spans: the server has spans switched off")
                else:
                    self._log.well(target.name, "answers")
                return
        self.metrics.scrapes.labels(scrape.failure).inc()
        if scrape.failure == "timeout":
            self._slow.add(target.key)
        self._failed(target, scrape.failure if target.ready else "not_ready", scrape.reason)

    def _failed(self, target: Target, state: str, reason: str) -> None:
        if target.key not in self._names:
            return
        with self._lock:
            self._fleet.fail(target.key, state)
        level = logging.INFO if state == "not_ready" else logging.WARNING
        self._log.say(target.name, f"{state}: {reason}", level)


class _Slots:
    """Scrapes at a time. Pods that hang have slots of their own, so that they keep none from the others."""

    def __init__(self, number: int) -> None:
        self.usual = asyncio.Semaphore(number)
        self.slow = asyncio.Semaphore(number)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
