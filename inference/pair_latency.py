"""Phase 7.6: two models on one GPU: each one's latency while the other runs in a loop, in a process of its own on the same GPU.

Reads both models and what training learned for the target, how it is shared above all. What each meets of the other is that
one's predicted run: the GPU is the other's until what it dispatched is done, or for the longest turn that it may have. Prints
a row for each model; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping
from typing import TYPE_CHECKING

from inference.sharing import UnderLoad
from ort_analysis.records import Frozen
from utils import cli
from utils.logger import get_logger

if TYPE_CHECKING:
    from inference.shared_models import SharedModel
    from inference.sources import Source
    from utils.paths import Workspace

EXAMPLES = """
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet50.onnx --target nvidia-h200
python inference/pair_latency.py --model a.onnx --dim batch=1 --beside-model b.onnx --beside-dim batch=16 --target nvidia-h200
"""

log = get_logger("pair_latency")


class OneOfTwo(Frozen):
    """A model's latency alone, and its distribution while the other one runs in a loop; a rough estimate where that of either
    model alone is one."""

    model: str
    dims: dict[str, int]
    idle_ms: float
    under_load: UnderLoad
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()


class Pair(Frozen):
    """Two models on one GPU, in the order in which they were given; with the predictions' warnings."""

    target: str
    models: tuple[OneOfTwo, OneOfTwo]
    warnings: tuple[str, ...]


def predict_pair(source: Source, beside: Source, *, dims: Mapping[str, int] | None = None,
                 beside_dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                 workspace: Workspace | None = None, force: bool = False, static: bool = False) -> Pair:
    """Two models side by side, each in a process of its own that runs it again and again without a pause.

    Args:
        source, beside: the models, as `inference.predict` takes them; they may be the same.
        dims, beside_dims: sizes of their dynamic dimensions by name.

    The other arguments and the errors are those of `inference.shared_model`.
    """
    from inference.shared_models import shared_model

    one, two = (shared_model(model, dims=sizes, target=target, strict=strict, workspace=workspace, force=force,
                             static=static)
                for model, sizes in ((source, dims), (beside, beside_dims)))
    return Pair(target=one.idle.target, models=(_beside(one, two), _beside(two, one)),
                warnings=tuple(dict.fromkeys((*one.idle.warnings, *two.idle.warnings))))


def _beside(model: SharedModel, other: SharedModel) -> OneOfTwo:
    return OneOfTwo(model=model.idle.model, dims=model.idle.dims, idle_ms=model.idle.latency_ms,
                    under_load=model.beside(other.in_a_loop(model), "prediction"),
                    rough_estimate=model.idle.rough_estimate or other.idle.rough_estimate,
                    estimated_operators=model.idle.estimated_operators)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    parser.add_argument("--beside-model", type=Path, required=True, metavar="MODEL", help="the other one, likewise")
    parser.add_argument("--beside-dim", action="append", default=[], metavar="NAME=SIZE", help="size of its dynamic dimension")
    cli.add_target(parser)
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    pair = predict_pair(args.model, args.beside_model, dims=cli.one_size_dims(args.dim),
                        beside_dims=cli.one_size_dims(args.beside_dim), target=args.target, strict=args.strict,
                        workspace=workspace, force=args.force, static=args.static)
    for warning in pair.warnings:
        log.warning("%s", warning)
    if args.json:
        cli.print_json(pair)
        return 0
    cli.print_table([
        {"model": one.model, "beside": other.model, "alone (ms)": one.idle_ms, **one.under_load.columns(),
         "mean / alone": one.under_load.mean_ms / one.idle_ms,
         **({"rough estimate": "yes"} if one.rough_estimate else {})}
        for one, other in (pair.models, pair.models[::-1])], f"side by side on {pair.target}")
    return 0


if __name__ == "__main__":
    cli.run(main)
