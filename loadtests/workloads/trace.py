"""Replay of a recorded trace that says what requests share, but not their text; pure but for reading the file.

The format is that of the traces published with Mooncake: a line of JSON per request with ``timestamp`` (milliseconds),
``input_length`` and ``output_length`` (tokens) and ``hash_ids`` (one id for every 512 tokens; equal ids are equal
content). Text of the right length is made of each id.

A block that several requests hold becomes a span, or a part of one: blocks that only ever occur one after the other,
with nothing else between them, are one text. Blocks of one request alone are ordinary text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.arrivals import Recorded
from loadtests.fields import Fields, WorkloadError
from loadtests.prompts import Message, Piece, Session, Turn
from loadtests.texts import text

BLOCK_TOKENS = 512
_QUESTION = "Go on."


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the trace.

    Attributes:
        at: Seconds from the trace's start.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        blocks: Its blocks' ids.
    """

    at: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]


def parse(lines: Sequence[str], name: str) -> list[Record]:
    """Read the lines of a trace.

    Raises:
        WorkloadError: A line is not in the format; it is named.
    """
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            record = Record(
                float(found["timestamp"]) / 1000.0,
                _count(found["input_length"]),
                _count(found["output_length"]),
                tuple(_count(block) for block in found["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(
                f"{name}:{number} is no line of a trace ({type(error).__name__} {error}); it must be JSON with "
                "timestamp, input_length, output_length and hash_ids"
            ) from error
        if records and record.at < records[-1].at:
            raise WorkloadError(f"{name}:{number} is earlier than the line before; sort the trace")
        records.append(record)
    if not records:
        raise WorkloadError(f"{name} holds no request")
    return records


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def shared_runs(records: Sequence[Record]) -> list[list[tuple[tuple[int, ...], bool]]]:
    """Cut each record's blocks into runs: the blocks of a run, and whether they are shared.

    Two neighbours are in one run if each is followed, or preceded, by the other wherever it occurs, so a run is the
    same blocks in every record that holds any of them.
    """
    uses = Counter(block for record in records for block in record.blocks)
    after: dict[int, set[int | None]] = {}
    before: dict[int, set[int | None]] = {}
    for record in records:
        around: list[int | None] = [None, *record.blocks, None]
        for index, block in enumerate(record.blocks):
            before.setdefault(block, set()).add(around[index])
            after.setdefault(block, set()).add(around[index + 2])
    cut: list[list[tuple[tuple[int, ...], bool]]] = []
    for record in records:
        runs: list[tuple[list[int], bool]] = []
        for block in record.blocks:
            is_shared = uses[block] > 1
            if runs:
                blocks, was_shared = runs[-1]
                is_bound = after[blocks[-1]] == {block} and before[block] == {blocks[-1]}
                if was_shared == is_shared and (is_bound or not is_shared):
                    blocks.append(block)
                    continue
            runs.append(([block], is_shared))
        cut.append([(tuple(blocks), is_shared) for blocks, is_shared in runs])
    return cut


@dataclass(frozen=True)
class Trace:
    """Sessions of one request each, as recorded.

    Attributes:
        seed: The workload's.
        records: The requests.
        runs: Their blocks as ``shared_runs`` cuts them.
        lengths: Tokens of each block, as ``block_lengths`` finds them.
        block_words: Words of a whole block; fewer than 512 shrink prompts in proportion.
        max_tokens: Least and greatest length of an answer: the recorded one is held between them.
    """

    seed: int
    records: tuple[Record, ...]
    runs: tuple[tuple[tuple[tuple[int, ...], bool], ...], ...]
    lengths: dict[int, int]
    block_words: int
    max_tokens: tuple[int, int]

    @classmethod
    def read(
        cls, fields: Fields, seed: int, max_tokens: tuple[int, int], data: Path | None
    ) -> Trace:
        """From the workload's table and the trace's file."""
        limit = fields.integer("requests", 1_000_000, low=1)
        first = fields.integer("first", 0)
        max_blocks = fields.integer("max_blocks", 1_000_000, low=1)
        records = parse(read_lines(data, fields), str(data))[first : first + limit]
        if not records:
            raise WorkloadError(f"{fields.name('first')} is {first}, past the end of the trace")
        records = [
            Record(r.at - records[0].at, r.input_length, r.output_length, r.blocks[:max_blocks])
            for r in records
        ]
        return cls(
            seed=seed,
            records=tuple(records),
            runs=tuple(tuple(runs) for runs in shared_runs(records)),
            lengths=block_lengths(records),
            block_words=fields.integer("block_words", BLOCK_TOKENS, low=1),
            max_tokens=max_tokens,
        )

    def recorded(self, speed: float) -> Recorded:
        """The trace's own arrivals."""
        return Recorded(tuple(record.at for record in self.records), speed)

    def size(self) -> int | None:
        """As many sessions as records."""
        return len(self.records)

    def session(self, number: int) -> Session:
        """One recorded request."""
        record = self.records[number]
        pieces = []
        for blocks, is_shared in self.runs[number]:
            words = " ".join(self._block(block) for block in blocks)
            pieces.append(Piece(words if is_shared else f"{words}\n", is_span=is_shared))
        pieces.append(Piece(_QUESTION))
        low, high = self.max_tokens
        tokens = min(max(record.output_length, low), high)
        return Session(number, (Turn((Message("user", tuple(pieces)),), tokens),))

    def _block(self, block: int) -> str:
        words = max(1, round(self.lengths[block] * self.block_words / BLOCK_TOKENS))
        return text(words, self.seed, "block", block)


def block_lengths(records: Sequence[Record]) -> dict[int, int]:
    """Tokens of each block: 512, but for a prompt's last one. Where records differ the greatest length counts."""
    lengths: dict[int, int] = {}
    for record in records:
        for index, block in enumerate(record.blocks):
            rest = max(1, min(BLOCK_TOKENS, record.input_length - index * BLOCK_TOKENS))
            lengths[block] = max(rest, lengths.get(block, 0))
    return lengths


def read_lines(data: Path | None, fields: Fields) -> list[str]:
    """The lines of the file that a workload is made from.

    Raises:
        WorkloadError: It is not named or cannot be read.
    """
    if data is None:
        raise WorkloadError(f"{fields.name('data')} is missing; name the file there or with --data")
    try:
        return data.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"{data} cannot be read ({error}); name another file with --data"
        ) from error
