"""Makes one table of kernels on several GPUs from public measurements and from Hase's own datasets of two cards.

Public: matrix products and attention in bf16 on six cards (ai-dynamo/aiconfigurator, Apache-2.0, commit 095f58a), and
operators in fp32 on ten (sitar-lab/NeuSight, MIT, commit 6945927), as files of the folder --external. Own: kernels that were
measured with ONNX Runtime on an H100 and on an H200 (--own WORKSPACE TARGET, twice). Of the large tables a sample is taken, by
a fixed seed. Writes --out: a line for each kernel on each card.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.learned.data_sheet.work import DTYPES, KINDS, work_of
from hase.learned.kernels.settings import LAUNCHES
from hase.recipes.gpus.public_tables import neusight, products
from hase.records.dataset_files import read_kernels
from hase.records.measurement import GPU_LABEL
from hase.training.data_sheet.tables import ABOUT, COLUMNS
from hase.training.kernels.training_set import measured_times, times_under
from hase.utils import cli
from hase.utils.lazy import pandas as pd
from hase.utils.paths import Workspace

EXAMPLES = """
python recipes/gpus/derive_tables.py --external external --out recipes/gpus/tables.csv.xz \\
  --own out/h200 nvidia-h200-cuda-ort1.31-all --own out/h100 nvidia-h100-80gb-hbm3-cuda-ort1.31-all  # needs both
"""


def own(datasets: list[list[str]]) -> pd.DataFrame:
    """Kernels that were measured on the cards of all these datasets."""
    times = [(target, measured_times(Workspace(Path(folder)), target)) for folder, target in datasets]
    shared = set.intersection(*(set(times_under(GPU_LABEL, measured)) for _, measured in times))
    listed = [entry.kernel for entry in read_kernels(Workspace(Path(datasets[0][0])).dataset(datasets[0][1]), shared)]
    work = work_of(listed, [times[0][1][kernel.id].get(LAUNCHES, 1.0) for kernel in listed])
    about = pd.DataFrame({
        "table": "onnxruntime", "kind": [KINDS[kind] for kind in work.kinds], "dtype": [DTYPES[dtype] for dtype in work.dtypes],
        "operator": [kernel.op_type for kernel in listed], "shape": [kernel.id for kernel in listed], "flops": work.flops,
        "moved_bytes": work.moved_bytes, "outputs": work.outputs, "launches": work.launches, "split": ""})
    return pd.concat([about.assign(gpu=target.split("-")[1], ms=[measured[kernel.id]["gpu"] for kernel in listed])
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
