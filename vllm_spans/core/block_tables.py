"""Block tables of requests with spans: composed from cached and fresh blocks of vLLM's own pool.

The one place that touches the insides of ``KVCacheManager``, ``SingleTypeKVCacheManager`` and ``BlockPool``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_spans.core.plan import runs

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_spans.core.hashing import Key
    from vllm_spans.core.plan import ReusePlan

_GROUP = 0
"""The only KV cache group: all layers of an engine with spans keep all blocks."""

_KEY_SUFFIX = bytes(make_block_hash_with_group_id(BlockHash(b""), _GROUP))
"""What vLLM appends to a key for the group; looked up thousands of times a request, so built once."""


class SpanBlockTables:
    """Lookup, admission and publication of blocks by key."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._pool = kv_cache_manager.block_pool
        (self._group_manager,) = kv_cache_manager.coordinator.single_type_managers
        self.block_size: int = self._group_manager.block_size

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones that nobody uses included."""
        return self._pool.get_num_free_blocks()

    def find(self, key: Key) -> KVCacheBlock | None:
        """Block that holds the KV of a key."""
        return self._pool.cached_block_hash_to_block.get_one_block(key + _KEY_SUFFIX)  # type: ignore[arg-type]

    def admit(
        self,
        request: Request,
        plan: ReusePlan,
        hits: Sequence[KVCacheBlock | None],
        keep_free: int,
    ) -> bool:
        """Give a request its whole prompt's block table.

        Args:
            request: Holds no block yet.
            plan: Made in this very step, so that its hits are still there.
            hits: Per block of the table the block that ``find`` gave for its key; those that the plan does not
                take are ignored.
            keep_free: Blocks that must stay free.

        Returns:
            False when the pool is too full; nothing has changed then.
        """
        taken = [block for block, hit in zip(hits, plan.hits, strict=True) if hit and block]
        num_fresh = len(plan.hits) - len(taken) - len(plan.aliases)
        evictable = len({block.block_id for block in taken if block.ref_cnt == 0})
        if num_fresh + evictable + keep_free > self._pool.get_num_free_blocks():
            return False
        # Touched first: taking fresh blocks must not evict a hit.
        self._pool.touch(taken)
        fresh = self._pool.get_new_blocks(num_fresh)
        if self._group_manager.records_new_block_ids:
            self._group_manager.new_block_ids.extend(block.block_id for block in fresh)
        next_fresh = iter(fresh)
        table: list[KVCacheBlock] = []
        for index, (block, hit) in enumerate(zip(hits, plan.hits, strict=True)):
            if not hit or block is None:
                alias = plan.aliases.get(index)
                if alias is None:
                    block = next(next_fresh)
                else:
                    block = table[alias]
                    self._pool.touch([block])
            table.append(block)
        request_id = request.request_id
        self._group_manager.req_to_blocks[request_id] = table
        # vLLM publishes from here on by itself; what comes before is published segment by segment.
        self._group_manager.num_cached_block[request_id] = plan.resume_at // self.block_size
        return True

    def table(self, request: Request) -> list[KVCacheBlock]:
        """Block table of an admitted request."""
        return self._group_manager.req_to_blocks[request.request_id]

    def publish(self, block: KVCacheBlock, key: Key) -> None:
        """Make a block's KV findable; the step just scheduled writes it."""
        if block.block_hash is None:
            self._pool._insert_block_hash(
                make_block_hash_with_group_id(key, _GROUP), block, num_tokens=None
            )

    def publish_table(self, request: Request, first: int, last: int) -> None:
        """Publish blocks ``[first, last)`` of a request's table under their keys, with vLLM's KV events."""
        table = self.table(request)
        for start, end in runs(i for i in range(first, last) if table[i].block_hash is None):
            self._pool.cache_full_blocks(
                request=request,
                blocks=table,
                num_cached_blocks=start,
                num_full_blocks=end,
                block_size=self.block_size,
                kv_cache_group_id=_GROUP,
            )

    def watch_published(self, observer: Callable[[KVCacheBlock, bytes], None]) -> None:
        """Tell an observer of every full block that becomes findable, with its key and the group behind it.

        All ways to publish, vLLM's own and those above, end in one method of the pool.
        """
        insert, size = self._pool._insert_block_hash, self.block_size

        def insert_and_tell(key: Any, block: KVCacheBlock, num_tokens: int | None) -> None:
            insert(key, block, num_tokens)
            if (num_tokens is None or num_tokens % size == 0) and block.block_hash == key:
                observer(block, key)

        self._pool._insert_block_hash = insert_and_tell  # type: ignore[method-assign]

    def watch_taken(self, observer: Callable[[Sequence[KVCacheBlock]], None]) -> None:
        """Tell an observer of every block that gets a new owner, vLLM's own requests included."""
        take = self._pool.get_new_blocks

        def take_and_tell(num_blocks: int) -> list[KVCacheBlock]:
            blocks = take(num_blocks)
            observer(blocks)
            return blocks

        self._pool.get_new_blocks = take_and_tell  # type: ignore[method-assign]

    def take(self, count: int) -> list[KVCacheBlock] | None:
        """Take blocks that belong to no table; ``None`` when the pool is too full."""
        if count > self._pool.get_num_free_blocks():
            return None
        return self._pool.get_new_blocks(count)

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep cached blocks from being evicted."""
        self._pool.touch(blocks)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back blocks from ``take`` or ``hold``."""
        self._pool.free_blocks(blocks)
