"""How much memory a session really holds on this machine, compared with the prediction.

Opens each model in a process of its own with ONNX Runtime's defaults and runs it four times with made-up inputs. On a CPU,
the memory held is the largest resident memory during the runs. On a GPU (--device cuda, tensors on the device) it is the
device's memory in use after them; nothing else may use the GPU meanwhile. What was in use after ONNX Runtime had run a tiny
model is subtracted. Prints one row per model; writes nothing. Linux only.
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

import numpy as np

from inference.core.memory import peak_memory
from records.kernel_record import numpy_dtype, session_dtype
from runtimes import flavour_of
from runtimes.analysis import own_sizes, record_of
from runtimes.ort.runner import bind, random_feed
from runtimes.ort.worker import memory_in_use_mib
from utils import cli
from utils.errors import UserError
from utils.lazy import onnx
from utils.ort_sessions import open_nodes, open_session
from utils.paths import ROOT

RUNS = 4
STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
EXAMPLES = """
python inference/memory_error.py --model resnet18.onnx
python inference/memory_error.py --model resnet18.onnx --dim batch=1,8 --json
"""


def resident_mib(peak: bool) -> float:
    """This process's resident memory in MiB, or its peak since RESET_PEAK was written to."""
    key = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) / 1024 for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key))


def hold_on_gpu(model: Path, dims: Mapping[str, int]) -> float:
    """How much running `model` adds to the memory in use on the GPU, MiB; call it once per process."""
    tiny = open_nodes([onnx.helper.make_node("MatMul", ["x", "x"], ["y"])], ["x"], [64, 64], "cuda", "tiny")
    bind(tiny, random_feed(tiny), "cuda", "device")()
    before = memory_in_use_mib("cuda")
    session = open_session(model, "cuda", dims=dims)
    run_once = bind(session, random_feed(session), "cuda", "device")
    for _ in range(RUNS):
        run_once()
    return memory_in_use_mib("cuda") - before


def hold(model: Path, dims: Mapping[str, int]) -> float:
    """How much running `model` adds to this process at its peak, MiB; call it once per process."""
    shape = [4]
    tiny = open_nodes([onnx.helper.make_node("Relu", ["x"], ["y"])], ["x"], shape, "cpu", "tiny")
    tiny.run(None, {"x": np.zeros(shape, np.float32)})
    before = resident_mib(peak=False)
    session = open_session(model, "cpu", dims=dims)
    inputs = {value.name: np.ones(value.shape, numpy_dtype(session_dtype(value.type))) for value in session.get_inputs()}
    RESET_PEAK.write_text("5", encoding="ascii")  # the peak while loading does not count
    for _ in range(RUNS):
        session.run(None, inputs)
    return resident_mib(peak=True) - before


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
    measure = "hold_on_gpu" if device == "cuda" else "hold"
    program = (f"from pathlib import Path; from inference.memory_error import {measure}; "
               f"print({measure}(Path({str(model.resolve())!r}), {dict(dims)}))")
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
