"""Costs of copies and captured graphs, fitted to made-up models with known costs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks, pipeline_ms
from hase.records.kernel_record import ModelRecord, Tensor
from hase.training.composition.formulas import fit_graph_replay, fit_host_io
from hase.training.composition.measured_models import MeasuredModel, MeasuredTracks
from hase.utils.fingerprint import Flavour

MIB = 2**20
FLAVOUR = Flavour(device="cuda", runtime_version="1.31")
REPLAY = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0007, lead_ms=0.0, end_ms=0.015)


def model(name: str, mib_in: float, mib_out: float) -> MeasuredModel:
    """A model of which only the sizes of its inputs and outputs matter."""
    def tensor(mib: float) -> Tensor:
        return Tensor(dtype="uint8", shape=(round(mib * MIB),))

    record = ModelRecord(model=name, file_stem=name, group=name[0], sha256="", dims={}, flavour=FLAVOUR,
                         derived=True, inputs={"x": tensor(mib_in)},
                         outputs={"y": tensor(mib_out)}, weight_bytes=0, opsets={}, kernels={}, nodes=())
    latency_ms = 1.0 + mib_in
    return MeasuredModel(record, name[0], latency_ms, host_io_ms=latency_ms + 0.05 + 0.2 * mib_in + 0.4 * mib_out)


def test_the_fit_finds_the_costs_of_copies() -> None:
    models = [model(f"{family}{size}", size, out) for family in "abc" for size, out in ((0.5, 1), (2, 0.1), (9, 3), (30, 1))]
    models.append(replace(models[0], host_io_ms=math.nan))
    groups = [model.group for model in models]
    costs = fit_host_io(models, np.array([model.latency_ms for model in models]), groups)
    assert costs is not None
    assert (costs.run_ms, costs.in_ms_per_mib, costs.out_ms_per_mib) == pytest.approx((0.05, 0.2, 0.4), rel=1e-4)
    assert costs.left_out is not None
    assert (costs.models, costs.left_out.mape) == (12, pytest.approx(0.0, abs=1e-6))
    assert fit_host_io(models[:3], np.ones(3), ["a"] * 3) is None  # too few


def test_the_fit_finds_the_costs_of_a_replay() -> None:
    draw = np.random.default_rng(0)
    models, tracks = [], []
    for place in range(24):
        nodes = int(draw.integers(20, 200))
        gpu_ms, launches = draw.uniform(0.002, 0.05, nodes), draw.integers(1, 4, nodes).astype(float)
        of_run = Tracks(gpu_ms, launches, np.full(nodes, NodeKind.OWN))
        replayed = pipeline_ms(of_run, REPLAY) if place else math.nan
        models.append(replace(model(f"{'abc'[place % 3]}{place}", 1, 1), cuda_graph_ms=replayed))
        tracks.append(MeasuredTracks(of_run, host_ms=math.nan, latency_ms=3.0))
    replay = fit_graph_replay(models, tracks, [model.group for model in models])
    assert replay is not None
    assert (replay.costs.gap_ms, replay.costs.end_ms) == pytest.approx((REPLAY.gap_ms, REPLAY.end_ms), rel=1e-3)
    assert replay.models == 23
    assert replay.left_out is not None
    assert replay.left_out.worst == pytest.approx(0.0, abs=1e-4)
    assert replay.interval is not None
    assert replay.interval.low <= 1.0 <= replay.interval.high + 1e-4
