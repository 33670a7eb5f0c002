"""Searches schedules for the kernels of models under TVM, which without them run on naive ones.

Reads the records of TVM's fused kernels and their functions (runtimes/tvm/relax_parser.py). Writes records of the flavour
`tuned`, with the fastest function of each kernel, to the same places, and TVM's trials to the folder `tuning` next to the
functions. The same command goes on where it was stopped; a kernel that was searched is not searched again.
Needs TVM: pip install -r requirements-tvm.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
import time
from collections.abc import Sequence
from typing import Any

import psutil

from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_records, record_path, update_index
from hase.runtimes.tvm.functions import function_path, read_function, write_function
from hase.runtimes.tvm.package import FUSED, TUNED, arch_here, compile_for, tvm_flavour
from hase.runtimes.tvm.tuning import DATABASE, tune
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("tuning")
EXAMPLES = """
python runtimes/tvm/tune_kernels.py
python runtimes/tvm/tune_kernels.py --trials 64 --minutes 30 --threads 2
python runtimes/tvm/tune_kernels.py --model resnet18 --trials 32      # one network as a whole
python runtimes/tvm/tune_kernels.py --device cuda --trials 32 --minutes 30
"""


def records_named(records: Sequence[ModelRecord], names: Sequence[str]) -> list[ModelRecord]:
    """The records whose names begin with one of `names`; all of them if there are no names.

    Raises:
        UserError: no record's name begins so.
    """
    for name in names:
        if not any(record.model.startswith(name) for record in records):
            raise UserError(f"--model {name}: no record of this model under TVM (analysed: "
                            f"{', '.join(record.model for record in records)})")
    return [record for record in records if not names or record.model.startswith(tuple(names))]


def by_work(records: Sequence[ModelRecord]) -> list[Kernel]:
    """The kernels of all models that compute anything; those on which most work is spent come first."""
    work: dict[str, float] = {}
    kernels = {name: kernel for record in records for name, kernel in record.kernels.items() if "function" in kernel.attributes}
    for record in records:
        for node in record.nodes:
            kernel = record.kernel_of(node)
            work[kernel.id] = work.get(kernel.id, 0.0) + kernel.flops + kernel.bytes_read + kernel.bytes_written
    return sorted(kernels.values(), key=lambda kernel: -work[kernel.id])


def tune_kernels(workspace: Workspace, trials: int, threads: int, seconds: float = math.inf,
                 device: str = "cpu", models: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Searches the schedule of each kernel that has none yet; returns a row for each that it searched.

    When the time is over, the remaining kernels have no function of the flavour `tuned`: a later call searches them, and until
    then whole networks run them without a schedule.

    Args:
        models: beginnings of the names of models; by default all models.

    Raises:
        UserError: TVM is not installed, there are no records, or none that begins with one of `models`; a function can't be
            read, or there is no GPU.
    """
    flavour, tuned = tvm_flavour(device, FUSED), tvm_flavour(device, TUNED)
    if device == "cuda":
        compile_for(arch_here())
    records = read_model_records(workspace, flavour)
    chosen, until_s, rows = records_named(records, models), time.monotonic() + seconds, []
    for record in records:
        files.write_json(record_path(workspace, tuned, record.model), record.model_copy(update={"flavour": tuned}))
    update_index(workspace, tuned)
    database = workspace.kernel_onnx / tuned.name / DATABASE
    todo = [kernel for kernel in by_work(chosen) if not function_path(workspace, tuned, kernel.id).is_file()]
    for kernel in cli.progress(todo, f"searching schedules, {trials} trials each"):
        if time.monotonic() > until_s:
            break
        function = read_function(function_path(workspace, flavour, kernel.id))
        result = tune(function, kernel, device, threads, trials, database)
        write_function(function_path(workspace, tuned, kernel.id), kernel, result.function)
        rows.append({"kernel": kernel.id, "type": kernel.type, "before_ms": result.before_ms, "after_ms": result.after_ms,
                     "times_faster": result.before_ms / result.after_ms, "trials": result.worked})
    if left := len(todo) - len(rows):
        log.warning("%d kernels are left without a schedule; run the same command again to go on", left)
    return rows


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", action="append", default=[], metavar="NAME",
                        help="only kernels of models whose names begin so (repeatable; default: all)")
    parser.add_argument("--trials", type=cli.count, default=16, metavar="N",
                        help="schedules tried for each kernel (default: 16)")
    parser.add_argument("--threads", type=cli.count, default=psutil.cpu_count(logical=False) or 1, metavar="N",
                        help="that schedules may use on a CPU (default: one for each physical core)")
    parser.add_argument("--minutes", type=cli.positive, default=math.inf, metavar="N",
                        help="begin no further kernel after N minutes (default: no limit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default: cpu)")
    args = parser.parse_args()
    workspace = cli.start(args)
    with sole_writer(workspace.kernel_records), measuring(args.device):
        rows = tune_kernels(workspace, args.trials, args.threads, 60 * args.minutes, args.device, args.model)
    cli.print_rows(rows, args.json, "kernels and their schedules")


if __name__ == "__main__":
    cli.run(main, kept="the schedules that were found")
