"""How much memory a session really holds on this machine, compared with the prediction.

Opens each model in a process of its own with ONNX Runtime's defaults and runs it four times with made-up inputs. The memory
held is that at the peak of the runs, beyond what was held after a tiny model had run: on a CPU the process's resident memory,
on a GPU (--device cuda, tensors on the device) the device's memory in use; nothing else may use the GPU meanwhile. Prints one
row per model; writes nothing. Linux only.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from hase.benchmark.measuring.held_memory import RESET_PEAK, HeldMemory
from hase.benchmark.ort.runner import bind, random_feed
from hase.inference.core.memory import peak_memory
from hase.ort_analysis.isolated.analysis import own_sizes, record_of
from hase.runtimes import flavour_of
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import open_nodes, open_session
from hase.utils.paths import ROOT

RUNS = 4
EXAMPLES = """
python inference/memory_error.py --model resnet18.onnx
python inference/memory_error.py --model resnet18.onnx --dim batch=1,8 --json
"""


def hold(model: Path, dims: Mapping[str, int], device: str) -> float:
    """The memory that a session of `model` holds in this process, MiB; call it once per process."""
    tiny = open_nodes([onnx.helper.make_node("MatMul", ["x", "x"], ["y"])], ["x"], [64, 64], device, "tiny")
    bind(tiny, random_feed(tiny), device, "device")()
    memory = HeldMemory(device)
    session = open_session(model, device, dims=dims)
    memory.opened()
    run_once = bind(session, random_feed(session), device, "device")
    for _ in range(RUNS):
        run_once()
    return memory.peak_mib


def held_mib(model: Path, dims: Mapping[str, int], device: str = "cpu") -> float:
    """The memory that a session of `model` holds, MiB, measured in a process of its own.

    Args:
        model: an ONNX file.
        dims: sizes of its dynamic dimensions.
        device: `cpu` or `cuda`.

    Raises:
        UserError: this is not Linux, or the model can't be run.
    """
    if not RESET_PEAK.exists():
        raise UserError("resident memory is measured as Linux reports it; this system has no /proc/self/clear_refs")
    program = (f"from pathlib import Path; from hase.inference.memory_error import hold; "
               f"print(hold(Path({str(model.resolve())!r}), {dict(dims)}, {device!r}))")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{model}: its run failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return float(json.loads(done.stdout))


def row(model: Path, dims: Mapping[str, int], device: str = "cpu") -> dict[str, Any]:
    """Predicted and held memory of one model, as a row of the table."""
    record = record_of(model, flavour_of(device), dims, static=device == "cuda")
    predicted, held = peak_memory(record), held_mib(model, record.dims_run, device)
    names = ("weights", "activations", "arena", "workspace", "loading")
    parts = {f"{name} (MiB)": getattr(predicted, f"{name}_mib") for name in names}
    return {"model": record.model, "held (MiB)": held, "predicted (MiB)": predicted.peak_mib,
            "error": f"{predicted.peak_mib / held - 1:+.1%}", **parts}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, action="append",
                        help="an ONNX file; a bare name is also looked for in model_zoo; may be repeated")
    cli.add_dim(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose memory (default: cpu)")
    args = parser.parse_args()
    workspace = cli.start(args)

    sizes = cli.parse_dims(args.dim)
    sized = [(model, dims) for model in map(workspace.find_model, args.model) for dims in own_sizes(model, sizes)]
    rows = [row(model, dims, args.device) for model, dims in cli.progress(sized, "measuring")]
    if args.json:
        cli.print_json(rows)
    else:
        cli.print_table(rows, f"memory of a session on this machine's {args.device}")
    return 0


if __name__ == "__main__":
    cli.run(main)
