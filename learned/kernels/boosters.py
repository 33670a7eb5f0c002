"""XGBoost's boosters, and random forests, as plain arrays, which are small and hold nothing that could run.

A prediction reads of each node only whether it is a leaf, the feature and the cut that split it, and the value of a leaf:

- `tree_nodes`: how many nodes each tree has. Nodes lie level by level, so the k-th inner node has the nodes 2k + 1 and 2k + 2.
- `is_leaf`: a bit for each node.
- `missing_left`: a bit for each inner node, whether a missing value goes left. It is absent where none does.
- `features`, `cut_places`: of each inner node, its feature, and the place of its cut among the cuts of that feature.
- `cut_features`, `cuts`: all cuts, sorted by feature and value. XGBoost sorts values into bins, so there are few of them.
- `leaves`: the values of the leaves as multiples of LEAF_STEP. Twice the amount, less one if it is negative.

Numbers of several bytes lie as planes: the first bytes of all numbers, then the second ones, which compresses better.
XGBoost's own file is more than three times as large after compression.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hase.learned.kernels import ubjson
from hase.utils import cli
from hase.utils.errors import UserError

if TYPE_CHECKING:
    import xgboost

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.bool_]
# Leaves are rounded to multiples of this, or they would be half of a file. A sum over 400 leaves changes by 0.002 %, which is
# the change of a time, too, since it is the logarithm of one.
LEAF_STEP = 2.0 ** -18
NO_PARENT = 2 ** 31 - 1
UNREAD = ("base_weights", "loss_changes", "sum_hessian")  # of a node: XGBoost saves them, but no prediction reads them
NO_CATEGORIES = {"categories": np.zeros(0, ">i4"), "categories_nodes": np.zeros(0, ">i4"),
                 "categories_segments": np.zeros(0, ">i8"), "categories_sizes": np.zeros(0, ">i8")}
SUMMED = ("reg:squarederror", "reg:absoluteerror")  # objectives whose predictions are the plain sum of leaves


def import_xgboost() -> ModuleType:
    """The package xgboost, imported without scikit-learn by Hase's commands.

    Where xgboost finds scikit-learn, it imports it too, which takes 0.9 s, for an API that Hase does not use. A program that
    imports Hase may use that API, so there it stays visible.
    """
    if cli.is_command() and "xgboost" not in sys.modules and "sklearn" not in sys.modules:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("xgboost")
        finally:
            del sys.modules["sklearn"]
    return importlib.import_module("xgboost")


def as_arrays(booster: xgboost.Booster) -> tuple[dict[str, float], dict[str, Array]]:
    """What `from_arrays` makes a booster of: numbers (`base_score`, `features`), and the arrays above.

    Raises:
        UserError: its trees were not grown level by level, split by categories, or predict something else than a sum of leaves.
    """
    learner = ubjson.read(bytes(booster.save_raw("ubj")))["learner"]
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


def from_forest(forest: Any) -> xgboost.Booster:
    """scikit-learn's random forest as a booster, which predicts the same up to `LEAF_STEP`: the mean of the trees is the sum of
    leaves that are divided by the number of trees."""
    trees = [tree.tree_ for tree in forest.estimators_]
    starts = np.cumsum([0, *(tree.node_count for tree in trees)])
    by_level = np.concatenate([start + _by_level(tree.children_left, tree.children_right)
                               for start, tree in zip(starts.tolist(), trees, strict=False)])
    left, features, thresholds, missing_left, values = (np.concatenate(columns)[by_level] for columns in zip(*(
        (tree.children_left, tree.feature, tree.threshold, tree.missing_go_to_left, tree.value[:, 0, 0])
        for tree in trees), strict=True))
    inner, cuts = left >= 0, thresholds.astype(np.float32)
    cuts = np.where(cuts > thresholds, cuts, np.nextafter(cuts, np.float32(np.inf)))  # at most the threshold: below the cut
    return from_arrays({"base_score": 0.0, "features": forest.n_features_in_}, _arrays(
        np.diff(starts), ~inner, features[inner], cuts[inner], missing_left[inner] != 0, values[~inner] / len(trees)))


def from_arrays(numbers: Mapping[str, float], arrays: Mapping[str, Array]) -> xgboost.Booster:
    """The booster that `as_arrays` took apart. It predicts with one thread.

    Raises:
        KeyError, ValueError, IndexError: the arrays are not those of a booster.
        xgboost.core.XGBoostError: nor does XGBoost read them.
    """
    xgboost = import_xgboost()
    tree_nodes = _whole(arrays["tree_nodes"])
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
    features[inner] = split_features = _whole(arrays["features"])
    if (split_features >= numbers["features"]).any():
        raise ValueError("a node reads a feature that is not there")
    first = np.searchsorted(_whole(arrays["cut_features"]), split_features)  # of a feature's cuts
    values[inner] = _from_planes(arrays["cuts"], np.float32)[first + _whole(arrays["cut_places"])]
    doubled = _whole(arrays["leaves"])
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
    booster = xgboost.Booster(model_file=bytearray(ubjson.write(saved)))
    booster.set_param({"nthread": 1})  # for a few dozen rows, starting threads would take longer than predicting
    return booster


class SavedBoosters(Mapping[str, "xgboost.Booster"]):
    """Boosters by name. Each is made at its first look-up.

    Attributes:
        names: of all boosters.
        read: makes the booster of a name.
    """

    def __init__(self, names: Mapping[str, Any], read: Callable[[str], xgboost.Booster]) -> None:
        self._names, self._read = tuple(names), read
        self._opened: dict[str, xgboost.Booster] = {}

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._opened:
            if name not in self._names:
                raise KeyError(name)
            self._opened[name] = self._read(name)
        return self._opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # does not read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def opened(self) -> set[str]:
        """The names of the boosters that have been read."""
        return set(self._opened)


def _arrays(tree_nodes: Array, is_leaf: Bits, features: Array, cuts: Array, missing_left: Bits,
            leaves: Array) -> dict[str, Array]:
    """The arrays above, of all trees: which nodes are leaves; of the inner nodes the features, the cuts and whether a missing
    value goes left; and the values of the leaves."""
    cut_features, table, places = _cut_table(features, cuts.astype(np.float32))
    steps = np.rint(leaves / LEAF_STEP).astype(np.int64)
    arrays = {
        "tree_nodes": _planes(_small(tree_nodes)), "is_leaf": np.packbits(is_leaf), "features": _planes(_small(features)),
        "cut_places": _planes(_small(places)), "cut_features": _planes(_small(cut_features)), "cuts": _planes(table),
        "leaves": _planes(_small(2 * np.abs(steps) - (steps < 0)))}
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
    """The distinct cuts by feature and value (features, cuts), and the place of each of `cuts` among those of its feature."""
    order = np.lexsort((cuts, features))
    is_new = np.ones(len(order), dtype=bool)
    by_feature, sorted_cuts = features[order], cuts[order]
    is_new[1:] = (by_feature[1:] != by_feature[:-1]) | (sorted_cuts[1:] != sorted_cuts[:-1])
    table_features, table = by_feature[is_new], sorted_cuts[is_new]
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.cumsum(is_new) - 1
    return table_features, table, rows - np.searchsorted(table_features, features)


def _small(numbers: Array) -> Array:
    """Whole numbers in the smallest type that holds them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _planes(numbers: Array) -> Array:
    """Bytes × numbers."""
    little = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    return np.ascontiguousarray(little.view(np.uint8).reshape(len(numbers), numbers.itemsize).T)


def _from_planes(planes: Array, kind: npt.DTypeLike) -> Array:
    return np.ascontiguousarray(planes.T).view(np.dtype(kind).newbyteorder("<")).reshape(-1).astype(kind)


def _whole(planes: Array) -> Array:
    """The whole numbers that `_planes` made of `_small` ones."""
    return _from_planes(planes, f"u{len(planes)}").astype(np.int64)
