"""Held-out collections: which kernels leave the training with a collection."""

from __future__ import annotations

from made_up_dataset import TARGET, conv, gemm, relu, write_workspace

from hase.records.dataset_files import DatasetHeader, DatasetKernel, header_path, read_header
from hase.training.composition.held_out import folds_of
from hase.training.composition.measured_models import MeasuredModel
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.paths import Workspace

COLLECTION_OF = {"anet": "timm", "bnet": "transformers", "cnet": "transformers", "secretnet": "timm"}


def test_a_kernel_belongs_to_every_collection_that_has_it_or_a_family_near_it() -> None:
    """If two collections have a family of the same name, a kernel sampled near it belongs to both, a model's kernel to one."""
    header = DatasetHeader(
        target=TARGET, metrics=(), machines={}, groups={"vit_a": "vit", "vit_b": "vit", "bert": "bert", "mine": "mine"},
        collections={"vit_a": "timm", "vit_b": "transformers", "bert": "transformers"})
    assert header.families == {"timm": {"vit"}, "transformers": {"vit", "bert"}}

    def collections(models: tuple[str, ...], groups: tuple[str, ...], sampled: bool) -> set[str]:
        return set(header.collections_of(DatasetKernel(kernel=relu(), models=models, groups=groups, sampled=sampled)))

    assert collections(("vit_a",), ("vit",), False) == {"timm"}
    assert collections((), ("vit",), True) == {"timm", "transformers"}
    assert collections(("vit_a",), ("bert", "vit"), True) == {"timm", "transformers"}
    assert collections(("mine",), ("mine",), False) == set()
    assert collections((), (), True) == set()  # drawn freely


def test_a_fold_leaves_out_all_kernels_of_its_collection(workspace: Workspace) -> None:
    """Also those of its models that were not measured as a whole, and those sampled near its families."""
    records = write_workspace(workspace, families=tuple(COLLECTION_OF), sampled=40)
    folder = workspace.dataset(TARGET.name)
    collections = {name: COLLECTION_OF[record.group] for name, record in records.items()}
    files.write_json(header_path(folder), read_header(folder).model_copy(update={
        "groups": {name: record.group for name, record in records.items()}, "collections": collections}))
    rows = read_training_set(workspace, TARGET.name)
    models = [MeasuredModel(record.model_copy(update={"collection": collections[name]}), record.group, 1.0)
              for name, record in records.items() if record.group != "secretnet"]  # not measured
    folds = {min(fold.groups): fold for fold in folds_of(rows, models, [model.collection for model in models], "collection", 5)}
    assert folds.keys() == {"timm", "transformers"}
    for name, fold in folds.items():
        theirs = {kernel for model, record in records.items() if collections[model] == name for kernel in record.kernels}
        assert set(rows.ids[~fold.seen].tolist()) == theirs
        assert fold.seen.any()
    assert {conv().op_type, gemm().op_type} <= set(rows.types[folds["timm"].seen].tolist())
