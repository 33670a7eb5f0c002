"""Converts files of older versions of Hase in place. Predictions stay the same to the last bit.

Reads and writes workspaces, folders, or single JSON files: kernel records, datasets, predictors, readings of the sharing probe,
and host paces. With --archive, it unpacks a compressed tar of such files, converts them, and packs them again. Convert a
dataset and the predictors that were trained on it in one call, because the predictors contain the dataset's hash. No other
command of Hase may use these files meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import hashlib
import io
import json
import lzma
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from recipes.convert.boosters import to_version_2
from recipes.convert.datasets import convert_dataset, converted_tables
from recipes.convert.documents import Document, Kind, kind_of
from records.dataset_files import header_path
from utils import cli, files
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.temporary import temporary_folder

log = get_logger("convert")
EXAMPLES = """
python recipes/convert/convert_files.py out/mine
python recipes/convert/convert_files.py probe.json
python recipes/convert/convert_files.py --archive dataset.tar.xz training/predictors
"""
Renewed = Mapping[str, str]  # by the old SHA-256 of a table, its new one
HASHES = ("dataset_sha256", "models_sha256")  # keys that have the hash of a table
DATASET = header_path(Path()).name


def json_files(path: Path) -> Iterator[Path]:
    """The JSON files in `path`: those of a workspace, all those of another folder, or `path` itself.

    Raises:
        UserError: there is no such file or folder.
    """
    if path.is_file():
        yield path
    elif path.is_dir():
        for part in Workspace(path).records or [path]:
            yield from [part] if part.is_file() else sorted(part.rglob("*.json"))
    else:
        raise UserError(f"{path}: no such file or folder")


def convert_all(paths: Iterable[Path]) -> Counter[str]:
    """Converts all older files in some files, folders and workspaces. Returns the number of converted files of each kind.

    Raises:
        UserError: no such file or folder, or a damaged file.
    """
    found = list(dict.fromkeys(one for path in paths for one in json_files(path)))
    datasets = {path.parent: converted_tables(path.parent) for path in found
                if path.name == DATASET and files.read_json(path)["version"] == 1}
    renewed = {files.sha256(path): hashlib.sha256(text.encode()).hexdigest()
               for tables in datasets.values() for path, text in tables.items()}
    done: Counter[str] = Counter()
    for path in cli.progress([path for path in found if path.name != DATASET], "converting"):
        if (kind := convert_file(path, renewed)) is not None:
            done.update([kind])
    for folder, tables in datasets.items():  # last: after an interruption the same hashes are computed again
        convert_dataset(folder, tables)
        done.update(["dataset"])
    return done


def convert_file(path: Path, renewed: Renewed) -> str | None:
    """Converts one JSON file. Returns its kind; None if there was nothing to convert.

    Raises:
        UserError: its digest is wrong, or files that it names are damaged.
    """
    old, indented = files.read_json(path), path.read_bytes().startswith(b"{\n")
    if not isinstance(old, dict):
        return None
    digest, kind = old.pop(files.DIGEST, None), kind_of(old)
    new, left = convert_document(path, old, kind)
    new |= {key: renewed[new[key]] for key in HASHES if new.get(key) in renewed}
    if new == old:
        return None
    if digest is not None and digest != files.digest_of(old):
        raise UserError(f"{path}: damaged or changed by hand: its contents are not those that its {files.DIGEST} is of")
    files.write_text(path, _as_json(new | ({files.DIGEST: files.digest_of(new)} if digest else {}), indented))
    for file in left:
        file.unlink()
    return kind.name if kind else "other"


def convert_document(path: Path, old: Document, kind: Kind | None) -> tuple[Document, list[Path]]:
    """The new document for `path`, and the paths of files that are no longer used.

    Raises:
        UserError: it has not the keys of its kind, or files that it names are damaged.
    """
    new, left = dict(old), list[Path]()
    if kind is None:
        return new, left
    try:
        if kind.name == "predictors" and new["version"] == 1:
            new, left = to_version_2(path.parent, new)
        return kind.convert(new) if new["version"] == kind.version else new, left
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{path}: a damaged {kind.name} ({type(error).__name__}: {error}); remove it") from None


def _as_json(document: Document, indented: bool) -> str:
    layout: dict[str, Any] = {"indent": 1} if indented else {"separators": (",", ":")}
    return json.dumps(document, ensure_ascii=False, **layout) + "\n"


def pack(archive: Path, folder: Path) -> None:
    """Writes the files in `folder` back to the archive that they came from, in the same order."""
    with tarfile.open(archive) as before:
        members = before.getmembers()
    out = io.BytesIO()
    with (lzma.open(out, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
          tarfile.open(fileobj=compressed, mode="w") as packed):
        for member in members:
            data = (folder / member.name).read_bytes() if member.isfile() else b""
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    files.write_bytes(archive, out.getvalue())


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a workspace, another folder, or a JSON file")
    parser.add_argument("--archive", type=Path, action="append", default=[], metavar="TAR",
                        help="a compressed tar of such files (repeatable)")
    args = parser.parse_args()
    if not args.paths and not args.archive:
        parser.error("give a PATH or --archive")
    cli.start(args)
    with ExitStack() as stack:
        folders = {archive: stack.enter_context(temporary_folder()) for archive in args.archive}
        for archive, folder in folders.items():
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        done = convert_all([*args.paths, *folders.values()])
        for archive, folder in folders.items():
            pack(archive, folder)
    cli.print_rows([{"kind": kind, "files": count} for kind, count in sorted(done.items())], args.json, "converted")
    if not done:
        log.info("no files of an older version")
    return 0


if __name__ == "__main__":
    cli.run(main)
