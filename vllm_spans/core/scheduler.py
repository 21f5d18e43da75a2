"""vLLM's schedulers with spans: rows first, then vLLM's own step with what budget is left.

A request with spans is *prepared* before vLLM admits it: it gets its whole block table, and its segments run as
rows over as many steps as they need. While that lasts it waits with blocks in hand, as a request does whose KV
vLLM loads from elsewhere. In the step that runs its last rows vLLM admits it with ``num_computed_tokens`` at the
start of its last contextual segment; from there on it is an ordinary request.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_spans.core.asking import Asking
from vllm_spans.core.block_tables import SpanBlockTables
from vllm_spans.core.connectors import PrefixConnectors, connector_with_gaps
from vllm_spans.core.identity import announce
from vllm_spans.core.plan import make_plan
from vllm_spans.core.preparation import Preparation, RowBudget
from vllm_spans.core.rows import add_rows
from vllm_spans.metrics.stats import SpanStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from vllm_spans.core.request_spans import RequestSpans
    from vllm_spans.core.rows import Row
    from vllm_spans.offload.tiers import Tiers

logger = logging.getLogger(__name__)


class SpanSchedulerMixin(Scheduler):
    """What spans add to either scheduler of vLLM."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.hash_block_size != self.block_size:
            raise ValueError(
                f"spans need one block size: --hash-block-size {self.hash_block_size} differs from "
                f"--block-size {self.block_size}; drop the flag"
            )
        self._config = announce(self.vllm_config).config
        self._tables = SpanBlockTables(self.kv_cache_manager)
        self._preparation = Preparation(self._tables, self.block_size)
        # Requests with spans that wait without a plan.
        self._unplanned: set[str] = set()
        # Requests that hold a block table while their rows run, in order of admission.
        self._preparing: dict[str, Request] = {}
        self._rows: list[Row] = []
        self._span_stats = SpanStats()
        # CPU memory and files behind the KV cache; without our connector there are none.
        self._gaps_connector = connector_with_gaps(self.connector)
        self._tiers: Tiers | None = self._gaps_connector.tiers if self._gaps_connector else None
        self._prefix_connectors = PrefixConnectors(
            self.connector, self._tables, lambda: self.reset_preempted_req_ids
        )
        self._asking: Asking | None = None
        if self._tiers is not None:
            self._tiers.attach(self._tables, self._span_stats)
            self._asking = Asking(
                self._tiers.lookups, self._tables, self.kv_cache_manager, self.block_size
            )

    # ---- vLLM's hooks -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        spans = _spans_of(request)
        if is_new and spans is not None and spans.keys is not None:
            self._unplanned.add(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._preparation.release_heads()
        if self._tiers is not None:
            self._end_loads(self._tiers)
        with_spans = bool(self._unplanned or self._preparing)
        if with_spans:
            self._rows = self._pick_rows(throttle_prefills)
        if self._asking is not None:
            self._asking.prefetch(self.waiting)
        with self._budget_without(self._rows) if with_spans else nullcontext():
            output = super().schedule(throttle_prefills)
        if self._tiers is not None:
            self._tiers.begin_step(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._tiers is not None:
            self._tiers.end_step(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for data in scheduler_output.scheduled_new_reqs:
            self._preparing.pop(data.req_id, None)
            spans = _spans_of(self.requests[data.req_id])
            if spans is not None and spans.keys is None:
                self._span_stats.count_full(spans, data.num_computed_tokens)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._preparing.pop(request_id, None)
        if self._rows:
            if self.defer_block_free:
                self._fence_rows(scheduler_output)
            # vLLM looks every scheduled id up in its own requests, so rows come after it is done.
            add_rows(scheduler_output, self._rows, self.block_size, short=self.use_v2_model_runner)
            self.finished_req_ids.update(row.row_id for row in self._rows)
            self._rows = []

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        self._prefix_connectors.announce_taken()
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        spans = _spans_of(request)
        if spans is not None and not spans.prepared:
            return False
        if self._asking is not None and request.request_id in self._asking.waiting:
            return False
        return self._lora_fits(request)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        if request.request_id in self._unplanned or request.request_id in self._preparing:
            # In preparation with nothing in front of its own segment: its table is complete already.
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        return super()._get_local_prefix_cache_hit(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        if request.request_id in self._unplanned:
            # No room for it yet: vLLM ends its scan here, so that nothing overtakes the request for ever.
            return 0
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _free_request_blocks(self, request: Request) -> None:
        spans = _spans_of(request)
        if spans is not None and spans.keys is not None:
            self._forget_plan(request, spans)
            if not request.is_finished():
                self._unplanned.add(request.request_id)
                self._prefix_connectors.forget_table(request)
        if self._tiers is not None and not request.is_finished():
            self._tiers.withdraw(self._tables.table(request))
            self._tiers.lookups.release(request.request_id)
        super()._free_request_blocks(request)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if self._connector_busy or any(
            request.request_id not in self._preparing for request in self.kv_holding_waiting
        ):
            # A block cannot be taken from a job, nor from a request that waits with what was loaded; vLLM would raise.
            return False
        if reset_running_requests:
            for request in reversed(list(self._preparing.values())):
                self._put_back(request)
        self._preparation.release_heads()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.spans = self._span_stats.take()  # type: ignore[attr-defined]
        return stats

    # ---- rows ---------------------------------------------------------------------------------------------

    def _pick_rows(self, throttle_prefills: bool) -> list[Row]:
        """Choose the rows of this step, for requests in preparation first, then for waiting ones."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return []
        if throttle_prefills and any(not request.is_prefill_chunk for request in self.running):
            return []
        budget = self._row_budget()
        rows: list[Row] = []
        for request in list(self._preparing.values()):
            rows += self._rows_of(request, budget)
        if self._pause_state == PauseState.UNPAUSED and self._unplanned:
            rows += self._plan_waiting(budget)
        if not rows and not self.running:
            self._break_deadlock()
        return rows

    def _row_budget(self) -> RowBudget:
        """What this step has left after the running requests, which were admitted earlier."""
        wanted = sum(
            max(
                0,
                request.num_tokens_with_spec
                + request.num_output_placeholders
                - request.num_computed_tokens,
            )
            for request in self.running
        )
        running = len(self.running) + self.num_waiting_for_streaming_input
        return RowBudget(
            tokens=max(0, self.max_num_scheduled_tokens - wanted),
            rows=max(0, self.max_num_running_reqs - running),
            requests=max(0, self.max_num_active_reqs - running - len(self._preparing)),
        )

    def _plan_waiting(self, budget: RowBudget) -> list[Row]:
        """Prepare waiting requests in queue order, as long as those in front of them have room too."""
        rows: list[Row] = []
        free = self._tables.num_free
        ahead_blocks = 0
        for request in list(self.waiting):
            if budget.requests <= 0 or budget.tokens <= 0 or not self._unplanned:
                break
            if request.request_id not in self._unplanned:
                if self._is_blocked_waiting_status(request.status):
                    continue
                budget.requests -= 1
                budget.tokens -= request.num_tokens - request.num_computed_tokens
                ahead_blocks += -(-request.num_tokens // self.block_size)
                if ahead_blocks > free:
                    break
                continue
            if not super()._handle_blocked_waiting_request(request):
                continue
            if request.num_stale_output_tokens and not request.drop_stale_output:
                continue
            if not self._lora_fits(request, rows):
                continue
            spans = _spans_of(request)
            assert spans is not None
            if self._asking is not None and not self._asking.is_answered(request, spans):
                continue
            if not self._prepare(request, keep_free=ahead_blocks):
                break
            budget.requests -= 1
            new_rows = self._rows_of(request, budget)
            rows += new_rows
            if spans.prepared:
                budget.tokens -= request.num_tokens - request.num_computed_tokens
        return rows

    def _prepare(self, request: Request, keep_free: int) -> bool:
        """Plan a request and give it its block table; False when blocks are short."""
        spans = _spans_of(request)
        assert spans is not None and spans.keys is not None
        hits: list[KVCacheBlock | None] = [None] * -(-request.num_tokens // self.block_size)
        find = self._tables.find
        if readable := self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            for index, key in enumerate(request.block_hashes):
                hits[index] = find(key)
        plan = make_plan(
            spans.layout,
            spans.policy,
            self.block_size,
            request.num_tokens,
            [block is not None for block in hits],
            spans.keys.span_keys,
            lambda key: readable and find(key) is not None,
            self._loadable(request) if readable else (),
        )
        watermark = self.kv_cache_manager.watermark_blocks if self.running else 0
        keep_free += watermark + self._reserved_for_loads()
        if not self._tables.admit(request, plan, hits, keep_free):
            return False
        self._preparation.begin(spans, plan)
        if self._tiers is not None:
            self._start_load(request, spans, self._tiers)
        self._unplanned.discard(request.request_id)
        self._preparing[request.request_id] = request
        request.num_computed_tokens = plan.resume_at
        self.waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self.kv_holding_waiting.add_request(request)
        loaded_tokens = len(plan.loads) * self.block_size
        if request.prefill_stats is not None and request.num_preemptions == 0:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=plan.cached_tokens - loaded_tokens,
                num_external_cached_tokens=loaded_tokens,
            )
        if plan.resume_at:
            # vLLM records those that it sees without computed tokens.
            self.kv_cache_manager.record_prefix_cache_stats(
                request, plan.cached_tokens - loaded_tokens
            )
        if spans.loaded:
            self._span_stats.count_plan(spans)
        if self._config.debug:
            logger.info(
                "%s: %d spans, %d of %d span tokens reused, %d isolated, %d gap tokens, %d segments, resumes at %d",
                request.request_id,
                len(spans.layout.spans),
                plan.reused_tokens,
                plan.lookup_tokens,
                plan.isolated_tokens,
                plan.gap_tokens,
                len(plan.segments),
                plan.resume_at,
            )
        return True

    def _rows_of(self, request: Request, budget: RowBudget) -> list[Row]:
        spans = _spans_of(request)
        assert spans is not None
        return self._preparation.take_rows(request, spans, budget, self._span_stats)

    def _break_deadlock(self) -> None:
        """Free the newest request in preparation when nothing can go on for want of blocks.

        A lone request that cannot go on never will, unless a session that waits for input holds blocks or row slots. It
        grew past what the cache holds beside the isolated KV under its gaps, and is ended as vLLM ends a request whose
        grammar cannot be compiled.
        """
        spans_of = {request: _spans_of(request) for request in self._preparing.values()}
        ready = [request for request, spans in spans_of.items() if spans and spans.prepared]
        if ready:
            # They have all they need, and wait behind one that does not.
            self.kv_holding_waiting.remove_requests(ready)
            for request in reversed(ready):
                self.kv_holding_waiting.prepend_request(request)
            return
        stuck = [request for request, spans in spans_of.items() if spans and spans.todo]
        if not stuck or len(stuck) < len(self._preparing):
            return
        if self._connector_busy:
            # The end of a job lets a request go on, or frees blocks.
            return
        if len(stuck) > 1:
            self._put_back(stuck[-1])
            return
        if self.num_waiting_for_streaming_input:
            return
        logger.error(
            "%s needs more KV blocks than there are for its %d tokens and its gaps: it is ended. Lower its gap length "
            "or enlarge the KV cache.",
            stuck[0].request_id,
            stuck[0].num_tokens,
        )
        self.grammar_compile_error_reqs.add(stuck[0].request_id)

    def _put_back(self, request: Request) -> None:
        """Take a request out of preparation, back to the head of the waiting queue, without its blocks."""
        logger.debug("%s goes back to the waiting queue", request.request_id)
        self.kv_holding_waiting.remove_requests([request])
        self.waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self._free_request_blocks(request)
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)

    def _forget_plan(self, request: Request, spans: RequestSpans) -> None:
        self._preparing.pop(request.request_id, None)
        self._unplanned.discard(request.request_id)
        if self._asking is not None:
            self._asking.waiting.discard(request.request_id)
        self._preparation.abandon(spans)

    def _fence_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Let vLLM know that this step writes to the blocks of requests in preparation.

        With a connector it gives blocks back only when the last step that may write them has ended. It counts steps
        with tokens, and has not seen those of the rows.
        """
        if not scheduler_output.total_num_scheduled_tokens:
            self.sched_step_seq += 1
        for request_id in {row.request_id for row in self._rows}:
            self.requests[request_id].last_sched_seq = self.sched_step_seq

    # ---- other tiers --------------------------------------------------------------------------------------

    @property
    def _connector_busy(self) -> bool:
        """Whether a connector has jobs on their way."""
        return self.connector is not None and self.connector.has_pending_push_work()

    def _loadable(self, request: Request) -> list[bool]:
        """Per block of a request whether the tiers hold it: whatever is not in a gap of the connector."""
        if self._gaps_connector is None:
            return []
        loadable = [True] * -(-request.num_tokens // self.block_size)
        for start, end in self._gaps_connector.get_computed_token_gaps(request, 0):
            first, last = start // self.block_size, -(-end // self.block_size)
            loadable[first:last] = [False] * (last - first)
        return loadable

    def _start_load(self, request: Request, spans: RequestSpans, tiers: Tiers) -> None:
        """Let the tiers fill the blocks that the plan takes from them; what it does not take is let go."""
        assert spans.plan is not None
        table, keys = self._tables.table(request), request.block_hashes
        for block in spans.plan.loaded_spans:
            tier = tiers.lookups.tier_of(request.request_id, keys[block])
            spans.loaded_tokens[tier] = spans.loaded_tokens.get(tier, 0) + self.block_size
        if spans.plan.loads:
            found = [(keys[block], table[block]) for block in spans.plan.loads]
            spans.load_job = tiers.start_load(request.request_id, found)
        tiers.lookups.release(request.request_id)

    def _reserved_for_loads(self) -> int:
        """Blocks that requests without spans still need whose prefix is being loaded, or has just been.

        vLLM admits such a load only if the rest of its prompt finds room too, and scans no further while it does not.
        """
        if self.connector is None:
            return 0
        return sum(
            self._request_remaining_blocks(request)
            for request in self._inflight_prefills
            if request.status != RequestStatus.RUNNING
        )

    def _end_loads(self, tiers: Tiers) -> None:
        """Let requests go on whose load has ended; one whose load failed is planned again, without the tiers."""
        for load in tiers.take_ended():
            request = self._preparing.get(load.request_id)
            spans = _spans_of(request) if request is not None else None
            if request is None or spans is None or spans.load_job != load.job_id:
                continue
            if load.success:
                spans.load_job = None
                self._span_stats.count_plan(spans)
            else:
                self._put_back(request)

    # ---- budgets ------------------------------------------------------------------------------------------

    @contextmanager
    def _budget_without(self, rows: list[Row]) -> Iterator[None]:
        """Let vLLM's own step see the budgets less what the rows use."""
        tokens, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.max_num_scheduled_tokens = tokens - sum(row.end - row.start for row in rows)
        self.max_num_active_reqs = min(active, self.max_num_running_reqs - len(rows))
        try:
            yield
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = tokens, active

    def _lora_fits(self, request: Request, rows: list[Row] | None = None) -> bool:
        """Whether a step with this request needs no more adapters than the worker holds."""
        if self.lora_config is None or request.lora_request is None:
            return True
        rows = self._rows if rows is None else rows
        used = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        used.update(row.lora.lora_int_id for row in rows if row.lora)
        used.update(r.lora_request.lora_int_id for r in self._preparing.values() if r.lora_request)
        used.add(request.lora_request.lora_int_id)
        return len(used) <= self.lora_config.max_loras

    # ---- for `explain` ------------------------------------------------------------------------------------

    @property
    def tiers(self) -> Tiers | None:
        """CPU memory and files behind the KV cache."""
        return self._tiers

    def cached_block(self, key: bytes) -> KVCacheBlock | None:
        """Block that holds the KV of a key, without touching it."""
        return self._tables.find(key)


def _spans_of(request: Request) -> RequestSpans | None:
    return getattr(request, "vllm_spans", None)


class SpanScheduler(SpanSchedulerMixin, Scheduler):
    """vLLM's synchronous scheduler with spans."""


class SpanAsyncScheduler(SpanSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with spans."""


__all__ = ["SpanAsyncScheduler", "SpanScheduler", "SpanSchedulerMixin"]
