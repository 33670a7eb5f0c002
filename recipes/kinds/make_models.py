"""Writes small models of every kind that people run with ONNX Runtime, to check how Hase handles them.

Networks are made here or by torchvision, with random weights that are the same each time; nothing is downloaded. Writes one
file per model into --out, and kinds.json with the kind, operator set and sizes of dynamic dimensions of each. A model that
can't be made is listed with the reason; the others go on. A second run makes what is missing. `judge.py` is the next step.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from concurrent.futures.process import BrokenProcessPool

from hase.benchmark.ort.sizes_of_a_run import sizes_of_a_run
from hase.recipes.kinds.manifest import MANIFEST, MadeModel, Manifest, read_manifest
from hase.recipes.kinds.recipe_list import recipes
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version
from hase.utils.lazy import onnx
from hase.utils.logger import get_logger
from hase.utils.processes import process_pool

log = get_logger("kinds")

PACKAGES = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime-gpu")
EXAMPLES = """
python recipes/kinds/make_models.py --out out/kinds
python recipes/kinds/make_models.py --out out/kinds --only unet bert_mask --jobs 1
python recipes/kinds/make_models.py --out out/kinds --large
"""


def make(name: str, folder: Path) -> MadeModel | str:
    """Makes one model in this process; returns its description, or why it could not be made."""
    recipe = next(candidate for candidate in recipes() if candidate.name == name)
    path = folder / f"{name}.onnx"
    try:
        if recipe.large:
            recipe.write(path)  # its weights are in a second file, which it names
        else:
            with files.replacing(path) as temporary:
                recipe.write(temporary)
        proto = onnx.load(path, load_external_data=False)
        dims = {**recipe.dims, **(sizes_of_a_run(path, recipe.dims) if recipe.sized_by_run else {})}
    except Exception as error:  # noqa: BLE001 - whatever torch, torchvision or a quantiser raises, the other models go on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    return MadeModel(name=name, file=path.name, kind=recipe.kind, opset=opset, dims=dims, tiny=recipe.tiny)


def make_all(folder: Path, only: list[str], large: bool, jobs: int) -> Manifest:
    """Makes the requested models that are missing, and writes the manifest after each.

    Raises:
        UserError: there is no recipe with a name in `only`.
    """
    every = recipes()
    names = [recipe.name for recipe in every]
    if unknown := sorted(set(only) - set(names)):
        raise UserError(f"--only {' '.join(unknown)}: no such model; there are {', '.join(names)}")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [recipe.name for recipe in every if (not only or recipe.name in only) and (large or not recipe.large)]
    before = read_manifest(folder) if (folder / MANIFEST).exists() else None
    made = {model.name: model for model in before.models
            if model.name in names and (folder / model.file).exists()} if before else {}
    skipped = {name: why for name, why in before.skipped.items() if name in names and name not in wanted} if before else {}
    versions = {name: package_version(name) for name in PACKAGES}

    def manifest() -> Manifest:
        return Manifest(versions=versions, models=tuple(made[name] for name in names if name in made), skipped=skipped)

    with process_pool(jobs) as pool:
        running = {name: pool.submit(make, name, folder) for name in wanted if name not in made}
        for name, future in cli.progress(list(running.items()), "making"):
            try:
                done = future.result()
            except BrokenProcessPool:
                done = "its process, or another one, died; run the same command again to make the others"
            if isinstance(done, MadeModel):
                made[name] = done
            else:
                skipped[name] = done
                log.warning("%s: %s", name, done)
            files.write_json(folder / MANIFEST, manifest())
    written = manifest()
    files.write_json(folder / MANIFEST, written)
    return written


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the models go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="make these alone")
    parser.add_argument("--large", action="store_true", help="also the one of 2.4 GB")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that make them (default: 1)")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be positive")
    cli.start(args)
    manifest = make_all(args.out, args.only, args.large, args.jobs)
    cli.print_rows([{"model": model.name, "kind": model.kind, "opset": model.opset,
                     "MB": round((args.out / model.file).stat().st_size / 1e6, 2)} for model in manifest.models]
                   + [{"model": name, "kind": "skipped", "opset": None, "MB": None} for name in manifest.skipped], args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
