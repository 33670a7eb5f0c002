"""Makes one table of kernels on several GPUs from public measurements and from Hase's own datasets of two cards.

Public: matrix products and attention in bf16 on six cards (ai-dynamo/aiconfigurator, Apache-2.0, commit 095f58a), and
operators in fp32 on ten (sitar-lab/NeuSight, MIT, commit 6945927), as files of the folder --external. Own: kernels that were
measured with ONNX Runtime on an H100 and on an H200 (--own WORKSPACE TARGET, twice). Large tables are sampled with a fixed
seed. Writes --out: a line for each kernel on each card.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Iterator

import numpy as np

from hase.learned.data_sheet.work import DTYPES, KINDS, work_of
from hase.learned.kernels.measured import measured_times, times_under
from hase.records.dataset_files import read_kernels
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.fits.data_sheets import ABOUT, COLUMNS
from hase.utils import cli
from hase.utils.lazy import pandas as pd
from hase.utils.paths import Workspace

EXAMPLES = """
python recipes/gpus/derive_tables.py --external external --out recipes/gpus/tables.csv.xz \\
  --own out/h200 nvidia-h200-cuda-ort1.31-all --own out/h100 nvidia-h100-80gb-hbm3-cuda-ort1.31-all  # needs both
"""
CARDS = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "l40s": "l40s"}
NEUSIGHT_CARDS = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA L4": "l4", "Tesla P100-PCIE-16GB": "p100", "Tesla P4": "p4", "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie"}
SAMPLES = {"gemm": 7000, "context attention": 3500, "generation attention": 3500, "neusight": 2500, "neusight products": 5000}
HALF, SINGLE = 2, 4  # bytes
ROW_OPERATORS = ("ln", "softmax", "add", "addu", "div", "divu", "gelu", "mul", "mulu", "pow", "powu", "relu", "tanh")
TWO_OPERANDS = ("add", "div", "mul", "pow")
FLOPS_EACH = {"ln": 8, "softmax": 13, "gelu": 15, "tanh": 10, "pow": 10, "powu": 10}


def rows_of(frame: pd.DataFrame, table: str, kind: str, dtype: str, operator: str, cards: dict[str, str], gpu: str,
            latency: str, split: str = "") -> pd.DataFrame:
    """Rows with COLUMNS; `frame` must have shape, flops, moved_bytes and outputs."""
    frame = frame[frame[gpu].isin(list(cards))]
    return pd.DataFrame({
        "table": table, "kind": kind, "dtype": dtype, "operator": operator, "shape": frame["shape"], "flops": frame["flops"],
        "moved_bytes": frame["moved_bytes"], "outputs": frame["outputs"], "launches": 1.0,
        "split": frame[split] if split else "", "gpu": frame[gpu].map(cards), "ms": frame[latency]})


def sampled(rows: pd.DataFrame, count: int, least_cards: int = 2) -> pd.DataFrame:
    """Rows of at most `count` kernels that at least `least_cards` cards have."""
    cards = rows.groupby("shape")["gpu"].nunique()
    shapes = cards.index[cards >= least_cards].to_numpy()
    if len(shapes) > count:
        shapes = np.random.default_rng(0).choice(shapes, count, replace=False)
    return rows[rows["shape"].isin(set(shapes))]


def shape_text(frame: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Identifies the shape of each row by the values of some columns."""
    return frame[columns].astype(str).agg("x".join, axis=1)


def products(folder: Path) -> Iterator[pd.DataFrame]:
    """Rows of bf16 matrix products, and of attention."""
    frame = pd.read_csv(folder / "aiconfigurator_gemm_perf.csv.xz")
    m, n, k = (frame[name].astype(float) for name in "mnk")
    frame = frame.assign(shape=shape_text(frame, ["m", "n", "k"]), flops=2 * m * n * k,
                         moved_bytes=HALF * (m * k + k * n + m * n), outputs=m * n)
    yield sampled(rows_of(frame, "products", "product", "bfloat16", "MatMul", CARDS, "gpu", "latency"), SAMPLES["gemm"], 6)
    for name in ("context", "generation"):
        frame = pd.read_csv(folder / f"aiconfigurator_{name}_attention_perf.csv.xz")
        frame = frame[~(frame["window_size"] > 0)]
        batch, heads, kv, size = (frame[column].astype(float) for column in (
            "batch_size", "num_heads", "num_key_value_heads", "head_dim"))
        queries = frame["isl"].astype(float)
        keys = queries if name == "context" else frame["step"].astype(float) + 1.0
        pairs = batch * heads * queries * keys * (0.5 if name == "context" else 1.0)
        frame = frame.assign(
            shape=shape_text(frame, ["batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim"]),
            flops=4 * pairs * size, outputs=batch * queries * heads * size,
            moved_bytes=HALF * batch * size * (2 * queries * heads + 2 * keys * kv))
        yield sampled(rows_of(frame, "attention", "attention", "bfloat16", f"{name} attention", CARDS, "gpu", "latency"),
                      SAMPLES[f"{name} attention"], 5)


def neusight_sample(frame: pd.DataFrame, kind: str, dtype: str, operator: str) -> pd.DataFrame:
    rows = rows_of(frame, "neusight", kind, dtype, operator, NEUSIGHT_CARDS, "Device", "Latency", "split")
    return sampled(rows, SAMPLES["neusight" if operator in ROW_OPERATORS else "neusight products"])


def neusight(folder: Path) -> Iterator[pd.DataFrame]:
    """A sample of kernels for each of NeuSight's operators, in fp32; products without TF32."""
    for name in ("bmm", "linear"):
        frame = pd.read_csv(folder / f"neusight_{name}.csv.xz")
        b, m, n, k = (frame[column].astype(float) for column in "BMNK")
        frame = frame.assign(shape=shape_text(frame, list("BMNK")), flops=2 * b * m * n * k, outputs=b * m * n,
                             moved_bytes=SINGLE * b * (m * k + k * n + m * n))
        yield neusight_sample(frame, "product", "plain float32", name)
    frame = pd.read_csv(folder / "neusight_conv.csv.xz")
    b, cin, cout, window, size, stride, pad = (frame[column].astype(float) for column in (
        "B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"))
    side = np.floor((size + 2 * pad - window) / stride) + 1
    frame = frame.assign(
        shape=shape_text(frame, ["B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"]),
        flops=2 * b * side**2 * cout * cin * window**2, outputs=b * cout * side**2,
        moved_bytes=SINGLE * (b * cin * size**2 + cout * cin * window**2 + b * cout * side**2))
    yield neusight_sample(frame, "convolution", "plain float32", "conv")
    for name in ROW_OPERATORS:
        frame = pd.read_csv(folder / f"neusight_{name}.csv.xz")
        elements = frame["B"].astype(float) * frame["H"].astype(float)
        frame = frame.assign(shape=name + shape_text(frame, ["B", "H"]), flops=FLOPS_EACH.get(name, 1) * elements,
                             outputs=elements, moved_bytes=SINGLE * elements * (3 if name in TWO_OPERANDS else 2))
        kind = "normalisation" if name in ("ln", "softmax") else "elementwise"
        yield neusight_sample(frame, kind, "float32", name)


def own(datasets: list[list[str]]) -> pd.DataFrame:
    """Kernels measured on the cards of all these datasets."""
    times = [(target, measured_times(Workspace(Path(folder)), target)) for folder, target in datasets]
    shared = set.intersection(*(set(times_under(GPU_LABEL, measured)) for _, measured in times))
    kernels = [entry.kernel for entry in read_kernels(Workspace(Path(datasets[0][0])).dataset(datasets[0][1]), shared)]
    work = work_of(kernels, [times[0][1][kernel.id].get(LAUNCHES, 1.0) for kernel in kernels])
    facts = pd.DataFrame({
        "table": "onnxruntime", "kind": [KINDS[kind] for kind in work.kinds], "dtype": [DTYPES[dtype] for dtype in work.dtypes],
        "operator": [kernel.op_type for kernel in kernels], "shape": [kernel.id for kernel in kernels], "flops": work.flops,
        "moved_bytes": work.moved_bytes, "outputs": work.outputs, "launches": work.launches, "split": ""})
    return pd.concat([facts.assign(gpu=target.split("-")[1], ms=[measured[kernel.id]["gpu"] for kernel in kernels])
                      for target, measured in times])


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--external", type=Path, required=True, help="the folder of the public tables")
    parser.add_argument("--own", nargs=2, action="append", default=[], metavar=("WORKSPACE", "TARGET"),
                        help="a dataset of Hase's own (repeat for each card)")
    parser.add_argument("--out", type=Path, required=True, help="where the table goes")
    args = parser.parse_args()
    cli.start(args)
    cli.existing_folder("--external", args.external)
    parts = [*products(args.external), *neusight(args.external), *([own(args.own)] if args.own else [])]
    table = pd.concat(parts).sort_values(["table", *ABOUT, "gpu"])
    for column in ("flops", "moved_bytes", "outputs", "ms"):
        table[column] = table[column].map(lambda value: float(f"{value:.5g}"))
    table[list(COLUMNS)].to_csv(args.out, index=False)
    cli.print_rows([{"table": name, "lines": len(rows), "kernels": rows["shape"].nunique(),
                     "gpus": " ".join(sorted(rows["gpu"].unique()))} for name, rows in table.groupby("table")], args.json,
                   "tables")
    return 0


if __name__ == "__main__":
    cli.run(main)
