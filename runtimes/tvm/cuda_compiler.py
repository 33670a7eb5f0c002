"""Compiles the analysed kernels and models of TVM to machine code for a GPU, many at a time.

Otherwise the collector compiles them one by one, which takes longer than measuring them. Reads the models, and what
relax_parser.py --device cuda and operator_sampler.py --device cuda wrote. Writes kernel_model/kernel_onnx/<flavour>/cubins/,
which the collector reads. Needs TVM, but no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import os
from collections.abc import Mapping
from typing import NamedTuple

from hase.records.kernel_record_files import records_in
from hase.runtimes.tvm.compiling import (
    CUBINS,
    FUSED,
    SUFFIX,
    TUNED,
    arch_here,
    cached_cubin,
    check_compiler,
    check_tvm,
    compile_for,
    compile_function,
    compile_lowered,
    cuda_sources,
    gpu_target,
    read_function,
    runs_on_gpus,
    tvm_flavour,
    with_searched_schedules,
)
from hase.runtimes.tvm.recording import parse_at
from hase.runtimes.tvm.runtime import RUNTIME
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace, model_files
from hase.utils.processes import map_in_processes

log = get_logger("cuda_compiler")
EXAMPLES = """
python runtimes/tvm/cuda_compiler.py
python runtimes/tvm/cuda_compiler.py --arch sm_90 --jobs 4     # for an H100 or H200, on any machine
"""


class Compilation(NamedTuple):
    """A kernel's function, or a model, to compile."""

    path: Path  # of the kernel's function (`.tvm`) or of the model
    dims: Mapping[str, int]  # the sizes of a model's dynamic dimensions
    arch: str  # of the GPU
    folder: Path  # of the kernels of its flavour
    tuned: bool  # whether the kernels there have searched schedules


def compile_for_gpu(task: Compilation) -> str:
    """Compiles a kernel or model; returns the reason if it can't be compiled, else ""."""
    try:
        check_tvm()
        compile_for(task.arch, task.folder / CUBINS)
        target = gpu_target(task.arch)
        if task.path.suffix == SUFFIX:
            built = compile_function(read_function(task.path), target)
        else:
            lowered, graph, _ = parse_at(FUSED, task.path, task.dims, "cuda")
            built = compile_lowered(with_searched_schedules(lowered.module, graph.callees, task.folder) if task.tuned
                                   else lowered.module, target).mod
        for source in cuda_sources(built) if not runs_on_gpus() else ():
            cached_cubin(source, task.arch, task.folder / CUBINS)
    except (UserError, RuntimeError) as error:
        return str(error)
    return ""


def crashed(task: Compilation) -> str:
    """The message for a task that crashed its process."""
    return "TVM crashed while compiling it"


def tasks(workspace: Workspace, arch: str) -> list[Compilation]:
    """Everything to compile for a GPU architecture; models first, since they take longer."""
    files = {path.stem: path for path in model_files([workspace.models], RUNTIME.model_suffixes)}
    models, kernels = list[Compilation](), list[Compilation]()
    for level in (FUSED, TUNED):
        flavour = tvm_flavour("cuda", level)
        folder = workspace.kernel_onnx / flavour.name
        models += [Compilation(files[record.file_stem], record.dims, arch, folder, level == TUNED)
                   for record in records_in(workspace, flavour) if record.file_stem in files]
        kernels += [Compilation(path, {}, arch, folder, level == TUNED) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not kernels:
        raise UserError(f"{workspace.kernel_onnx}: no kernels of TVM for a GPU; make some with: "
                        "python runtimes/tvm/relax_parser.py --device cuda")
    return models + kernels


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--arch", metavar="SM", help="of the GPU, e.g. sm_90 (default: that of this machine's GPU)")
    parser.add_argument("--jobs", type=cli.count, default=os.cpu_count() or 1, metavar="N",
                        help="how many at a time (default: one for each core)")
    args = parser.parse_args()
    workspace = cli.start(args)
    check_tvm()
    check_compiler()
    work = tasks(workspace, args.arch or arch_here())
    reasons = map_in_processes(compile_for_gpu, work, args.jobs, crashed, "compiling for a GPU")
    failed = {task.path.name: reason for task, reason in zip(work, reasons, strict=True) if reason}
    for name, reason in failed.items():
        log.error("%s: %s", name, reason)
    row = {"arch": work[0].arch, "compiled": len(work) - len(failed), "failed": len(failed)}
    cli.print_rows([row], args.json, "machine code")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, kept="the machine code that was written")
