"""Rows: virtual requests of one step that write KV and sample nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput

ROW_SAMPLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Rows of all requests share these: nothing of a request's sampling may reach a token that is thrown away."""


@dataclass
class Row:
    """A slice of a token sequence over a block table.

    Attributes:
        row_id: Never equal to a request id.
        tokens: The sequence up to the slice's end and one token more. The worker samples for a sequence whose
            last token it has computed; the extra token keeps this from ever being true.
        block_ids: Blocks of the sequence up to the slice's end.
        start: First token of the slice, its position.
        end: One past its last token.
        lora: Adapter of the request.
    """

    row_id: str
    tokens: Sequence[int]
    block_ids: list[int]
    start: int
    end: int
    lora: LoRARequest | None

    def to_new_request(self) -> NewRequestData:
        """The row as the worker takes it: a new request with a prefill chunk in the middle of its prompt."""
        return NewRequestData(
            req_id=self.row_id,
            prompt_token_ids=list(self.tokens),
            mm_features=[],
            sampling_params=ROW_SAMPLING_PARAMS,
            pooling_params=None,
            block_ids=(self.block_ids,),
            num_computed_tokens=self.start,
            lora_request=self.lora,
            prefill_token_ids=list(self.tokens),
        )


def add_rows(output: SchedulerOutput, rows: Sequence[Row]) -> None:
    """Add rows to a step that is otherwise complete."""
    for row in rows:
        output.scheduled_new_reqs.append(row.to_new_request())
        output.num_scheduled_tokens[row.row_id] = row.end - row.start
        output.total_num_scheduled_tokens += row.end - row.start
