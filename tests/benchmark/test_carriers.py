"""Kernels that are traced once more with their launches queued. No GPU is needed: what a carrier measures on one is made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hase.benchmark.ort import carriers
from hase.benchmark.ort.carriers import INPUTS_WRITTEN, MOST_QUEUED, TracedCarrier, groups_to_queue, time_carrier
from hase.kernel_model.building.kernel_models import write_kernel
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import Effort, Measurement
from hase.runtimes.protocol import Request
from hase.utils.fingerprint import has_cuda


def grouped(size: int, groups: int = 4, channels: int = 16, window: int = 3) -> Kernel:
    """A convolution of signals in groups."""
    weight = KernelInput(dtype="float32", shape=(channels, channels // groups, window), constant=True)
    return describe_kernel(
        op_type="Conv", domain="", opset=20, attributes={"group": groups, "kernel_shape": [window]},
        inputs=(KernelInput(dtype="float32", shape=(1, channels, size)), weight),
        outputs=(Tensor(dtype="float32", shape=(1, channels, size - window + 1)),))


def of_kernel(name: str, launches: int, time_ms: float = 1.0, queued: bool = False) -> Measurement:
    return Measurement(subject="kernel", id=name, label="gpu", context="carrier", place="carrier", samples_ms=(time_ms,),
                       launches=launches, queued=queued)


def test_a_group_has_no_more_launches_than_can_wait() -> None:
    """Those of the nodes that write the kernels' inputs among them."""
    half = MOST_QUEUED // 2 - INPUTS_WRITTEN
    measured = [of_kernel(name, launches) for name, launches in (("a", half), ("b", half), ("c", 1), ("many", MOST_QUEUED),
                                                                 ("d", MOST_QUEUED - INPUTS_WRITTEN), ("e", 2))]
    assert [[m.id for m in group] for group in groups_to_queue(measured)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert not list(groups_to_queue([]))


def test_work_on_several_streams_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces what the first trace said of such kernels, and of these alone."""
    kernels = [grouped(size) for size in (8, 16, 32)]
    asked: list[tuple[list[str], tuple[str, ...], int]] = []

    def made_up(of: Sequence[Kernel], request: Request, queued: int = 0) -> TracedCarrier:
        asked.append(([kernel.id for kernel in of], request.labels, queued))
        measured = [of_kernel(kernel.id, 5, 0.2 if queued else 0.9, bool(queued)) for kernel in of]
        return TracedCarrier(measured, measured[1:])

    monkeypatch.setattr(carriers, "run_carrier", made_up)
    paths = tuple(str(write_kernel(kernel, tmp_path)) for kernel in kernels)
    reply = time_carrier(Request(do="carrier", device="cuda", paths=paths, labels=("gpu", "node_span"), effort=Effort()))
    ids = [kernel.id for kernel in kernels]
    assert asked == [(ids, ("gpu", "node_span"), 0), (ids[1:], ("gpu",), 2 * (5 + INPUTS_WRITTEN))]
    assert [(m.id, m.samples_ms, m.queued) for m in reply.measurements] == [
        (ids[0], (0.9,), False), (ids[1], (0.2,), True), (ids[2], (0.2,), True)]


@pytest.mark.skipif(not has_cuda(), reason="traces a GPU")
def test_groups_run_on_streams_of_their_own(tmp_path: Path) -> None:
    """As an H200 ran the positions of wav2vec 2.0."""
    path = str(write_kernel(grouped(376, 16, 768, 128), tmp_path))
    request = Request(do="carrier", device="cuda", paths=(path,), labels=("gpu",), effort=Effort())
    [measured] = time_carrier(request).measurements
    assert measured.queued
    assert (measured.launches or 0) >= 16


def test_only_what_was_queued_says_so() -> None:
    assert "queued" not in of_kernel("a", 1).model_dump_json()
    assert Measurement.model_validate_json(of_kernel("a", 1, queued=True).model_dump_json()).queued
