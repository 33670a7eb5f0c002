"""Saves and reads estimators: an entry of a JSON sidecar, and a file of arrays. Reading it runs no code.

The entry holds what was learned as JSON. An instance of a class is an object with the class's name and its fields; classes that
the estimator does not list (`saved_classes`) are refused. Arrays are in a file `<name>-<hash>.npz` for numpy. Boosters are read
at the first prediction that needs them.

XGBoost's boosters and random forests are saved as plain arrays, which take less than a third of XGBoost's own compressed file.
A prediction needs only each node's kind, an inner node's feature and cut, and a leaf's value:

- `tree_nodes`: how many nodes each tree has. Nodes are sorted by level, so the k-th inner node has children 2k + 1 and 2k + 2.
- `is_leaf`: a bit for each node.
- `missing_left`: a bit for each inner node, whether a missing value goes left. Absent if none does.
- `features`, `cut_places`: of each inner node, its feature, and the index of its cut among the cuts of that feature.
- `cut_features`, `cuts`: all cuts, sorted by feature and value. XGBoost sorts values into bins, so there are few of them.
- `leaves`: the values of the leaves as multiples of LEAF_STEP. A multiple n is stored as 2n, or as -2n - 1 if negative.

Numbers of several bytes are stored as planes (the first bytes of all numbers, then the second ones), which compresses better.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from hase.learned.kernels.interface import TimePredictor
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import xgboost
from hase.utils.paths import FileName
from hase.utils.processes import is_command

E = TypeVar("E", bound=TimePredictor)
CLASS, FIELDS, ARRAY, BOOSTERS = "!class", "fields", "!array", "!boosters"
BOOSTER_VERSION = 1  # of a booster's arrays
ESTIMATOR_PREFIX = "estimator_"  # of the files of admitted estimators, in the predictors' folder
MPS_PREFIX = "mps_"  # of the files for sharing through MPS
COMPRESSION = 9  # of zlib; lzma makes a file 7 % smaller, but takes five times as long to read
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, KeyError, IndexError, TypeError)
Array = npt.NDArray[Any]
Bits = npt.NDArray[np.bool_]
# Leaves are rounded to multiples of this, or they would be half of a file. They add up to the logarithm of a time, so a time of
# 400 leaves changes by 0.002 %.
LEAF_STEP = 2.0 ** -18
NO_PARENT = 2 ** 31 - 1
UNREAD = ("base_weights", "loss_changes", "sum_hessian")  # of a node: XGBoost saves them, but no prediction reads them
NO_CATEGORIES = {"categories": np.zeros(0, ">i4"), "categories_nodes": np.zeros(0, ">i4"),
                 "categories_segments": np.zeros(0, ">i8"), "categories_sizes": np.zeros(0, ">i8")}
SUMMED = ("reg:squarederror", "reg:absoluteerror")  # objectives whose predictions are the plain sum of leaves
NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}  # by UBJSON's letter
ARRAY_HEADS = {np.dtype(kind): f"[${letter}#".encode() for letter, kind in NUMBERS.items()}  # of UBJSON's arrays, by type
CONSTANTS = {"T": True, "F": False, "Z": None}  # by UBJSON's letter


class Saved(Frozen):
    """The entry of a fitted estimator in a JSON file. `features` are its feature schema's name and version, then the features.
    `file` and `sha256` are of its arrays; None and "" without arrays."""

    name: FileName
    version: int
    features: tuple[str, ...]
    learned: dict[str, Any]
    file: FileName | None = None
    sha256: str = ""


def features_of(estimator: TimePredictor | type[TimePredictor]) -> tuple[str, ...]:
    """The feature schema of an estimator, in the form of `Saved`."""
    return str(estimator.features), *estimator.features.names


def save_estimator(folder: Path, stem: str, estimator: TimePredictor) -> Saved:
    """Saves a fitted estimator; returns its entry. Raises UserError if it holds what can't be saved, or is not in its list."""
    arrays: dict[str, Array] = {}
    learned = _encoded(estimator.saved(), estimator, estimator.name, arrays)
    file, sha256 = write_hashed(folder, stem, "npz", _packed(arrays)) if arrays else (None, "")
    return Saved(name=estimator.name, version=estimator.version, features=features_of(estimator), learned=learned, file=file,
                 sha256=sha256)


def open_estimator(saved: Saved, kind: type[E], folder: Path, remedy: str) -> E:
    """Reads an estimator. Raises UserError (with the `remedy`) if it is another, or of another version or feature schema, a
    file is missing or damaged, or it holds a class that it does not list."""
    path = folder / (saved.file or "")
    for what, saved_value, value in (("name", saved.name, kind.name), ("version", saved.version, kind.version),
                                    ("features", saved.features, features_of(kind))):
        if saved_value != value:
            raise UserError(f"{path}: saved with {what} {_shown(saved_value)}, this Hase has {_shown(value)}; {remedy}")
    try:
        arrays = np.load(io.BytesIO(read_checked(path, saved.sha256, remedy)), allow_pickle=False) if saved.file else {}
        estimator = kind()
        reader = _FormReader({saved_class.__name__: saved_class for saved_class in kind.saved_classes}, arrays, path, remedy)
        estimator.restore(reader.decoded(saved.learned, kind.name))
    except UserError:
        raise
    except Exception as error:  # reading a damaged form can fail in any way
        raise UserError(f"{path}: estimator {kind.name} can't read what it saved ({type(error).__name__}: {error}); "
                        f"{remedy}") from error
    return estimator


def read_checked(path: Path, sha256: str, remedy: str) -> bytes:
    """Reads a file and checks its SHA-256."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: damaged or changed (its SHA-256 is not the one from when it was written); {remedy}")
    return data


def write_hashed(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, str]:
    """Writes `data` to a file with a part of its SHA-256 in the name; returns the name and the whole hash."""
    sha256 = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{sha256[:8]}.{suffix}"
    files.write_bytes(folder / name, data)
    return name, sha256


def _packed(arrays: Mapping[str, Array]) -> bytes:
    """Packs arrays as `numpy.savez_compressed` does, but without the time of day, so that equal arrays give equal bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in sorted(arrays.items()):
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue(), zipfile.ZIP_DEFLATED, COMPRESSION)
    return out.getvalue()


def _encoded(value: Any, estimator: TimePredictor, prefix: str, arrays: dict[str, Array]) -> Any:
    """Converts a value to JSON; its arrays are added to `arrays`, under names that begin with `prefix`."""
    if isinstance(value, BaseModel):
        if type(value) not in estimator.saved_classes:
            raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}, which its saved_classes do not list")
        return {CLASS: type(value).__name__, FIELDS: value.model_dump(mode="json")}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("!") for key in value):
            raise UserError(f"estimator {estimator.name}: saves a dictionary whose keys are not text, or one begins with !")
        if value and all(isinstance(member, xgboost.Booster) for member in value.values()):
            numbers: dict[str, dict[str, float]] = {}
            for name, booster in value.items():
                numbers[name], columns = booster_to_arrays(booster)
                arrays |= {f"{prefix}/{name}/{column}": values for column, values in columns.items()}
            return {BOOSTERS: numbers, "version": BOOSTER_VERSION}
        return {key: _encoded(member, estimator, f"{prefix}/{key}", arrays) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(member, estimator, f"{prefix}/{number}", arrays) for number, member in enumerate(value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays[prefix] = value
        return {ARRAY: prefix}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}; only numbers, text, lists, dictionaries, "
                    "numpy arrays, dictionaries of boosters and its saved_classes (pydantic models) can be saved")


@dataclass(frozen=True)
class _FormReader:
    """Decodes what `_encoded` wrote; `path` and `remedy` are for errors."""

    classes: Mapping[str, type[BaseModel]]  # those that the form may hold, by name
    arrays: Mapping[str, Array]
    path: Path
    remedy: str

    def decoded(self, value: Any, prefix: str) -> Any:
        if isinstance(value, list):
            return [self.decoded(member, f"{prefix}/{number}") for number, member in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if ARRAY in value:
            return self.arrays[value[ARRAY]]
        if BOOSTERS in value:
            if value.get("version") != BOOSTER_VERSION:
                raise UserError(f"{self.path}: boosters of version {value.get('version')}, this Hase reads version "
                                f"{BOOSTER_VERSION}; {self.remedy}")
            return LazyBoosters(value[BOOSTERS], partial(self.booster, value[BOOSTERS], prefix))
        if CLASS in value:
            return self.instance(value[CLASS], value.get(FIELDS))
        return {key: self.decoded(member, f"{prefix}/{key}") for key, member in value.items()}

    def instance(self, name: Any, fields: Any) -> BaseModel:
        if not isinstance(name, str) or name not in self.classes:
            raise UserError(f"{self.path}: refused: it holds a {name}, which its estimator does not list in saved_classes "
                            f"({', '.join(self.classes) or 'none'})")
        try:
            return self.classes[name].model_validate(fields)
        except ValidationError as error:
            raise UserError(f"{self.path}: damaged: {name}: {error.errors()[0]['msg']}; {self.remedy}") from None

    def booster(self, numbers: Mapping[str, Mapping[str, float]], prefix: str, name: str) -> xgboost.Booster:
        start = f"{prefix}/{name}/"
        try:
            return booster_from_arrays(numbers[name], {
                key.removeprefix(start): self.arrays[key] for key in self.arrays if key.startswith(start)})
        except (*UNREADABLE, xgboost.core.XGBoostError) as error:
            raise UserError(f"{self.path}: booster {name} is damaged ({error}); {self.remedy}") from None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value[:4])) + (", …" if len(value) > 4 else "") if isinstance(value, tuple) else str(value)


# Boosters as arrays ------------------------------------------------------------------------------------------------------


def import_xgboost() -> ModuleType:
    """The package xgboost, imported without scikit-learn by Hase's commands. xgboost imports scikit-learn if it finds it, which
    takes 0.9 s, for an API that Hase does not use. Other programs may use that API, so there it stays visible."""
    if is_command() and "xgboost" not in sys.modules and "sklearn" not in sys.modules:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("xgboost")
        finally:
            del sys.modules["sklearn"]
    return importlib.import_module("xgboost")


def booster_to_arrays(booster: xgboost.Booster) -> tuple[dict[str, float], dict[str, Array]]:
    """Splits a booster into numbers and the module's arrays (see `booster_from_arrays`). Raises UserError if its trees were not
    grown level by level, split by categories, or don't predict a sum of leaves."""
    learner = read_ubjson(bytes(booster.save_raw("ubj")))["learner"]
    trees = learner["gradient_booster"]["model"]["trees"]
    left, right, features, cuts, missing_left, categorical = (
        np.concatenate([np.zeros(0, dtype=np.int64), *(tree[name] for tree in trees)]) for name in (
            "left_children", "right_children", "split_indices", "split_conditions", "default_left", "split_type"))
    tree_nodes, is_leaf = np.array([len(tree["left_children"]) for tree in trees], dtype=np.int64), left < 0
    expected = _left_children(tree_nodes, is_leaf)
    if (categorical.any() or not np.array_equal(left, expected) or (right != left + 1)[~is_leaf].any()
            or learner["objective"]["name"] not in SUMMED):
        raise UserError("this booster can't be saved: it must be a sum of trees that were grown level by level (XGBoost's "
                        f"grow_policy depthwise), without categories, with one of the objectives {', '.join(SUMMED)}")
    inner, parameters = ~is_leaf, learner["learner_model_param"]
    numbers = {"base_score": float(parameters["base_score"].strip("[]")), "features": int(parameters["num_feature"])}
    return numbers, _arrays(tree_nodes, is_leaf, features[inner], cuts[inner], missing_left[inner] != 0, cuts[is_leaf])


def booster_from_forest(forest: Any) -> xgboost.Booster:
    """Converts scikit-learn's random forest to a booster with equal predictions (up to LEAF_STEP), a sum of divided leaves."""
    trees = [tree.tree_ for tree in forest.estimators_]
    starts = np.cumsum([0, *(tree.node_count for tree in trees)])
    by_level = np.concatenate([start + _by_level(tree.children_left, tree.children_right)
                               for start, tree in zip(starts.tolist(), trees, strict=False)])
    left, features, thresholds, missing_left, values = (np.concatenate(columns)[by_level] for columns in zip(*(
        (tree.children_left, tree.feature, tree.threshold, tree.missing_go_to_left, tree.value[:, 0, 0])
        for tree in trees), strict=True))
    inner, cuts = left >= 0, thresholds.astype(np.float32)
    cuts = np.where(cuts > thresholds, cuts, np.nextafter(cuts, np.float32(np.inf)))  # at most the threshold: below the cut
    return booster_from_arrays({"base_score": 0.0, "features": forest.n_features_in_}, _arrays(
        np.diff(starts), ~inner, features[inner], cuts[inner], missing_left[inner] != 0, values[~inner] / len(trees)))


def booster_from_arrays(numbers: Mapping[str, float], arrays: Mapping[str, Array]) -> xgboost.Booster:
    """Builds the booster whose arrays `booster_to_arrays` gave; it predicts with one thread. Raises KeyError, ValueError,
    IndexError or xgboost.core.XGBoostError if the arrays are not those of a booster."""
    xgboost = import_xgboost()
    tree_nodes = _integers(arrays["tree_nodes"])
    total, starts = int(tree_nodes.sum()), np.cumsum(tree_nodes) - tree_nodes
    is_leaf = np.unpackbits(arrays["is_leaf"], count=total).astype(bool)
    inner, start_of = np.flatnonzero(~is_leaf), np.repeat(starts, tree_nodes)
    left = _left_children(tree_nodes, is_leaf)
    parents, right = np.full(total, NO_PARENT), np.where(is_leaf, -1, left + 1)
    for children in (left, right):
        parents[(start_of + children)[inner]] = (np.arange(total) - start_of)[inner]
    if (left[inner] <= (np.arange(total) - start_of)[inner]).any() or (right >= np.repeat(tree_nodes, tree_nodes)).any():
        raise ValueError("a node is its own parent, or beyond its tree")  # XGBoost would hang or crash
    features, values, missing_left = np.zeros(total, ">i4"), np.zeros(total, ">f4"), np.zeros(total, np.uint8)
    features[inner] = split_features = _integers(arrays["features"])
    if (split_features >= numbers["features"]).any():
        raise ValueError("a node reads a feature that is not there")
    first = np.searchsorted(_integers(arrays["cut_features"]), split_features)  # of a feature's cuts
    values[inner] = _from_planes(arrays["cuts"], np.float32)[first + _integers(arrays["cut_places"])]
    doubled = _integers(arrays["leaves"])
    values[is_leaf] = LEAF_STEP * np.where(doubled % 2, -(doubled + 1) // 2, doubled // 2)
    if "missing_left" in arrays:
        missing_left[inner] = np.unpackbits(arrays["missing_left"], count=len(inner))
    columns = {
        "left_children": left.astype(">i4"), "right_children": right.astype(">i4"), "parents": parents.astype(">i4"),
        "split_indices": features, "split_conditions": values, "default_left": missing_left,
        "split_type": np.zeros(total, np.uint8), **dict.fromkeys(UNREAD, np.zeros(total, ">f4"))}
    count = f"{numbers['features']:.0f}"
    trees = [{**{name: column[start:start + nodes] for name, column in columns.items()}, **NO_CATEGORIES, "id": number,
              "tree_param": {"num_deleted": "0", "num_feature": count, "num_nodes": str(nodes), "size_leaf_vector": "1"}}
             for number, (start, nodes) in enumerate(zip(starts.tolist(), tree_nodes.tolist(), strict=True))]
    model = {"cats": {"enc": [], "feature_segments": np.zeros(0, ">i4"), "sorted_idx": np.zeros(0, ">i4")},
             "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
             "iteration_indptr": list(range(len(trees) + 1)), "tree_info": [0] * len(trees), "trees": trees}
    saved = {"learner": {
        "attributes": {}, "feature_names": [], "feature_types": [],
        "gradient_booster": {"model": model, "name": "gbtree"},
        "learner_model_param": {"base_score": f"[{numbers['base_score']:.9E}]", "boost_from_average": "1", "num_class": "0",
                                "num_feature": count, "num_target": "1"},
        "objective": {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}}},
        "version": [int(part) for part in xgboost.__version__.split(".")[:3]]}
    booster = xgboost.Booster(model_file=bytearray(write_ubjson(saved)))
    booster.set_param({"nthread": 1})  # for a few dozen rows, starting threads would take longer than predicting
    return booster


class LazyBoosters(Mapping[str, "xgboost.Booster"]):
    """Boosters by name, each read or trained at its first look-up."""

    def __init__(self, names: Iterable[str], read: Callable[[str], xgboost.Booster]) -> None:
        self._names, self._read = tuple(names), read
        self._opened: dict[str, xgboost.Booster] = {}

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._opened:
            if name not in self._names:
                raise KeyError(name)
            self._opened[name] = self._read(name)
        return self._opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # does not read the booster

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

def _arrays(tree_nodes: Array, is_leaf: Bits, features: Array, cuts: Array, missing_left: Bits,
            leaves: Array) -> dict[str, Array]:
    """The module's arrays of all trees. Features, cuts and `missing_left` are of inner nodes only."""
    cut_features, table, indices = _cut_table(features, cuts.astype(np.float32))
    steps = np.rint(leaves / LEAF_STEP).astype(np.int64)
    arrays = {
        "tree_nodes": _integer_planes(tree_nodes), "is_leaf": np.packbits(is_leaf), "features": _integer_planes(features),
        "cut_places": _integer_planes(indices), "cut_features": _integer_planes(cut_features), "cuts": _planes(table),
        "leaves": _integer_planes(2 * np.abs(steps) - (steps < 0))}
    return arrays | ({"missing_left": np.packbits(missing_left)} if missing_left.any() else {})


def _by_level(left: Array, right: Array) -> Array:
    """The nodes of a tree, level by level, from the children of each node."""
    levels = [np.zeros(1, dtype=np.int64)]
    while len(inner := levels[-1][left[levels[-1]] >= 0]):
        levels.append(np.column_stack([left[inner], right[inner]]).ravel())
    return np.concatenate(levels)


def _left_children(tree_nodes: Array, is_leaf: Bits) -> Array:
    """The left child of each node within its tree; -1 for a leaf."""
    inner: Array = np.cumsum(~is_leaf) - ~is_leaf  # inner nodes before each node, of all trees
    starts = np.cumsum(tree_nodes) - tree_nodes
    return np.where(is_leaf, -1, 2 * (inner - np.repeat(inner[starts], tree_nodes)) + 1) if len(inner) else inner


def _cut_table(features: Array, cuts: Array) -> tuple[Array, Array, Array]:
    """The distinct cuts by feature and value, as features and values, and each cut's index within its feature."""
    order = np.lexsort((cuts, features))
    is_new = np.ones(len(order), dtype=bool)
    by_feature, sorted_cuts = features[order], cuts[order]
    is_new[1:] = (by_feature[1:] != by_feature[:-1]) | (sorted_cuts[1:] != sorted_cuts[:-1])
    table_features, table = by_feature[is_new], sorted_cuts[is_new]
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.cumsum(is_new) - 1
    return table_features, table, rows - np.searchsorted(table_features, features)


def _planes(numbers: Array) -> Array:
    """The bytes of numbers as planes; the shape is bytes × numbers."""
    little = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    return np.ascontiguousarray(little.view(np.uint8).reshape(len(numbers), numbers.itemsize).T)


def _integer_planes(numbers: Array) -> Array:
    """The planes of whole numbers in the smallest type that can hold them."""
    return _planes(numbers.astype(np.min_scalar_type(int(numbers.max(initial=0)))))


def _from_planes(planes: Array, kind: npt.DTypeLike) -> Array:
    return np.ascontiguousarray(planes.T).view(np.dtype(kind).newbyteorder("<")).reshape(-1).astype(kind)


def _integers(planes: Array) -> Array:
    """The opposite of `_integer_planes`."""
    return _from_planes(planes, f"u{len(planes)}").astype(np.int64)


# UBJSON, the binary JSON of XGBoost's models -----------------------------------------------------------------------------


def read_ubjson(data: bytes) -> Any:
    """The value in `data`. An array of numbers of one type becomes a numpy array, any other a list."""
    return _read(memoryview(data), 0)[0]


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    """Reads the value that begins at `at`; returns it and where it ends."""
    letter, at = chr(data[at]), at + 1
    if letter in CONSTANTS:
        return CONSTANTS[letter], at
    if letter in NUMBERS:
        kind = np.dtype(NUMBERS[letter])
        return np.frombuffer(data, kind, 1, at)[0].item(), at + kind.itemsize
    if letter == "S":
        return _read_text(data, at)
    if letter == "{":
        return _read_object(data, at)
    if letter == "[":
        return _read_array(data, at)
    raise ValueError(f"byte {at}: a value of type {letter!r}")


def _read_text(data: memoryview, at: int) -> tuple[str, int]:
    length, at = _read(data, at)
    return bytes(data[at:at + length]).decode(), at + length


def _read_object(data: memoryview, at: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while data[at] != ord("}"):
        key, at = _read_text(data, at)
        members[key], at = _read(data, at)
    return members, at + 1


def _read_array(data: memoryview, at: int) -> tuple[Any, int]:
    letter = ""
    if data[at] == ord("$"):
        letter, at = chr(data[at + 1]), at + 2
    if data[at] != ord("#"):
        raise ValueError(f"byte {at}: an array without its length")
    count, at = _read(data, at + 1)
    if letter:
        kind = np.dtype(NUMBERS[letter])
        return np.frombuffer(data, kind, count, at), at + count * kind.itemsize
    values = []
    for _ in range(count):
        value, at = _read(data, at)
        values.append(value)
    return values, at


def write_ubjson(value: Any) -> bytes:
    """The opposite of `read_ubjson`: texts, whole numbers, dictionaries, lists, big-endian one-dimensional arrays."""
    parts: list[bytes] = []
    _write(value, parts)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes]) -> None:
    if isinstance(value, str):
        parts += (b"S", _text(value))
    elif isinstance(value, int):
        parts.append(_count(value))
    elif isinstance(value, np.ndarray):
        parts += (ARRAY_HEADS[value.dtype], _count(len(value)), value.tobytes())
    elif isinstance(value, dict):
        parts.append(b"{")
        for key, member in value.items():
            parts.append(_text(key))
            _write(member, parts)
        parts.append(b"}")
    else:
        parts += (b"[#", _count(len(value)))
        for member in value:
            _write(member, parts)


def _count(number: int) -> bytes:
    return struct.pack(">cq", b"L", number)


@lru_cache(10_000)
def _text(text: str) -> bytes:
    encoded = text.encode()
    return _count(len(encoded)) + encoded
