"""How large the workloads of the GPU benchmark are."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Documents:
    """A prompt of equal documents, with the goals for it: least ratios of stock's cold TTFT."""

    count: int
    length: int
    warm_goal: float | None = None
    cold_goal: float | None = None

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.count} x {self.length}"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the workloads are.

    Attributes:
        vocabulary: Token ids are below this.
        ttft: Prompts of the TTFT and profile parts.
        repeats: Measurements of each TTFT.
        decode: Batch and context of the decode part.
        decode_steps: Steps of a round; there are three rounds per engine, in turn.
        blocks: Documents of each request of the blocks part; there are as many requests as documents.
        block_tokens: Output tokens there: enough for all requests to be in flight at once.
        pool: Documents of the throughput part's pool.
        picks: Documents of each of its requests.
        requests: How many requests it has, and
        clients: how many at a time.
        gaps: Gap lengths of the sweep; 0 is the policy ``none``.
        lengths: Document lengths of the sweep.
        sweep_tokens: Tokens of all documents in those two.
        contexts: Tokens of all documents in the sweep over context, and
        context_length: of each one there.
        sweep_repeats: Measurements of each TTFT of the sweep.
    """

    vocabulary: int
    ttft: tuple[Documents, ...]
    repeats: int
    decode: tuple[tuple[int, int], ...]
    decode_steps: int
    blocks: Documents
    block_tokens: int
    pool: Documents
    picks: int
    requests: int
    clients: int
    gaps: tuple[int, ...]
    lengths: tuple[int, ...]
    sweep_tokens: int
    contexts: tuple[int, ...]
    context_length: int
    sweep_repeats: int


LARGE = Sizes(
    vocabulary=128000,
    ttft=(Documents(32, 1024, 20.0, 1.0), Documents(16, 512, 6.0, round(1 / 1.1, 3))),
    repeats=5,
    decode=((1, 4096), (16, 4096), (64, 4096)),
    decode_steps=40,
    # Of 1,024 tokens, stock could not hold all requests at once beside a second engine.
    blocks=Documents(32, 256),
    block_tokens=64,
    pool=Documents(256, 512),
    picks=16,
    requests=256,
    clients=64,
    gaps=(0, 16, 32, 64, 128),
    lengths=(256, 512, 1024, 2048, 4096),
    sweep_tokens=32768,
    contexts=(8192, 16384, 32768, 65536, 126976),
    context_length=1024,
    sweep_repeats=2,
)
TINY = Sizes(
    vocabulary=2000,
    ttft=(Documents(4, 128),),
    repeats=3,
    decode=((1, 128), (4, 128)),
    decode_steps=6,
    blocks=Documents(6, 64),
    block_tokens=16,
    pool=Documents(16, 64),
    picks=4,
    requests=12,
    clients=4,
    gaps=(0, 32, 64),
    lengths=(64, 128),
    sweep_tokens=512,
    contexts=(256, 512),
    context_length=128,
    sweep_repeats=2,
)
