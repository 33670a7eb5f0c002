"""Records the answers that tests/recipes/test_same_predictions.py compares predictions with, after an intended change.

Asks the questions in `questions.py`, prints what changed, and writes answers.json.xz in the same folder. With --models, it
first makes new records of models; with --cpu, it first packs the workspace of a CPU's dataset. `run.sh` makes both.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import lzma
import tempfile
from collections.abc import Iterable
from typing import Any

from hase.ort_analysis.graph.analysis import analyze
from hase.recipes.same_predictions import questions as asked
from hase.utils import cli, files
from hase.utils.files import pack
from hase.utils.logger import get_logger

log = get_logger("same_predictions")
SHOWN = 20  # differences
EXAMPLES = """
python recipes/same_predictions/record.py
python recipes/same_predictions/record.py --check
python recipes/same_predictions/record.py --check --exact
python recipes/same_predictions/record.py --models out/kinds --cpu out/same_predictions/cpu
"""


def read_answers() -> dict[str, Any]:
    """The answers as they were recorded; none where they never were."""
    if not asked.ANSWERS.exists():
        return {}
    answers: dict[str, Any] = json.loads(lzma.decompress(asked.ANSWERS.read_bytes()))
    return answers


def write_answers(answers: dict[str, Any]) -> None:
    files.write_bytes(asked.ANSWERS, lzma.compress(json.dumps(answers, separators=(",", ":")).encode(), preset=9))


def ask_all() -> dict[str, Any]:
    """The current answer to every question."""
    with tempfile.TemporaryDirectory() as folder:
        return asked.answers(asked.unpacked(Path(folder)))


def records_of(models: Path) -> Iterable[tuple[str, bytes]]:
    """The records of the models in the questions, for both devices."""
    for device in ("cuda", "cpu"):
        for name in asked.RECORDED:
            stem, _, sizes = name.partition("@")
            dims = {key: int(size) for key, size in (part.split("=") for part in sizes.split(",") if "=" in part)}
            record = analyze(models / f"{stem}.onnx", device, dims, static=name in asked.STATIC)
            log.info("%s, %s: %d nodes, %d kernels", name, device, len(record.nodes), len(record.kernels))
            yield f"records/{device}/{name}.json", json.dumps(files.with_digest(record.model_dump(mode="json"))).encode()


def changes(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> list[str]:
    """The differences between recorded and current answers; a new question is no difference."""
    return [f"{question}: {line}" for question, answer in before.items() for line in (
        asked.differences(answer, now[question], tolerance) if question in now else ["is no longer asked"])]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--models", type=Path, metavar="DIR", help="first make new records, of the models in this folder")
    parser.add_argument("--list-models", action="store_true", help="print those of recipes/kinds that --models wants")
    parser.add_argument("--cpu", type=Path, metavar="DIR", help="first pack this workspace of a CPU's dataset")
    parser.add_argument("--check", action="store_true", help="record nothing; exit status 1 where an answer changed")
    parser.add_argument("--exact", action="store_true", help=f"count a change below a ratio of {asked.TOLERANCE:g} too: on the "
                        "kind of CPU that the answers were recorded on, there is none")
    args = parser.parse_args()
    cli.start(args)
    if args.list_models:
        names = dict.fromkeys(name.partition("@")[0] for name in asked.RECORDED)
        print(" ".join(name for name in names if name not in asked.FROM_TORCHVISION))
        return 0
    if args.models:
        pack(asked.RECORDS, sorted(records_of(args.models)))
    if args.cpu:
        kept = [path for part in ("benchmark/dataset", "ort_analysis/ort_kernel_record", "training/predictors")
                for path in sorted((args.cpu / part).glob("*/*")) if path.is_file() and not path.name.startswith(".")]
        pack(asked.CPU_WORKSPACE, sorted((str(path.relative_to(args.cpu)), path.read_bytes()) for path in kept))
    now = ask_all()
    changed = changes(read_answers(), now, 0.0 if args.exact else asked.TOLERANCE)
    cli.print_rows([{"change": line} for line in changed[:SHOWN]], args.json)
    log.warning("%d questions asked; %d numbers or words are not those recorded", len(now), len(changed))
    if args.check:
        return 1 if changed else 0
    write_answers(now)
    return 0


if __name__ == "__main__":
    cli.run(main)
