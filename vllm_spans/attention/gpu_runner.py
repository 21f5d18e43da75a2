"""vLLM's GPU model runner with rows whose cost on the host is in proportion to their own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_spans.attention.batch_order import prefill_longest_first
from vllm_spans.attention.cuda_metadata import step_rows
from vllm_spans.core.rows import ROW_PREFIX

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import BatchReqState


class SpansGPUModelRunner(GPUModelRunner):
    """Stages a row's own tokens and blocks only, and tells the attention which rows a step has."""

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        new = scheduler_output.scheduled_new_reqs
        rows = [data for data in new if data.req_id.startswith(ROW_PREFIX)]
        if rows:
            for row in rows:
                self._add_row(row)
            requests = [data for data in new if not data.req_id.startswith(ROW_PREFIX)]
            super().add_requests(replace(scheduler_output, scheduled_new_reqs=requests))
            if not requests:
                self.req_states.apply_staged_writes()
            return
        super().add_requests(scheduler_output)

    def _add_row(self, row: NewRequestData) -> None:
        """What the stock method does for a request, without the tokens and blocks that the row does not need."""
        assert row.prefill_token_ids is not None and row.sampling_params is not None
        states, start = self.req_states, row.num_computed_tokens
        total = start + len(row.prefill_token_ids)
        index = states.free_indices.pop()
        states.req_id_to_index[row.req_id] = index
        states.index_to_req_id[index] = row.req_id
        states.max_seq_len[index] = total + 1
        states.prompt_len.np[index] = states.prefill_len.np[index] = total
        states.total_len.stage_write_elem(index, total)
        states.all_token_ids.stage_write(index, start, row.prefill_token_ids)
        states.num_computed_prefill_tokens[index] = start
        states.num_computed_tokens_np[index] = start
        states.num_computed_tokens.stage_write_elem(index, start)

        (table,) = self.block_tables.block_tables
        (block_ids,) = row.block_ids
        # Blocks up to that of the last token but one: the last is never computed.
        num_blocks = -(-(total - 1) // self.block_tables.block_sizes[0])
        table.stage_write(index, num_blocks - len(block_ids), block_ids)
        self.block_tables.num_blocks.np[0, index] = num_blocks
        self.lora_state.add_request(row.req_id, index, row.lora_request)
        if self.is_last_pp_rank:
            assert self.sampler is not None
            self.sampler.add_request(index, row.sampling_params)
            assert self.prompt_logprobs_worker is not None
            self.prompt_logprobs_worker.add_request(row.req_id, index, row.sampling_params)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        batch, uniform_tokens = super().gather_batch_req_state(scheduler_output, dummy_run)
        # A step without rows keeps stock's order, so that span-free answers are stock's.
        if batch is not None and any(row.startswith(ROW_PREFIX) for row in batch.req_ids):
            batch = prefill_longest_first(batch)
        return batch, uniform_tokens

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        step_rows.ids = batch.req_ids
        return batch

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            step_rows.ids = None
