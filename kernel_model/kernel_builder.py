"""Writes every kernel as an ONNX model of its own that ONNX Runtime can load.

Reads a model's record, the index, or one kernel's JSON (by default the index of every flavour in
ort_analysis/ort_kernel_record). Writes kernel_model/kernel_onnx/<flavour>/<kernel id>.onnx, each with its description in its
metadata. Each file is self-contained and small: weights above 64 KiB repeat a few thousand random numbers, so an input takes a
few KiB at most.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.records.kernel_record_files import index_paths, kernels_in_file
from hase.runtimes import local_flavour, runtime_named
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

log = get_logger("builder")
EXAMPLES = """
python kernel_model/kernel_builder.py
python kernel_model/kernel_builder.py --record ort_analysis/ort_kernel_record/*/resnet18_fp32_b16_224x224.json --check
"""


def build_all(source: Path, workspace: Workspace, check: bool, force: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Builds the kernels in a file that `kernels_in_file` reads; with `check`, runs each once on dummy inputs. Returns a row
    for each kernel that now exists, and the ids of those that can't be built."""
    built: list[dict[str, Any]] = []
    failed: list[str] = []
    flavour, kernels = kernels_in_file(source)
    flavour = flavour or local_flavour(resolve_device("auto"))
    folder, runtime = workspace.kernel_onnx / flavour.name, runtime_named(flavour.runtime)
    if runtime.build_kernel is None or runtime.check_kernel is None:
        log.info("%s: %s builds its kernels when it takes a model apart: %s", source, runtime.title, runtime.build_with)
        return [], []
    for kernel in progress(kernels, "building"):
        path = folder / f"{kernel.id}{runtime.kernel_suffix}"
        try:
            kept = path.exists() and not force
            if not kept:
                runtime.build_kernel(kernel, folder)
            if check:
                runtime.check_kernel(path, kernel, flavour.device)
        except UserError as error:
            log.error("%s", error)
            failed.append(kernel.id)
            continue
        built.append({"kernel": kernel.id, "type": kernel.type, "file": str(path), "kept": kept})
    return built, failed


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--record", "--kernel", type=Path, action="append", dest="sources", metavar="JSON",
                        help="a model's record, an index, or one kernel's JSON (repeatable; default: every index)")
    parser.add_argument("--check", action="store_true", help="also run each kernel once on dummy inputs")
    parser.add_argument("--force", action="store_true", help="build again what is there already")
    args = parser.parse_args()
    workspace = cli.start(args)
    with sole_writer(workspace.kernel_onnx):
        results = [build_all(source, workspace, args.check, args.force) for source in args.sources or index_paths(workspace)]
    built, failed = ([name for part in parts for name in part] for parts in zip(*results, strict=True))
    kept_count = sum(row["kept"] for row in built)
    log.info("%d kernels built, %d kept, %d failed", len(built) - kept_count, kept_count, len(failed))
    if args.json:
        cli.print_json({"built": built, "failed": failed})
    else:
        cli.print_table([{"type": row["type"], "file": row["file"]} for row in built], "kernels")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, kept="what was built")
