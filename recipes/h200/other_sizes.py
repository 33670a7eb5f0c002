"""Exports ten models of the pool's kind at sizes that no dataset holds: other images, batches and lengths, and other seeds.

They judge predictions for a device that nothing was learned from. Writes `<model>_anew.onnx` to the workspace's models; analyse
them with recipes/h200/pool_records.py and time them with benchmark/collector.py --config recipes/h200/collect_pool.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from model_zoo.exporting.network_export import write_network
from model_zoo.exporting.onnx_export import short
from model_zoo.exporting.pool_export import network_source
from model_zoo.exporting.zoo_config import Collection
from utils import cli
from utils.logger import get_logger
from utils.processes import each_in_a_process

log = get_logger("exporter")
EXAMPLES = "python recipes/h200/other_sizes.py --workspace out/anew --jobs 5"


class Anew(NamedTuple):
    """A network at other sizes.

    Attributes:
        sizes: of its dynamic dimensions.
        image: height and width of its input, where they are not those of the pool.
    """

    collection: Collection
    name: str
    family: str
    sizes: Mapping[str, tuple[int, ...]]
    image: int = 0


NETWORKS = (
    Anew("timm", "seresnet50", "resnet", {"batch": (1, 6)}, image=160),
    Anew("timm", "efficientnet_lite0", "efficientnet", {"batch": (1, 24)}, image=288),
    Anew("timm", "dpn68", "dpn", {"batch": (3, 12)}, image=192),
    Anew("timm", "vit_tiny_patch16_224", "vit", {"batch": (5, 24)}),
    Anew("transformers", "albert", "bert", {"batch": (1, 3), "sequence": (160,)}),
    Anew("transformers", "llama_prefill", "llama", {"batch": (2,), "sequence": (80, 320)}),
    Anew("transformers", "mistral_token", "llama", {"batch": (4,), "past": (300, 2000)}),
    Anew("random", "random_conv_20", "random_conv", {"batch": (1, 6)}),
    Anew("random", "random_transformer_20", "random_transformer", {"batch": (1, 6)}),
    Anew("random", "random_mixed_20", "random_mixed", {"batch": (1, 6)}),
)


def export_anew(folder: Path, anew: Anew) -> str:
    """Writes one network's file in this process; why it could not, or nothing."""
    network = network_source(anew.collection).build_network(anew.name, anew.family)
    inputs = network.inputs
    if anew.image:
        inputs = tuple(dataclasses.replace(spec, shape=(*spec.shape[:2], anew.image, anew.image)) for spec in inputs)
    sizes = {**network.sizes, **anew.sizes}
    network = dataclasses.replace(network, name=f"{anew.name}_anew", inputs=inputs, sizes=sizes)
    try:
        write_network(network, "fp32", folder / f"{network.name}.onnx", "cpu")
    except Exception as error:  # noqa: BLE001  (whatever a library stumbles on costs one model)
        return f"{network.name}: {short(error)}"
    return ""


def _crashed(anew: Anew) -> str:
    return f"{anew.name}: the exporting process died, most likely for lack of memory"


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="networks at a time (default: 1)")
    args = parser.parse_args()
    workspace = cli.start(args, begins=True)
    workspace.models.mkdir(parents=True, exist_ok=True)
    done = each_in_a_process(partial(export_anew, workspace.models), NETWORKS, args.jobs, _crashed, "exporting")
    failed = [why for why in done if why]
    for why in failed:
        log.error("%s", why)
    log.info("%d of %d networks written to %s", len(done) - len(failed), len(done), workspace.models)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
