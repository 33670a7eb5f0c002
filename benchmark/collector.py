"""Measures the dataset: every kernel and every model, at every level and kind of load, with the device's metrics.

Reads kernel_model/kernel_onnx/<flavour> (each kernel is timed alone, and among others in a carrier), the models' records and
files (each model is timed whole, and its kernels in it), and benchmark/config.yaml. Writes benchmark/dataset/<target>/:
measurements.jsonl while it runs, and from it kernel_latency.csv and model_latency.csv.

The outer loop goes over levels, the inner one over backgrounds (what the stressor does). Kernels and models are measured in
blocks: first a window of metrics with the stressor alone, then a canary, then the block's runs with a second window around
them, then the canary again. If the two canaries differ, the block is measured again after all others, and the steadiest
attempt counts. If none was steady, it is marked in both tables; --remeasure measures it once more. Each block is written as one
line, so a killed run neither loses nor repeats a row: the same command resumes it.

Several machines of one target may share the work (`each_machine: false`). Then a machine omits what others measured, except
for a few kernels, the `ties`, which it measures too; benchmark/dataset.py --machines compares them. With --ray, all devices of
a Ray cluster share the work at the same time (docs/cluster.md).

With --minutes, the collector stops in time, and the most useful measurements come first: the models and their kernels, then
those of the sampled kernels that are least like any that was measured (kernel_model/sampling/usefulness.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from contextlib import nullcontext

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.ray_actors import ray_devices
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT

log = get_logger("collector")
EXAMPLES = """
python benchmark/collector.py
python benchmark/collector.py --minutes 15
python benchmark/collector.py --remeasure
python benchmark/collector.py --ray auto --set each_machine=false
python benchmark/collector.py --config recipes/demo/collector.yaml --workspace out/demo  # needs make demo
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_config(parser, ROOT / "benchmark" / "config.yaml", "levels=[0.0]", "what to measure, and how")
    parser.add_argument("--minutes", type=cli.positive, metavar="N",
                        help="begin nothing more after N minutes, and measure what is most useful first (default: no limit)")
    parser.add_argument("--remeasure", action="store_true",
                        help="measure again what was kept although the idle machine was unsteady; what is steadier replaces it")
    parser.add_argument("--ray", metavar="ADDRESS", help="measure on all devices of the Ray cluster at HOST:PORT; auto: of the "
                        "cluster that this machine belongs to, or on all GPUs of this machine (default: this process measures)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, CollectorConfig, args.changes)
    with nullcontext() if args.ray is None else ray_devices(args.ray, config) as devices:
        result = collect(workspace, config, args.minutes, args.remeasure, devices)
    if args.json:
        cli.print_json(result)
    else:
        cli.print_table([{**result, "failed": len(result["failed"])}])
    if result["failed"]:
        log.error("%d failed, as their rows say: %s", len(result["failed"]), ", ".join(result["failed"]))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
