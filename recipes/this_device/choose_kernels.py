"""Writes recipes/this_device/kernels.jsonl.xz: the kernels that tell most about a GPU in a short time, most useful first.

Reads the dataset of the H200 in the workspace. Each kernel of the list is the one that most reduces the uncertainty that the
earlier ones leave about the kernels of the dataset's models, each model counting alike, and of language models
(training/fits/data_sheets.py). Kernels that take long or need much memory, which would be slow on a small card, are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from hase.kernel_model.sampling.draws import footprint_mib, on_cuda
from hase.learned.data_sheet.work import Floats, Work, work_of
from hase.learned.kernels.measured import measured_times, times_under
from hase.recipes.this_device.steps import CHOSEN, write_chosen
from hase.records.dataset_files import read_header, read_kernels
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import records_in
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.records.operators import operator_row
from hase.training.fits.data_sheets import card, most_useful
from hase.utils import cli
from hase.utils.paths import Workspace

MOST_MS, MOST_MIB = 5.0, 256.0  # of a kernel, on the H200
CANDIDATES, PREDICTED = 3000, 2500  # kernels to choose from, and kernels whose uncertainty counts
LANGUAGE_SHARE = 0.2  # of language models' kernels, both in CANDIDATES and in PREDICTED
LANGUAGE_OPERATORS = ("GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "RotaryEmbedding",
                      "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
EXAMPLES = """
python recipes/this_device/choose_kernels.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all  # needs this dataset
"""


def shares_of_models(records: Sequence[ModelRecord], times_ms: Mapping[str, float]) -> dict[str, float]:
    """The share of each kernel in the time of the models that hold it, summed over models."""
    shares: dict[str, float] = {}
    for record in records:
        counts = Counter(node.kernel_id for node in record.nodes if node.kernel_id in times_ms)
        total_ms = sum(times_ms[name] * count for name, count in counts.items())
        for name, count in counts.items():
            shares[name] = shares.get(name, 0.0) + times_ms[name] * count / total_ms
    return shares


def suits_any_card(kernel: Kernel, time_ms: float) -> bool:
    """Whether a small card can measure it quickly, and ONNX Runtime for CUDA runs it."""
    return (0 < time_ms < MOST_MS and footprint_mib(kernel) < MOST_MIB and on_cuda(kernel) and kernel.moves_data
            and not operator_row(kernel.op_type).copies)


def most_useful_kernels(workspace: Workspace, target: str, count: int) -> list[Kernel]:
    """The most useful kernels of a dataset, most useful first."""
    header, generator = read_header(workspace.dataset(target)), np.random.default_rng(0)
    labels = measured_times(workspace, target)
    times_ms = times_under(GPU_LABEL, labels)
    shares = shares_of_models(records_in(workspace, header.target.flavour), times_ms)
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(target), set(times_ms))}
    suited = {name for name in sorted(kernels) if suits_any_card(kernels[name], times_ms[name])}
    language = [name for name in sorted(suited) if kernels[name].op_type in LANGUAGE_OPERATORS and name not in shares]
    in_models = [name for name in sorted(suited) if name in shares]
    weights = np.array([shares[name] for name in in_models])

    def drawn(count: int, repeated: bool) -> list[str]:
        """Random kernels of models by their share of the time (with replacement if `repeated`), and of language models."""
        chosen = generator.choice(in_models, min(round((1 - LANGUAGE_SHARE) * count), len(in_models)), repeated,
                                  weights / weights.sum())
        others = generator.choice(language, min(round(LANGUAGE_SHARE * count), len(language)), False)
        return [*chosen.tolist(), *others.tolist()]

    def work(names: Sequence[str]) -> tuple[Work, Floats]:
        return (work_of([kernels[name] for name in names], [labels[name].get(LAUNCHES, 1.0) for name in names]),
                np.array([times_ms[name] for name in names]))

    candidates = drawn(CANDIDATES, False)
    chosen = most_useful(*work(candidates), *work(drawn(PREDICTED, True)), card(header.target.device_name), count)
    return [kernels[candidates[index]] for index in chosen]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="of the dataset")
    parser.add_argument("--count", type=cli.count, default=1000, help="kernels (default: 1000)")
    args = parser.parse_args()
    kernels = most_useful_kernels(cli.start(args), args.target, args.count)
    write_chosen(kernels)
    cli.print_rows([{"operator": name, "kernels": count} for name, count in Counter(
        kernel.op_type for kernel in kernels).most_common()], args.json, f"kernels of {CHOSEN.name}")
    return 0


if __name__ == "__main__":
    cli.run(main)
