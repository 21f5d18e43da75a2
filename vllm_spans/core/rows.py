"""Rows: virtual requests of one step that write KV and sample nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

ROW_SAMPLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Rows of all requests share these: nothing of a request's sampling may reach a token that is thrown away."""

ROW_PREFIX = "vllm-spans-row-"


@dataclass
class Row:
    """A slice of a token sequence over a block table.

    Attributes:
        number: Unique in the engine.
        request_id: The request that the row computes for.
        group: Rows of one group show one sequence over one block table.
        all_tokens: The sequence from its position 0 on, not copied: more than the row needs.
        origin: Index in ``all_tokens`` of the sequence's position 0.
        table: Blocks of the sequence, not copied: more than the row needs.
        start: First token of the slice, its position.
        end: One past its last token.
        lora: Adapter of the request.
    """

    number: int
    request_id: str
    group: str
    all_tokens: Sequence[int]
    origin: int
    table: Sequence[KVCacheBlock]
    start: int
    end: int
    lora: LoRARequest | None

    @property
    def row_id(self) -> str:
        """Never equal to a request id; names the group."""
        return f"{ROW_PREFIX}{self.number}{self.group}"

    def to_new_request(self, block_size: int) -> NewRequestData:
        """The row as vLLM's first model runner takes it: a new request with a prefill chunk inside its prompt.

        The prompt goes one token past the slice. The worker samples for a sequence whose last token it has
        computed; that token keeps this from ever being true.
        """
        tokens = list(self.all_tokens[self.origin : self.origin + self.end + 1])
        return self._data(tokens, 0, block_size)

    def to_short_request(self, block_size: int, leads: bool) -> NewRequestData:
        """The row as ``SpansGPUModelRunner`` takes it: its cost is in proportion to its own tokens.

        Args:
            block_size: Tokens per block.
            leads: Whether attention reads the group's block table from this row; the others bring only the
                blocks that they write to.

        Returns:
            Tokens ``[start, end]`` in place of the whole prompt, and blocks from that of ``start`` on unless the
            row leads.
        """
        tokens = list(self.all_tokens[self.origin + self.start : self.origin + self.end + 1])
        return self._data(tokens, 0 if leads else self.start // block_size, block_size)

    def _data(self, tokens: list[int], first_block: int, block_size: int) -> NewRequestData:
        last_block = -(-self.end // block_size)
        table = [block.block_id for block in self.table[first_block:last_block]]
        return NewRequestData(
            req_id=self.row_id,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=ROW_SAMPLING_PARAMS,
            pooling_params=None,
            block_ids=(table,),
            num_computed_tokens=self.start,
            lora_request=self.lora,
            prefill_token_ids=tokens,
        )


def group_of(row_or_request_id: str) -> str:
    """Group of a scheduled id; a request is the group of its own contextual rows."""
    if row_or_request_id.startswith(ROW_PREFIX):
        return row_or_request_id.removeprefix(ROW_PREFIX).lstrip("0123456789")
    return contextual_group(row_or_request_id)


def contextual_group(request_id: str) -> str:
    """Group of a request's own tokens in its own block table."""
    return f"@{request_id}"


def isolated_group(request_id: str, span: int) -> str:
    """Group of one span of a request, computed alone."""
    return f"span{span}@{request_id}"


def add_rows(output: SchedulerOutput, rows: Sequence[Row], block_size: int, short: bool) -> None:
    """Add rows to a step that is otherwise complete.

    Args:
        output: The step.
        rows: In any order.
        block_size: Tokens per block.
        short: Whether the worker's runner is ``SpansGPUModelRunner``.
    """
    scheduled = output.num_scheduled_tokens
    led_by_request = {group_of(request_id) for request_id, count in scheduled.items() if count > 1}
    last_of_group = {row.group: row for row in sorted(rows, key=lambda row: row.end)}
    for row in rows:
        if short:
            # A row of one token, a request's own too, runs as a decode row: it reads its own table and leads none.
            own = row.end - row.start == 1
            leads = own or (row.group not in led_by_request and last_of_group[row.group] is row)
            data = row.to_short_request(block_size, leads)
        else:
            data = row.to_new_request(block_size)
        output.scheduled_new_reqs.append(data)
    for row in rows:
        scheduled[row.row_id] = row.end - row.start
        output.total_num_scheduled_tokens += row.end - row.start
