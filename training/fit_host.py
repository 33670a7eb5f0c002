"""Learns the host's side of CUDA sessions: copies, waiting for the GPU, and kernels that the CPU provider runs.

Reads, for each GPU target with predictors, the copies measured next to its dataset (recipes/cuda_kernels/measure_copies.py).
With --host, reads the predictors of the CPU of a machine with that GPU in another workspace, where `train_kernel_model.py`
made them of the kernels that recipes/h200/host_kernels.py listed. Writes host.json and the folder `host` next to the target's
predictors. Run it after training/train_kernel_model.py and before training/fit_composition.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.composition.host_side import HOST_LABEL, CopyCosts, host_folder
from hase.learned.default_predictors import shipped_costs
from hase.learned.kernels.predictors import ON_GPU, Predictors, read_predictors
from hase.learned.kernels.sidecar import copy_predictors, read_sidecar
from hase.records.dataset_files import MEASURE_COPIES, WaitTimes, read_copies
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.training.composition.host_fit import fit_copies, host_predictors
from hase.training.kernels.targets import trained_targets
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("host")
EXAMPLES = """
python training/fit_host.py --workspace out/h200
python training/fit_host.py --workspace out/h200 --host out/h200/host
"""


def waiting_kernel(measured: WaitTimes) -> Kernel:
    """The kernel of the timed NonZero (recipes/cuda_kernels/measure_copies.py), but with booleans in place of floats. Kernels
    with booleans were measured, since detectors use them; floats take the GPU as long."""
    x = KernelInput(dtype="bool", shape=(measured.elements,))
    return describe_kernel("NonZero", "", 17, {}, [x], [Tensor(dtype="int64", shape=(1, measured.elements))])


def fit_costs(workspace: Workspace, target: str, predictors: Predictors) -> CopyCosts | None:
    """Fits the costs of copies and of waiting; None if no copies were measured."""
    measured = read_copies(workspace.dataset(target))
    if measured is None:
        log.warning("%s: no copies were measured, so defaults are used; measure them on that machine with: %s", target,
                    MEASURE_COPIES)
        return None

    def predict(wait: WaitTimes) -> tuple[float, float] | None:
        if wait.operator != "NonZero":  # of the others, no kernels with the GPU's own time were measured yet
            return None
        gpu_ms, launches = (predictors.predict([waiting_kernel(wait)], {}, label) for label in ON_GPU)
        return None if "estimated" in gpu_ms.provenance else (gpu_ms.latency_ms[0], launches.latency_ms[0])

    return fit_copies(measured, predict, costs_of(workspace.predictors(target)))


def costs_of(folder: Path) -> PipelineCosts:
    """The costs of a run on a target; those that come with Hase if none were fitted yet."""
    try:
        costs = read_composition(folder).costs if target_files.COMPOSITION.path(folder).is_file() else None
    except UserError:  # of other predictors: it is fitted again after this
        costs = None
    return costs or shipped_costs()


def row(target: str, costs: CopyCosts | None, kernels: bool) -> dict[str, Any]:
    """A target's row in the table of what was learned."""
    columns: dict[str, Any] = {"target": target, "copies": "measured" if costs else "defaults",
                               "CPU kernels": "learned" if kernels else "guessed"}
    if costs:
        columns |= {f"{name} of {size >> 10} KiB (µs)": 1000 * getattr(costs, name).at(size)
                    for name in ("to_host", "to_gpu") for size in (1 << 10, 1 << 20)}
        columns["waiting inside a node (µs)"] = 1000 * costs.wait_ms
    return columns


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", metavar="NAME", help="name of a target in training/predictors (default: all GPUs)")
    parser.add_argument("--host", type=Path, metavar="DIR", help="the workspace with the predictors of the host's kernels")
    args = parser.parse_args()
    workspace = cli.start(args)
    names = [args.target] if args.target else trained_targets(workspace)
    targets = [name for name in names if set(ON_GPU) <= set(read_sidecar(workspace.predictors(name)).labels)]
    if not targets:
        raise UserError(f"{workspace.predictors('')}: no target with label gpu ({', '.join(names)})")
    learned = host_predictors(Workspace(args.host)) if args.host else None
    rows = []
    with sole_writer(workspace.predictors("")):
        for target in targets:
            folder = workspace.predictors(target)
            costs = fit_costs(workspace, target, read_predictors(folder))
            if costs:
                files.write_json(target_files.HOST.path(folder), costs)
            if learned:
                copy_predictors(learned, host_folder(folder), HOST_LABEL)
            rows.append(row(target, costs, learned is not None))
    cli.print_rows(rows, args.json, "the host's side of CUDA sessions")
    return 0


if __name__ == "__main__":
    cli.run(main)
