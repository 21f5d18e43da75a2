"""Which KV connectors an engine with spans admits, and with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_spans.offload.settings import OffloadSettings, OffloadSettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

OFFLOADING_CONNECTOR = ("SpansOffloadingConnector", "vllm_spans.offload.connector")
"""Name and module of the KV connector that knows gaps."""

HOST_SPEC = ("HostOffloadingSpec", "vllm_spans.offload.host_spec")
"""Name and module of the spec that ``OffloadingConnector`` runs with on the CPU build."""

_BY_TOKENS = (
    "it keys KV by token ids alone, so engines without spans would take un-rotated K from its store for rotated, and "
    "what was computed over spans would answer requests without"
)
_BY_REQUEST = (
    "it hands the blocks of a request to another engine, which takes un-rotated K for rotated"
)
_REFUSED = {
    "ExampleConnector": _BY_TOKENS,
    "HF3FSKVConnector": _BY_TOKENS,
    "LMCacheConnectorV1": _BY_TOKENS,
    "MoRIIOConnector": _BY_REQUEST,
    "MooncakeConnector": _BY_REQUEST,
    "NixlConnector": _BY_REQUEST,
    "NixlPullConnector": _BY_REQUEST,
    "NixlPushConnector": _BY_REQUEST,
}


def connector_reasons(config: VllmConfig) -> list[str]:
    """What stands in the way of the KV connector of an engine, one line each."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    if transfer.kv_connector != "MultiConnector" or transfer.kv_connector_module_path is not None:
        return _reasons(config, [transfer])
    try:
        parts = _parts(transfer)
    except (TypeError, ValueError) as error:
        return [f"KV connector MultiConnector: its connectors cannot be read: {error}"]
    if not parts:
        return ["KV connector MultiConnector without connectors: drop --kv-transfer-config"]
    names = [part.kv_connector for part in parts]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    reasons = [f"KV connector {name} twice in a MultiConnector: name it once" for name in twice]
    return reasons + _reasons(config, parts)


def _parts(transfer: KVTransferConfig) -> list[KVTransferConfig]:
    from vllm.config.kv_transfer import KVTransferConfig

    settings: Sequence[dict[str, Any]] = transfer.kv_connector_extra_config.get("connectors") or ()
    return [KVTransferConfig(**part) for part in settings]


def _reasons(config: VllmConfig, parts: Sequence[KVTransferConfig]) -> list[str]:
    reasons = []
    for part in parts:
        reasons += _reasons_of(config, part)
        if part.kv_role != "kv_both":
            reasons.append(
                f"kv_role {part.kv_role} of {part.kv_connector}: the tiers are read and written; use kv_both"
            )
    names = " and ".join(str(part.kv_connector) for part in parts)
    if reasons:
        return reasons
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        reasons.append(f"{names} with data parallelism: not verified; set --data-parallel-size 1")
    if parallel.nnodes > 1:
        # A worker of another node would open an empty /dev/shm of its own, and files would hold what it never wrote.
        reasons.append(
            f"{names} on {parallel.nnodes} nodes: CPU memory is shared in /dev/shm, by processes of one node; drop "
            "--kv-transfer-config or --nnodes"
        )
    if parallel.world_size > 1 and any(p.kv_connector == "OffloadingConnector" for p in parts):
        reasons.append(
            "OffloadingConnector with more than one worker: not verified with spans; use "
            f"{OFFLOADING_CONNECTOR[0]} alone"
        )
    return reasons


def _reasons_of(config: VllmConfig, part: KVTransferConfig) -> list[str]:
    from vllm.platforms import current_platform

    name, module = part.kv_connector, part.kv_connector_module_path
    if (name, module) == OFFLOADING_CONNECTOR:
        try:
            settings = OffloadSettings.from_extra_config(part.kv_connector_extra_config)
        except OffloadSettingsError as error:
            return [str(error)]
        return _file_tier_reasons(config) if settings.files is not None else []
    if (name, module) == ("OffloadingConnector", None):
        if not current_platform.is_cpu():
            return [
                "KV connector OffloadingConnector: with spans it is verified on the CPU build alone; use kv_connector "
                f"{OFFLOADING_CONNECTOR[0]} with kv_connector_module_path {OFFLOADING_CONNECTOR[1]}"
            ]
        extra = part.kv_connector_extra_config
        if (extra.get("spec_name"), extra.get("spec_module_path")) == HOST_SPEC:
            return []
        return [
            "KV connector OffloadingConnector: with spans it runs on the CPU build, for which vLLM has no worker; set "
            f"spec_name {HOST_SPEC[0]} and spec_module_path {HOST_SPEC[1]} in its kv_connector_extra_config"
        ]
    why = _REFUSED.get(str(name), "it is not verified with spans")
    return [
        f"KV connector {name}: {why}; use kv_connector {OFFLOADING_CONNECTOR[0]} with kv_connector_module_path "
        f"{OFFLOADING_CONNECTOR[1]}, OffloadingConnector, a MultiConnector of these, or drop --kv-transfer-config"
    ]


def _file_tier_reasons(config: VllmConfig) -> list[str]:
    """What would let a file outlive what it was computed with."""
    from vllm_spans.offload.identity import WEIGHT_FORMATS

    reasons = []
    if config.lora_config is not None:
        reasons.append(
            "LoRA with a file tier: an adapter is known by its name alone, which says nothing of its weights after a "
            "restart; drop --enable-lora or files"
        )
    if config.model_config.enable_sleep_mode or config.weight_transfer_config is not None:
        reasons.append(
            "sleep mode or weight transfer with a file tier: weights could change under the files; drop "
            "--enable-sleep-mode and --weight-transfer-config, or files"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in ("sha256", "sha256_cbor"):
        reasons.append(
            f"--prefix-caching-hash-algo {algorithm} with a file tier: files are trusted by key; use sha256"
        )
    if config.load_config.load_format not in WEIGHT_FORMATS:
        reasons.append(
            f"--load-format {config.load_config.load_format} with a file tier: its weights cannot be told apart; use "
            f"one of {', '.join(WEIGHT_FORMATS)}"
        )
    return reasons
