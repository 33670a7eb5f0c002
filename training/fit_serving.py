"""Learns how a host's pace changes while it serves requests: from run to run, and after idle time.

Reads the predictors and the composition of a GPU target, and a workspace (--served) with models that were served in time slices
(benchmark/served_sets.py), which may be from another target. The workspace has their kernel records, and in its folder
`host_pace` readings of the host's pace for servers that did not read it themselves. Learns from models that were served alone;
without any, from those runs in sets during which no other model ran; and only from models for which the host is the slower
track. Writes training/predictors/<target>/serving.json, by which inference/sharing_advice.py simulates requests.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from statistics import median
from typing import Any

from hase.learned import target_files
from hase.learned.sharing import ServingHost
from hase.training.fits.serving import learn_serving_host
from hase.utils import cli, files
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("serving")
EXAMPLES = """
python training/fit_serving.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --served out/served
"""


def serving_rows(learned: ServingHost) -> list[dict[str, Any]]:
    """The learned numbers as table rows."""
    return [{"of": "pace of the host by its probe, relative to the usual one", "value": learned.pace},
            {"of": "pace in runs, relative to the probe's: lowest", "value": min(learned.paces)},
            {"of": "… median", "value": learned.median_pace},
            {"of": "… highest", "value": max(learned.paces)},
            {"of": "a pace lasts (ms)", "value": learned.lasts_ms},
            {"of": "stalls per second", "value": learned.stalls_per_s},
            {"of": "median length of a stall (ms)", "value": median(learned.stalls_ms or (0.0,))},
            *({"of": f"slower after {idle_ms:.3g} ms idle", "value": slower}
              for idle_ms, slower in zip(learned.idle_ms, learned.slower, strict=True))]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a target in training/predictors")
    parser.add_argument("--served", type=Path, required=True, metavar="WORKSPACE",
                        help="workspace with served models, their kernel records, and readings of the host's pace")
    args = parser.parse_args()
    workspace = cli.start(args)
    served = Workspace(cli.existing_folder("--served", args.served))
    with sole_writer(workspace.predictors("")):
        learned = learn_serving_host(served, workspace.predictors(args.target))
        files.write_json(path := target_files.SERVING.path(workspace.predictors(args.target)), learned)
    log.info("saved %s: from %d runs of %d models", path, learned.runs, learned.models)
    if args.json:
        cli.print_json(learned.model_dump(mode="json"))
    else:
        cli.print_table(serving_rows(learned))
    return 0


if __name__ == "__main__":
    cli.run(main)
