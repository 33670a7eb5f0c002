"""Judges predictions against a baseline: how much slower each model became, and how sure that is (`hase gate`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from hase.inference.compare.snapshots import ModelSnapshot
from hase.learned.composition.differences import ratio_interval
from hase.utils.config import Frozen

Verdict = Literal["surely slower", "maybe slower", "slower, within the limit", "same", "faster", "new", "gone"]
WORST_FIRST: tuple[Verdict, ...] = (
    "surely slower", "maybe slower", "slower, within the limit", "faster", "same", "new", "gone")
NOTED = 0.002  # share of the latency that a kernel type must have gained or lost to be named as the cause


class Change(Frozen):
    """A model and size in the baseline and now.

    Attributes:
        model, sizes: which it is: its file, and the sizes of dynamic dimensions.
        before_ms, after_ms: its latency in the baseline and now; None where it is new or gone.
        change: after over before, less 1.
        interval: the 90 % interval of `change`.
        verdict: what follows from `interval` and the limit.
        mostly: the kernel type whose time changed most, with that change; "" where none did.
        before_mib, after_mib: its peak memory.
        memory_growth: after over before, less 1.
        too_much_memory: whether that is above the limit.
        rough_estimate: whether one of both predictions is marked as one.
    """

    model: str
    sizes: dict[str, int]
    before_ms: float | None = None
    after_ms: float | None = None
    change: float | None = None
    interval: tuple[float, float] | None = None
    verdict: Verdict
    mostly: str = ""
    before_mib: float | None = None
    after_mib: float | None = None
    memory_growth: float | None = None
    too_much_memory: bool = False
    rough_estimate: bool = False

    @property
    def fails(self) -> bool:
        return self.verdict == "surely slower" or self.too_much_memory


class GateResult(Frozen):
    """What `hase gate` found. Version 1 is the first.

    Attributes:
        target: that the models are predicted for.
        max_regression: the highest change of a latency that is allowed, a ratio.
        max_memory_growth: the same of the peak memory; None: any.
        passed: whether nothing is surely slower, or needs too much memory.
        changes: the worst first.
    """

    version: int = 1
    target: str
    max_regression: float
    max_memory_growth: float | None
    passed: bool
    changes: tuple[Change, ...]


def judge(before: Mapping[str, ModelSnapshot], now: Mapping[str, ModelSnapshot], target: str, max_regression: float,
          max_memory_growth: float | None = None) -> GateResult:
    """Compares the models of two snapshots that were made under the same conditions. Limits are ratios: 0.05 is 5 %."""
    changes = [_change(before.get(name), now.get(name), max_regression, max_memory_growth) for name in sorted({*before, *now})]
    changes.sort(key=lambda change: (WORST_FIRST.index(change.verdict), -abs(change.change or 0.0)))
    return GateResult(target=target, max_regression=max_regression, max_memory_growth=max_memory_growth,
                      passed=not any(change.fails for change in changes), changes=tuple(changes))


def _change(before: ModelSnapshot | None, after: ModelSnapshot | None, limit: float, memory_limit: float | None) -> Change:
    either = after or before
    assert either is not None  # a name is of one of both
    if before is None or after is None:
        return Change(model=either.file, sizes=either.sizes, verdict="gone" if after is None else "new",
                      before_ms=before and before.latency_ms, after_ms=after and after.latency_ms,
                      before_mib=before and before.peak_memory_mib, after_mib=after and after.peak_memory_mib,
                      rough_estimate=either.rough_estimate)
    change = after.latency_ms / before.latency_ms - 1.0
    low, high = (end - 1.0 for end in ratio_interval(before.costs, after.costs))
    growth = after.peak_memory_mib / before.peak_memory_mib - 1.0 if before.peak_memory_mib else 0.0
    return Change(model=after.file, sizes=after.sizes, before_ms=before.latency_ms, after_ms=after.latency_ms, change=change,
                  interval=(low, high), verdict=verdict_of(change, (low, high), limit), mostly=_main_cause(before, after),
                  before_mib=before.peak_memory_mib, after_mib=after.peak_memory_mib, memory_growth=growth,
                  too_much_memory=memory_limit is not None and growth > memory_limit,
                  rough_estimate=before.rough_estimate or after.rough_estimate)


def verdict_of(change: float, interval: tuple[float, float], limit: float) -> Verdict:
    """The verdict on a change (after over before, less 1) with its 90 % interval."""
    low, high = interval
    if low > limit:
        return "surely slower"
    if change > limit or (low > 0.0 and high > limit):
        return "maybe slower"
    if low > 0.0:
        return "slower, within the limit"
    return "faster" if high < 0.0 else "same"


def _main_cause(before: ModelSnapshot, after: ModelSnapshot) -> str:
    """The kernel type whose whole time changed most: `Sigmoid +0.0123 ms`."""
    changed_ms = Counter[str]()
    for sign, side in ((-1, before), (1, after)):
        for kernel in side.kernels.values():
            changed_ms[kernel.type] += sign * kernel.runs * max(kernel.time_ms, kernel.host_ms)  # type: ignore[assignment]
    name, most_ms = max(changed_ms.items(), key=lambda item: abs(item[1]), default=("", 0.0))
    return f"{name} {most_ms:+.3g} ms" if abs(most_ms) > NOTED * before.latency_ms else ""


def gate_sentences(result: GateResult) -> list[str]:
    """Sentences: what fails, and what may."""
    compared = [change for change in result.changes if change.change is not None]
    lines = []
    for verdict, words in (("surely slower", "surely"), ("maybe slower", "maybe")):
        found = [change for change in compared if change.verdict == verdict]
        if found or verdict == "surely slower":
            lines.append(f"{len(found)} of {len(compared)} predictions {'is' if len(found) == 1 else 'are'} {words} slower by "
                         f"more than {percent(result.max_regression, sign=False)}{_named(found)}")
    if found := [change for change in compared if change.too_much_memory]:
        lines.append(f"{len(found)} of {len(compared)} need{'s' * (len(found) == 1)} over "
                     f"{percent(result.max_memory_growth or 0.0, sign=False)} more memory{_named(found)}")
    if rough := [change for change in compared if change.rough_estimate]:
        lines.append(f"rough estimates, less sure than their intervals say: {', '.join(map(title, rough))}")
    return lines


def _named(changes: Sequence[Change]) -> str:
    return f": {', '.join(map(title, changes))}" if changes else ""


def title(change: Change) -> str:
    """A model and its sizes as shown in texts."""
    return " ".join([change.model.rpartition("/")[2].removesuffix(".onnx"), sizes_text(change.sizes)]).strip()


def sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def percent(share: float, sign: bool = True) -> str:
    """A ratio in per cent: `+3.1 %`."""
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:g} %"


def gate_rows(result: GateResult) -> list[dict[str, str | float | None]]:
    """The table of changes; the column of the memory only where it is limited."""
    return [{
        "model": change.model, "size": sizes_text(change.sizes), "before (ms)": change.before_ms, "after (ms)": change.after_ms,
        "change": None if change.change is None else percent(change.change),
        "90 % of the change": change.interval and f"{percent(change.interval[0])} to {percent(change.interval[1])}",
        "mostly from": change.mostly or None, "verdict": change.verdict,
        **({"memory": None if change.memory_growth is None else percent(change.memory_growth) + " (too much)" * (
            change.too_much_memory)} if result.max_memory_growth is not None else {})} for change in result.changes]
