"""Makes the pictures of pages in docs/ anew: a prediction, two models compared, and a load curve, all of models of `make demo`;
and with --recorded an evaluation.

Runs the commands with --html, opens their pages in Chromium, and writes what it shows as WebP. With --phone, each picture is as
wide as a phone, to look at; docs/ has none of these.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import io
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import sync_playwright

from hase.recipes.printed_answers import DEMO, answer
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.temporary import temporary_folder

RESNET, MNASNET = "resnet18_fp32_b8_224x224.onnx", "mnasnet1_0.onnx"
CHROMIUM = "/usr/bin/chromium"  # Debian's
WIDTH, PHONE_WIDTH = 1180, 375
QUALITY = 70  # of the WebP
EXAMPLES = """
python recipes/page_pictures.py --workspace out/demo --out docs  # needs make demo
python recipes/page_pictures.py --workspace out/demo --out out/pictures --phone  # needs make demo
python recipes/page_pictures.py --workspace out/demo --out docs --recorded out/h200  # and recipes/h200/learn.sh
"""


class Picture(NamedTuple):
    """A page: the command that makes it with --html, and how much of it the picture shows, in pixels from its top."""

    command: str
    height: int


PICTURES = {
    "prediction": Picture(f"inference/predict_model_latency.py --model {RESNET} --host-pace 1 --slo-ms 5", 2080),
    "compared": Picture(f"inference/compare_models.py {MNASNET} {RESNET} --dim batch=8", 1960),
    "load": Picture(f"inference/load_curve.py --model {RESNET} --slo-ms 2", 1400),
}
EVALUATION_HEIGHT = 1900  # pixels


def pictures(target: str, recorded: Path | None) -> dict[str, Picture]:
    """The pictures to make, by the page's name.

    Args:
        target: of the answers.
        recorded: a workspace with the target's dataset and predictors; None: no evaluation.
    """
    of_demo = {name: Picture(f"{picture.command} --workspace {DEMO} --target {target}", picture.height)
               for name, picture in PICTURES.items()}
    if recorded is None:
        return of_demo
    return of_demo | {"evaluation": Picture(
        f"evaluator.py --workspace {recorded.resolve()} --recorded --target {target}", EVALUATION_HEIGHT)}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", default="nvidia-h200", metavar="NAME", help="of the answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for <page>_page.webp")
    parser.add_argument("--recorded", type=Path, metavar="DIR",
                        help="also the evaluation of the target's dataset in this workspace, with its predictors")
    parser.add_argument("--phone", action="store_true", help="as a phone shows them, in full")
    args = parser.parse_args()
    workspace = cli.start(args)
    if not Path(CHROMIUM).exists():
        raise UserError(f"{CHROMIUM}: not there; install it with: apt-get install --no-install-recommends chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    with temporary_folder() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": PHONE_WIDTH if args.phone else WIDTH, "height": 900})
        for name, picture in cli.progress(pictures(args.target, args.recorded).items(), "pictures"):
            page = folder / f"{name}.html"
            answer(f"python {picture.command} --quiet --html {page}", workspace.root.resolve())
            tab.goto(page.as_uri())
            shown: Image.Image = Image.open(io.BytesIO(tab.screenshot(full_page=True, animations="disabled")))
            if not args.phone:
                shown = shown.crop((0, 0, shown.width, min(picture.height, shown.height)))
            shown.save(args.out / f"{name}_page.webp", quality=QUALITY)
        browser.close()
    return 0


if __name__ == "__main__":
    cli.run(main)
