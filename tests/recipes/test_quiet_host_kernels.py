"""Of several measurements of a host's kernels, the fastest is kept."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
from command import run_script
from made_up_dataset import TARGET, chain, collect, conv, gemm, relu

from hase.recipes.h200.quiet_host_kernels import LABEL
from hase.records.dataset_files import read_journal, write_journal
from hase.records.dataset_tables import read_kernel_table
from hase.utils.paths import Workspace

SCRIPT = "recipes/h200/quiet_host_kernels.py"


def in_host_s_labels(workspace: Workspace) -> Workspace:
    folder = workspace.dataset(TARGET.name)
    write_journal(folder, [of_run.model_copy(update={"measurements": tuple(
        m.model_copy(update={"label": LABEL}) for m in of_run.measurements)}) for of_run in read_journal(folder)])
    return workspace


def test_kernels_of_the_first_workspace_are_written(tmp_path: Path) -> None:
    """The second machine is one millisecond slower, and has a further kernel."""
    slow = in_host_s_labels(collect(tmp_path / "slow", chain("resnet_a", [conv(), relu()]), uuid="1", labels=(LABEL,)))
    fast = in_host_s_labels(collect(tmp_path / "fast", chain("vit_b", [conv(), gemm()]), labels=(LABEL,)))
    done = run_script(SCRIPT, "--from", slow.root, "--from", fast.root, "--workspace", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    table = read_kernel_table(Workspace(tmp_path / "kept"), TARGET.name).set_index("Kernel_ID")
    assert table[f"{LABEL}_ms"].to_dict() == pytest.approx({conv().id: 0.375, relu().id: 1.375})


def test_a_workspace_with_two_datasets_is_refused(tmp_path: Path) -> None:
    both = collect(tmp_path / "both", chain("resnet_a", [conv()]))
    copytree(both.dataset(TARGET.name), both.dataset("another"))
    done = run_script(SCRIPT, "--from", both.root, "--workspace", tmp_path / "kept")
    assert (done.returncode, done.stderr.strip()) == (
        1, f"error: {both.root}: 2 datasets (another, {TARGET.name}); exactly one is expected")
