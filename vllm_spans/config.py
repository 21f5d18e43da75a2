"""SpansConfig: what an operator can set, where it is read from, and how it is checked.

Two sources, in this order of precedence: ``--additional-config '{"spans": {...}}'`` and the environment
(``VLLM_V1_SPANS_*``). A name or value that is not understood stops the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_spans.core.policy import GAP_POLICIES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENV_PREFIX = "VLLM_V1_SPANS_"
ENABLED_ENV = ENV_PREFIX + "ENABLED"
DEFAULT_GAP_LENGTH = 32

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


class SpansConfigError(ValueError):
    """A setting of vllm_spans is unknown or has a value that cannot be used; the text names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class SpansConfig:
    """Settings of one engine.

    Attributes:
        gap_policy: Which tokens of a reused span are recomputed: ``none``, ``legolink`` or ``full``.
        gap_length: k of ``legolink`` in tokens, a multiple of the block size. ``None`` means 32 tokens or one
            block, whichever is larger.
        pad_token: Token that fills a piece up to the block size: its text, or its id in digits. ``None`` lets
            the markup choose one for the tokenizer.
        token_plus: Token id that starts a plus span when it stands at a block start of a token-id prompt.
        token_cross: Token id that starts a cross segment likewise.
        delimiter: Text that marks spans in plain strings. ``None`` turns that form off.
        max_spans: Most plus spans one request may have.
        scratch_tokens: Tokens that the scratch cache of rotated pages holds on a GPU; a step that reads more runs in
            several passes. ``None`` holds the longest sequence and a step of isolated rows.
        debug: Log the plan of every request at INFO.
    """

    gap_policy: str = "legolink"
    gap_length: int | None = None
    pad_token: str | None = None
    token_plus: int | None = None
    token_cross: int | None = None
    delimiter: str | None = None
    max_spans: int = 1024
    scratch_tokens: int | None = None
    debug: bool = False

    @classmethod
    def from_sources(
        cls, environ: Mapping[str, str], additional_config: Mapping[str, Any] | None = None
    ) -> SpansConfig:
        """Read and check the settings.

        Args:
            environ: The process environment.
            additional_config: vLLM's ``additional_config``; only its ``spans`` entry is read.

        Returns:
            The checked settings.

        Raises:
            SpansConfigError: An unknown name, or a value of the wrong type or out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or variable == ENABLED_ENV:
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in fields:
                raise SpansConfigError(
                    f"{variable} is not a setting of vllm_spans. Known: {', '.join(setting_names())}."
                )
            if text != "":
                values[name] = _parse(name, text, variable)
        given = (additional_config or {}).get("spans", {})
        if not isinstance(given, Mapping):
            raise SpansConfigError(
                f"additional_config['spans'] must be an object of settings, not {type(given).__name__}."
            )
        for name, value in given.items():
            if name not in fields:
                raise SpansConfigError(
                    f"additional_config['spans'] has the unknown key {name!r}. Known: {', '.join(fields)}."
                    + (
                        f" To switch spans on, set {ENABLED_ENV}=1 in the environment."
                        if name == "enabled"
                        else ""
                    )
                )
            if value is not None:
                values[name] = _parse(name, value, f"additional_config['spans'][{name!r}]")
        config = cls(**values)
        config._check()
        return config

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> SpansConfig:
        """Settings that ``create_engine_config`` resolved into ``vllm_config.additional_config``."""
        return cls(**vllm_config.additional_config["spans"])

    def resolve(self, block_size: int) -> SpansConfig:
        """Fill in what depends on the block size.

        Args:
            block_size: Tokens per KV block.

        Raises:
            SpansConfigError: ``gap_length`` is not a multiple of the block size.
        """
        if self.gap_length is None:
            return dataclasses.replace(self, gap_length=max(DEFAULT_GAP_LENGTH, block_size))
        if self.gap_length % block_size:
            raise SpansConfigError(
                f"{ENV_PREFIX}GAP_LENGTH={self.gap_length} is not a multiple of the block size {block_size}. "
                f"Use {-(-self.gap_length // block_size) * block_size}, or set --block-size."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Settings as plain JSON values."""
        return dataclasses.asdict(self)

    def _check(self) -> None:
        if self.gap_policy not in GAP_POLICIES:
            raise SpansConfigError(
                f"{ENV_PREFIX}GAP_POLICY={self.gap_policy!r} is not known. Use one of {', '.join(GAP_POLICIES)}."
            )
        if self.gap_length is not None and self.gap_length <= 0:
            raise SpansConfigError(
                f"{ENV_PREFIX}GAP_LENGTH={self.gap_length} must be positive; for no gaps set "
                f"{ENV_PREFIX}GAP_POLICY=none."
            )
        for name in ("max_spans", "scratch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpansConfigError(f"{ENV_PREFIX}{name.upper()}={value} must be at least 1.")
        if self.token_plus is not None and self.token_plus == self.token_cross:
            raise SpansConfigError(
                f"{ENV_PREFIX}TOKEN_PLUS and {ENV_PREFIX}TOKEN_CROSS are both {self.token_plus}; they must differ."
            )
        if self.token_cross is not None and self.token_plus is None:
            raise SpansConfigError(
                f"{ENV_PREFIX}TOKEN_CROSS is set without {ENV_PREFIX}TOKEN_PLUS; set both or neither."
            )


def setting_names() -> tuple[str, ...]:
    """Environment variables that are understood."""
    return (
        ENABLED_ENV,
        *(ENV_PREFIX + field.name.upper() for field in dataclasses.fields(SpansConfig)),
    )


_INT_FIELDS = {"gap_length", "token_plus", "token_cross", "max_spans", "scratch_tokens"}


def _parse(name: str, value: Any, source: str) -> Any:
    if name in _INT_FIELDS:
        try:
            if isinstance(value, (bool, float)):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError):
            raise SpansConfigError(f"{source}={value!r} must be a whole number.") from None
        if name.startswith("token_") and number < 0:
            raise SpansConfigError(f"{source}={value!r} must be a token id, 0 or larger.")
        return number
    if name == "debug":
        text = str(value).strip().lower()
        if text not in _TRUE | _FALSE:
            raise SpansConfigError(f"{source}={value!r} must be 1 or 0.")
        return text in _TRUE
    if name == "pad_token" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise SpansConfigError(f"{source}={value!r} must be text.")
    return value


def spans_enabled(environ: Mapping[str, str]) -> bool:
    """Whether the environment switches spans on.

    Raises:
        SpansConfigError: The variable holds something that is neither yes nor no.
    """
    text = environ.get(ENABLED_ENV, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SpansConfigError(f"{ENABLED_ENV}={text!r} must be 1 or 0.")
