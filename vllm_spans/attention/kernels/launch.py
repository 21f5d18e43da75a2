"""How the decode kernel is launched: the swept shapes, and what of them fits a device's shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class DecodeConfig:
    """What the sweep chooses.

    Attributes:
        tokens: Tokens of a stream in one tile, a power of two from 16.
        heads: Most KV heads of a program, a power of two; fewer where the rank's KV heads are no multiple of it.
        warps: Warps per program. Warps beyond the slices of the heads take further tokens of the same heads.
        stages: Depth of Triton's pipeline; 1 is none, 2 copies the next tile while nothing is computed, 3 during the
            computation.
        programs: Programs per multiprocessor; best as many as fit at one time.
        registers: Most registers of a thread, 0 for no limit.
    """

    tokens: int
    heads: int
    warps: int
    stages: int
    programs: int
    registers: int = 0

    def heads_of(self, kv_heads: int) -> int:
        """KV heads of a program: the largest power of two up to ``heads`` that divides ``kv_heads``."""
        return min(self.heads, kv_heads & -kv_heads)


# By padded head size and bytes per KV element; found by the sweep of benchmarks/decode_sweep.py. There is no
# triton.autotune: it would run inside graph capture and at start-up.
_CONFIGS = {
    (64, 1): DecodeConfig(tokens=32, heads=2, warps=2, stages=2, programs=4),
    (64, 2): DecodeConfig(tokens=16, heads=4, warps=4, stages=2, programs=4),
    (64, 4): DecodeConfig(tokens=16, heads=2, warps=2, stages=2, programs=4),
    (128, 1): DecodeConfig(tokens=16, heads=2, warps=2, stages=2, programs=6),
    (128, 2): DecodeConfig(tokens=16, heads=2, warps=2, stages=2, programs=4, registers=200),
    (128, 4): DecodeConfig(tokens=16, heads=2, warps=4, stages=2, programs=2),
    (256, 2): DecodeConfig(tokens=16, heads=1, warps=2, stages=2, programs=4),
}
_ONE_KV_HEAD = {
    (128, 2): DecodeConfig(tokens=16, heads=1, warps=1, stages=2, programs=8),
}
"""For a rank with one KV head, as under tensor parallelism, where another shape was found better."""
_WIDER = DecodeConfig(tokens=16, heads=2, warps=4, stages=2, programs=2)

_SLICE_BYTES = 256
"""Most of a query head that a warp holds: with K and output, more than that does not fit its registers."""


@dataclass(frozen=True)
class Launch:
    """A configuration applied to one shape.

    Attributes:
        config: The configuration.
        heads: KV heads of a program.
        slices: Slices that a head's elements lie in, each in a stream of its own.
        parts: Runs of tokens in a tile, each a stream per slice of a head.
        q_rows: Query heads of a KV head, padded.
        head_padded: Elements of a head, padded.
        itemsize: Bytes per element of KV.
        operand_size: Bytes per element as it is multiplied: 2, or 4 where queries are float32.
    """

    config: DecodeConfig
    heads: int
    slices: int
    parts: int
    q_rows: int
    head_padded: int
    itemsize: int
    operand_size: int

    @classmethod
    def of(
        cls,
        config: DecodeConfig,
        kv_heads: int,
        group: int,
        head_padded: int,
        itemsize: int,
        operand_size: int,
    ) -> Launch:
        """Apply ``config`` to ``kv_heads`` heads of ``group`` queries."""
        heads = config.heads_of(kv_heads)
        slices = triton.cdiv(head_padded * operand_size, _SLICE_BYTES)
        return cls(
            config=config,
            heads=heads,
            slices=slices,
            parts=max(1, config.warps // (heads * slices)),
            q_rows=max(8, triton.next_power_of_2(group)),
            head_padded=head_padded,
            itemsize=itemsize,
            operand_size=operand_size,
        )

    @property
    def shared_bytes(self) -> int:
        """Bound of the shared memory of a program, which Triton's compiled code must not exceed.

        The pipeline holds ``stages - 1`` tiles of K, V, cos and sin and of block numbers. Queries lie beside them, and
        so does K or V on its way to the multiplication where tensor cores do not read it from the tile (float32, or no
        pipeline), and the scores that slices exchange. A partly rotated K may be padded to one and a half heads, and
        cos and sin are taken to be float32. Adding up runs at the end needs less than the tiles that are gone by then.
        """
        tokens, streams = self.config.tokens, self.heads * self.parts * self.slices
        padded_key = self.head_padded * 3 // 2
        of_head = (padded_key + self.head_padded) * self.itemsize
        tile = tokens * self.parts * (self.heads * of_head + self.head_padded * 4)
        blocks = streams * tokens * 8
        buffered = (self.config.stages - 1) * (tile + blocks)
        operand = self.heads * self.parts * padded_key * self.operand_size
        by_memory = self.operand_size == 4 or self.config.stages == 1
        staged = self.q_rows + tokens if by_memory else self.q_rows
        scores = streams * self.q_rows * tokens * 4
        joined = streams * self.q_rows * (self.head_padded // self.slices) * 4
        return max(buffered + staged * operand + scores, joined if self.parts > 1 else 0)

    def smaller(self, kv_heads: int, group: int) -> Launch | None:
        """The next shape that needs less shared memory; ``None`` after the last."""
        config = self.config
        if config.stages > 2:
            config = replace(config, stages=2)
        elif config.tokens > 16:
            config = replace(config, tokens=config.tokens // 2)
        elif self.parts > 1:
            config = replace(config, warps=config.warps // 2)
        elif self.heads > 1:
            config = replace(config, heads=self.heads // 2, warps=max(1, config.warps // 2))
        elif config.stages > 1:
            config = replace(config, stages=1)
        else:
            return None
        return Launch.of(
            config, kv_heads, group, self.head_padded, self.itemsize, self.operand_size
        )


def choose_launch(
    kv_heads: int,
    group: int,
    head_padded: int,
    itemsize: int,
    shared_limit: int,
    operand_size: int | None = None,
    config: DecodeConfig | None = None,
) -> Launch:
    """The swept launch of a shape, or the first after it that fits the device.

    Args:
        kv_heads: KV heads on this rank.
        group: Query heads per KV head.
        head_padded: Elements of a head, padded to a power of two.
        itemsize: Bytes per element of KV.
        shared_limit: Shared memory that a program may have, in bytes.
        operand_size: Bytes per element as it is multiplied; by default like KV, at least 2.
        config: Begin with this one instead.

    Returns:
        The launch.

    Raises:
        ValueError: Nothing fits.
    """
    operand_size = operand_size or max(2, itemsize)
    if config is None:
        swept = 4 if operand_size == 4 else itemsize
        shape = (max(64, head_padded), swept)
        config = _CONFIGS.get(shape, _WIDER)
        if kv_heads == 1:
            config = _ONE_KV_HEAD.get(shape, config)
    launch: Launch | None = Launch.of(config, kv_heads, group, head_padded, itemsize, operand_size)
    while launch is not None and launch.shared_bytes > shared_limit:
        launch = launch.smaller(kv_heads, group)
    if launch is None:
        raise ValueError(
            f"decode attention with heads of {head_padded} elements of {itemsize} bytes and {group} queries per KV "
            f"head does not fit {shared_limit} bytes of shared memory: use a smaller KV dtype"
        )
    return launch
