"""Reading a table of a data file strictly; pure.

A setting that is misspelled must not silently leave its default in place: it would change what a result means.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

_NO_DEFAULT: Any = object()


class WorkloadError(ValueError):
    """A workload file is wrong; the text names the key and what to change."""


class Fields:
    """The keys of one table. Read each with the method of its kind, then call ``finish``.

    Args:
        table: The table.
        where: Its name for people, for example ``shared_documents``.

    Raises:
        WorkloadError: It is no table.
    """

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, dict):
            raise WorkloadError(f"{where} is {table!r}; it must be a table, [{where}]")
        self._table = table
        self._where = where
        self._known: list[str] = []

    def name(self, key: str) -> str:
        """A key's full name."""
        return f"{self._where}.{key}" if self._where else key

    def has(self, key: str) -> bool:
        """Whether an optional key is given."""
        self._known.append(key)
        return key in self._table

    def free_table(self, key: str) -> dict[str, Any]:
        """A table of any keys."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, f"a table, [{self.name(key)}]")
        return dict(value)

    def table(self, key: str) -> Fields:
        """A table inside this one; an empty one if it is left out."""
        return Fields(self._get(key, {}), self.name(key))

    def integer(self, key: str, default: int = _NO_DEFAULT, *, low: int = 0) -> int:
        """A whole number, at least ``low``."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._wrong(key, value, f"a whole number, {low} or more")
        return value

    def number(
        self, key: str, default: float = _NO_DEFAULT, *, low: float = 0.0, above: bool = False
    ) -> float:
        """A number, at least ``low``, or with ``above`` more than it."""
        value = self._get(key, default)
        what = f"a number {'above' if above else 'of at least'} {low:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, what)
        if not math.isfinite(value) or value < low or (above and value == low):
            raise self._wrong(key, value, what)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str = _NO_DEFAULT) -> str:
        """A string that is not empty."""
        value = self._get(key, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, value, "a string that is not empty")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str = _NO_DEFAULT) -> str:
        """One of some strings."""
        value = self._get(key, default)
        if value not in choices:
            raise self._wrong(key, value, f"one of {', '.join(choices)}{_closest(value, choices)}")
        return str(value)

    def span(
        self, key: str, default: tuple[int, int] = _NO_DEFAULT, *, low: int = 1
    ) -> tuple[int, int]:
        """A whole number, or the least and the greatest as ``[low, high]``."""
        value = self._get(key, default)
        pair = [value, value] if isinstance(value, int) else value
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or any(isinstance(end, bool) or not isinstance(end, int) for end in pair)
            or not low <= pair[0] <= pair[1]
        ):
            raise self._wrong(
                key, value, f"a whole number of {low} or more, or two as [least, greatest]"
            )
        return pair[0], pair[1]

    def finish(self) -> None:
        """Refuse keys that nothing has read.

        Raises:
            WorkloadError: There is one.
        """
        for key in self._table:
            if key not in self._known:
                known = list(dict.fromkeys(self._known))
                raise WorkloadError(
                    f"{self.name(key)} is not known{_closest(key, known)}; known are {', '.join(known)}"
                )

    def _get(self, key: str, default: Any) -> Any:
        self._known.append(key)
        if key in self._table:
            return self._table[key]
        if default is _NO_DEFAULT:
            raise WorkloadError(f"{self.name(key)} is missing; give it a value")
        return default

    def _wrong(self, key: str, value: object, what: str) -> WorkloadError:
        return WorkloadError(f"{self.name(key)} is {value!r}; it must be {what}")


def _closest(given: object, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(str(given), known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
