"""Reads one page from one pod, whatever the pod does: each failure has a state and a reason, and none takes longer than
the time-out or more memory than the limit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from vllm_spans.exporter.page import Page, PageError, parse
from vllm_spans.sizes import format_size

MAX_BYTES = 8 << 20
_TYPES = ("text/plain", "application/openmetrics-text")
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Scrape:
    """What became of one scrape.

    Attributes:
        page: The page; ``None`` when there is none.
        failure: The state of a pod that gave none: ``unreachable``, ``timeout``, ``invalid``, ``too_large`` or
            ``http_error``. Empty when it gave one.
        reason: What happened, for the log.
    """

    page: Page | None = None
    failure: str = ""
    reason: str = ""


class Scraper:
    """Reads pages.

    Args:
        timeout: Seconds that one scrape may take in all.
        max_bytes: Size at which reading is broken off.
    """

    def __init__(self, timeout: float, max_bytes: int = MAX_BYTES) -> None:
        self._timeout = timeout
        self._max_bytes = max_bytes
        # A connection for each scrape: pods come and go, and httpx searches all idle connections at every request.
        self._client = httpx.AsyncClient(
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers=_HEADERS,
            trust_env=False,  # a proxy for the outside is none for pods
        )

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def scrape(self, url: str) -> Scrape:
        """Read the page at an address. Raises nothing but cancellation."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(url)
        except (TimeoutError, httpx.TimeoutException):
            return Scrape(failure="timeout", reason=f"no whole answer within {self._timeout:g} s")
        except PageError as error:
            return Scrape(failure="invalid", reason=str(error))
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            return Scrape(failure="invalid", reason=f"no whole HTTP answer: {error}")
        except Exception as error:  # no pod may stop the scrapes of the others
            return Scrape(failure="unreachable", reason=f"{type(error).__name__}: {error}")

    async def _read(self, url: str) -> Scrape:
        async with self._client.stream("GET", url) as answer:
            if answer.status_code != 200:
                return Scrape(failure="http_error", reason=f"HTTP {answer.status_code}")
            kind = answer.headers.get("content-type", "")
            if not kind.lower().startswith(_TYPES):
                raise PageError(f"content type {kind[:80]!r} is none of metrics")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise PageError("compressed, which was not asked for")
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > self._max_bytes:
                    reason = f"more than {format_size(self._max_bytes)}"
                    return Scrape(failure="too_large", reason=reason)
        return Scrape(page=parse(bytes(body)))
