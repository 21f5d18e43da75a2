"""SpansOffloadingConnector: the tiers as vLLM's KV connector. See docs/offload.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_spans.core.plan import runs
from vllm_spans.offload.metadata import SpansConnectorMetadata, SpansWorkerMetadata
from vllm_spans.offload.settings import OffloadSettings
from vllm_spans.offload.spec import SpansOffloadingSpec
from vllm_spans.offload.tiers import Tiers
from vllm_spans.offload.worker_side import SpansConnectorWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SpansOffloadingConnector(KVConnectorBase_V1, SupportsHMA):
    """One object in the scheduler's process, and one in the worker's.

    Attributes:
        tiers: In the scheduler's process, what the scheduler with spans works with.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = OffloadSettings.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        spec = SpansOffloadingSpec.build(vllm_config, kv_cache_config, settings)
        self._block_size: int = vllm_config.cache_config.block_size
        self.tiers: Tiers | None = None
        self._worker: SpansConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            if settings.files is not None:
                spec.add_file_tier(vllm_config, kv_cache_config, settings)
            workers = vllm_config.parallel_config.world_size
            cost = settings.make_cost_model(self._block_size, spec.kv_bytes_per_chunk)
            self.tiers = Tiers(spec.make_manager(), settings.load_timeout, workers, cost)
        else:
            self._worker = SpansConnectorWorker(spec, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a later miss."""
        return False

    def shutdown(self) -> None:
        """End threads, give memory back."""
        if self._worker is not None:
            self._worker.shutdown()
        if self.tiers is not None:
            self.tiers.shutdown()

    # ---- scheduler ----------------------------------------------------------------------------------------

    def get_computed_token_gaps(
        self, request: Request, num_computed_tokens: int
    ) -> list[tuple[int, int]]:
        """Token ranges of a request that the tiers do not hold, or that are cheaper to compute.

        Only what has been found by now counts as held; the scheduler asks the tiers before.

        Args:
            request: Known to the connector.
            num_computed_tokens: Tokens at its start that are not asked for, a multiple of the block size.

        Returns:
            Half-open ranges after ``num_computed_tokens``, strictly increasing, not adjacent. The last token is
            always in one: it is computed for its logits.
        """
        lookups, size = self._tiers.lookups, self._block_size
        last = (request.num_tokens - 1) // size
        missing = [
            block
            for block in range(num_computed_tokens // size, last)
            if not lookups.holds(request.request_id, request.block_hashes[block])
        ]
        return [
            (start * size, min(end * size, request.num_tokens))
            for start, end in runs([*missing, last])
        ]

    def on_new_request(self, request: Request) -> None:
        """A request arrives."""
        self._tiers.lookups.add_request(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Longest prefix in the tiers, for requests that are not planned by spans."""
        spans = getattr(request, "vllm_spans", None)
        if (spans is not None and spans.keys is not None) or request.skip_reading_prefix_cache:
            return 0, False
        first, last = (
            num_computed_tokens // self._block_size,
            (request.num_tokens - 1) // self._block_size,
        )
        length = self._tiers.lookups.resolve_prefix(
            request.request_id, request.block_hashes[first:last]
        )
        if length is None:
            return None, False
        return length * self._block_size, length > 0

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """All under CPU memory, through which files pass too."""
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load the prefix that vLLM has made room for."""
        if not num_external_tokens:
            # Another connector may have found the prefix first.
            self._tiers.lookups.release(request.request_id)
            return
        found = [
            (key, block)
            for key, block in zip(request.block_hashes, blocks.blocks[0], strict=False)
            if self._tiers.lookups.holds(request.request_id, key)
        ]
        assert len(found) * self._block_size == num_external_tokens
        self._tiers.start_load(request.request_id, found, for_vllm=True)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Jobs of the step."""
        return self._tiers.build_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Book what the worker reports."""
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, SpansWorkerMetadata)
            self._tiers.end_jobs(report.ended)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may go: those of jobs are held by the jobs."""
        self._tiers.lookups.finish_request(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether the worker has a job that must still be reported."""
        return self._tiers.busy

    def reset_cache(self) -> bool:
        """Empty CPU memory."""
        return self._tiers.reset()

    @property
    def _tiers(self) -> Tiers:
        assert self.tiers is not None
        return self.tiers

    # ---- worker -------------------------------------------------------------------------------------------

    @property
    def _jobs(self) -> SpansConnectorMetadata:
        assert isinstance(self._connector_metadata, SpansConnectorMetadata)
        return self._connector_metadata

    @property
    def worker(self) -> SpansConnectorWorker:
        """The worker's side."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the KV cache is."""
        self.worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to do: a block is held until its job ends."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's loads."""
        self.worker.start_loads(self._jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step reads a block before its load is reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored as a whole, at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy what the step published."""
        self.worker.store(self._jobs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests for whose load vLLM's own scheduler waits."""
        return set(), self.worker.end_jobs()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of theirs that were not loaded."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> SpansWorkerMetadata | None:
        """Jobs that ended."""
        return self.worker.take_report()
