"""Plans which kernels of a network run on the CPU and which on the GPU, if each run uses both.

Reads two datasets of one runtime, in which the kernels of the network were measured on a CPU and on a GPU, and the network's
kernel records. Each kernel is a stage of a plan; --copy-us and --copy-gb-s say what copies cost. Prints the plans that use one
device, and the best of all, which dynamic programming finds exactly. The runtime must take the network apart in the same way
for both devices, as TVM does. Writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Mapping

from hase.extras.graph_stages.measuring.layer import HOST
from hase.extras.graph_stages.planning.plans import PlanCost, PlanningProblem, StageCost, StageData, best_plan, plan_cost
from hase.extras.graph_stages.planning.ranked_plans import plan_text
from hase.learned.kernels.measured import measured_times
from hase.records.dataset_files import read_header
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

CPU, GPU = "CPU", "GPU"  # the units; PlanningProblem's host is CPU
BYTES_PER_MS = 1e6  # of one GB/s
MAX_LIVE_TENSORS = 8  # with this many, the search takes about a second for a hundred kernels
log = get_logger("plans")
EXAMPLES = """
python extras/graph_stages/plan_network.py --model resnet18 --cpu TARGET --gpu TARGET --copy-us 10 --copy-gb-s 20  # needs both
"""


def shared_record(workspace: Workspace, model: str, targets: Mapping[str, Target]) -> ModelRecord:
    """The record of a network, the same for the two `targets` (by unit); a UserError if their kernels or tensors differ."""
    records = {unit: read_model_record(record_path(workspace, target.flavour, model)) for unit, target in targets.items()}
    nodes = {unit: [(node.kernel_id, node.inputs, node.outputs) for node in record.nodes] for unit, record in records.items()}
    if nodes[CPU] != nodes[GPU]:
        raise UserError(f"{model}: its kernels under {targets[GPU].name} are not those under {targets[CPU].name}, so the two "
                        "can't share a run; TVM has the same kernels for both")
    return records[CPU]


def planning_problem(record: ModelRecord, times_ms: Mapping[str, Mapping[str, float]], copy_ms: float,
                     bytes_per_ms: float) -> PlanningProblem:
    """A network as a planning problem, one stage per kernel in run order. Each copy takes `copy_ms` and the time of its bytes.

    `times_ms` are by unit (CPU, GPU) and kernel id. A missing kernel cannot run there, unless it only renames a tensor.
    """
    sizes = {name: tensor.bytes for name, tensor in record.inputs.items()}
    stages, costs = [], {}
    for index, node in enumerate(record.nodes):
        kernel = record.kernel_of(node)
        reads = tuple(dict.fromkeys(name for name in node.inputs if name in sizes))  # without weights
        stages.append(StageData(reads, tuple(filter(None, node.outputs))))
        sizes |= {name: tensor.bytes for name, tensor in zip(node.outputs, kernel.outputs, strict=False) if name}
        for unit, measured in times_ms.items():
            if node.kernel_id in measured or not kernel.moves_data:
                costs[unit, index] = StageCost(measured.get(node.kernel_id, 0.0), HOST if unit == CPU else GPU, unit)
    copies = {(GPU, name): copy_ms + size / bytes_per_ms for name, size in sizes.items()}
    return PlanningProblem(tuple(stages), tuple(record.inputs), tuple(record.outputs), tuple(times_ms), costs, copies, copies)


def max_live_tensors(problem: PlanningProblem) -> int:
    """The largest number of tensors that later stages still need; search time grows with 3 to this power."""
    last_read = {name: index for index, stage in enumerate(problem.stages) for name in stage.reads}
    last_read |= dict.fromkeys(problem.outputs, len(problem.stages))
    live, largest = set(problem.inputs), 0
    for index, stage in enumerate(problem.stages):
        live = {name for name in live | set(stage.writes) if last_read.get(name, -1) > index}
        largest = max(largest, len(live))
    return largest


def compare_plans(problem: PlanningProblem) -> list[tuple[str, PlanCost]]:
    """The plans that use one unit for all kernels, and the best plan of all unless the search would take too long."""
    on_one_unit = [(f"all on the {unit}", (unit,) * len(problem.stages)) for unit in problem.units]
    plans = [(name, plan_cost(problem, plan)) for name, plan in on_one_unit if problem.can_run(plan)]
    if (live := max_live_tensors(problem)) <= MAX_LIVE_TENSORS:
        return [*plans, ("the best of all", best_plan(problem))]
    log.warning("no search for the best plan, which would take too long: up to %d tensors are needed at one time, more than %d",
                live, MAX_LIVE_TENSORS)
    return plans


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", required=True, metavar="NAME", help="the network, by the name of its kernel record")
    parser.add_argument("--cpu", required=True, metavar="TARGET", help="the dataset of a CPU")
    parser.add_argument("--gpu", required=True, metavar="TARGET", help="the dataset of a GPU")
    parser.add_argument("--copy-us", type=cli.positive, required=True, metavar="US",
                        help="the shortest time of a copy between host and GPU, in microseconds")
    parser.add_argument("--copy-gb-s", type=cli.positive, required=True, metavar="RATE",
                        help="the copy speed of large tensors, in GB/s")
    args = parser.parse_args()
    workspace = cli.start(args)
    headers = {unit: read_header(workspace.dataset(name)) for unit, name in ((CPU, args.cpu), (GPU, args.gpu))}
    for unit, device in ((CPU, "cpu"), (GPU, "cuda")):
        if (target := headers[unit].target).flavour.device != device:
            raise UserError(f"--{unit.lower()} {target.name}: a dataset of device {target.flavour.device}, not {device}")
    record = shared_record(workspace, args.model, {unit: header.target for unit, header in headers.items()})
    times_ms = {unit: {name: times[header.labels[0]] for name, times in measured_times(workspace, header.target.name).items()
                       if header.labels[0] in times} for unit, header in headers.items()}
    problem = planning_problem(record, times_ms, args.copy_us / 1e3, args.copy_gb_s * BYTES_PER_MS)
    for index, node in enumerate(record.nodes):
        if not problem.units_for(index):
            raise UserError(f"{args.model}: kernel {node.kernel_id} was measured on neither device; measure it with: "
                            "python benchmark/collector.py")
    rows = [{"plan": name, "latency_ms": plan.latency_ms, "copies_ms": plan.transfer_ms,
             "copies": sum(len(step.copies) for step in plan.steps), "kernels": plan_text(plan.assignment)}
            for name, plan in compare_plans(problem)]
    cli.print_rows(rows, args.json, f"{args.model}: {len(record.nodes)} kernels")


if __name__ == "__main__":
    cli.run(main)
