"""Measured idle times by kernel, for look-up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping


class MeasuredTimes(Mapping[str, dict[str, float]]):
    """Idle times (ms) by kernel id and label, from JSON with one line per kernel, sorted, between a line `{` and a line `}`.
    Only the lines that are looked up are parsed."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def __getitem__(self, kernel: str) -> dict[str, float]:
        text, key = self._text, _line_start(kernel)
        low, high = text.find(b"\n") + 1, text.rfind(b"\n") + 1  # the lines to search
        while low < high:
            start = max(text.rfind(b"\n", low, (low + high) // 2) + 1, low)
            end = text.index(b"\n", start)
            line = text[start:end]
            if line.startswith(key):
                times: dict[str, float] = json.loads(line[len(key):].removesuffix(b","))
                return times
            low, high = (end + 1, high) if line < key else (low, start)
        raise KeyError(kernel)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return max(self._text.count(b"\n") - 1, 0)

    def whole(self) -> dict[str, dict[str, float]]:
        """All times, parsed at once."""
        times: dict[str, dict[str, float]] = json.loads(self._text)
        return times

    @staticmethod
    def text(times: Mapping[str, Mapping[str, float]]) -> bytes:
        """The JSON that this class reads."""
        lines = sorted(_line_start(kernel) + json.dumps(dict(found), separators=(",", ":")).encode()
                       for kernel, found in times.items())
        return b"\n".join([b"{", *([b",\n".join(lines)] if lines else []), b"}"])


def _line_start(kernel: str) -> bytes:
    return json.dumps(kernel).encode() + b":"
