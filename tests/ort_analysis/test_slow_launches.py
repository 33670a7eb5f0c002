"""Which products and recurrent layers are slow to launch, and how that is learned from the names of CUDA kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command import run_script
from made_up_dataset import TARGET, write_dataset

from hase.kernel_model.sampling.free_shapes.layers import recurrent_layer
from hase.kernel_model.sampling.free_shapes.sizes import kernel, tensor
from hase.ort_analysis.cuda import kernel_choice
from hase.ort_analysis.cuda.kernel_choice import is_slow_to_launch, product_numbers, recurrent_numbers
from hase.recipes.cuda_kernels.learn_slow_launches import step_product
from hase.records.dataset_files import kernel_table_path, write_digests
from hase.records.kernel_record import Kernel
from hase.utils import files
from hase.utils.paths import Workspace

LEARN = "recipes/cuda_kernels/learn_slow_launches.py"
CELL = "void elemWiseRNNcell<float, float, float, (cudnnRNNMode_t)2>"
HOPPER, GEMV = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32", "void gemvx::kernel<int, int, float>"


def gemm(rows: int, columns: int, depth: int, dtype: str = "float32") -> Kernel:
    weights = tensor(dtype, columns, depth, constant=True)
    return kernel("Gemm", [tensor(dtype, rows, depth), weights], [(rows, columns)], transB=1)


def lstm(rows: int, hidden: int, dtype: str = "float32") -> Kernel:
    return recurrent_layer("LSTM", dtype, 50, rows, hidden, hidden, 1)


def test_numbers_of_a_product() -> None:
    batched = kernel("MatMul", [tensor("float16", 2, 8, 49, 64), tensor("float16", 2, 8, 64, 49)], [(2, 8, 49, 49)])
    assert product_numbers(batched) == (16, 49, 49, 64, 0, 2, 1, 1, 64)
    of_a_vector = kernel("MatMul", [tensor("float32", 64), tensor("float32", 64, 8)], [(8,)])
    assert [product_numbers(other) for other in (of_a_vector, lstm(1, 64))] == [None] * 2
    assert recurrent_numbers(gemm(16, 128, 128)) is None


@pytest.mark.parametrize(("layer", "expected"), [
    (lstm(1, 256), False),  # a product with a vector
    (lstm(4, 256), True),
    (lstm(16, 512, dtype="float16"), False),  # a kernel of CUTLASS
    (gemm(64, 4096, 4096, "float16"), True),  # nvjet
])
def test_what_ran_on_an_h200(layer: Kernel, expected: bool) -> None:
    assert is_slow_to_launch(layer) is expected


@pytest.mark.parametrize(("names", "expected"), [
    (["Memcpy HtoD", "void cutlass::Kernel2<a>", CELL, HOPPER], HOPPER),  # the input is multiplied first, by another kernel
    (["void cutlass::Kernel2<a>", CELL, "void cublasLt::splitKreduce_kernel<32>", GEMV], GEMV),
    (["Memcpy HtoD", HOPPER, CELL], HOPPER),  # names of many launches are kept once each
    (["void onnxruntime::cuda::_ReverseBySequence", HOPPER], ""),
])
def test_the_product_of_a_step(names: list[str], expected: str) -> None:
    assert step_product(names) == expected


def test_the_command_learns_from_a_dataset(tmp_path: Path) -> None:
    """Products of more than 64 rows, and steps of more than 8, have the slow kernel. A third of them are near a model's."""
    workspace, out = Workspace(tmp_path), tmp_path / "slow.json"
    drawn = [*(gemm(rows, 256, 256) for rows in range(1, 129)), *(lstm(rows, 64) for rows in range(1, 33))]
    owners = {each.id: ["sampled:anet"] for each in drawn[::3]}
    write_dataset(workspace, {each.id: each for each in drawn}, owners, {"anet0": 1.0}, {0.0: 0.0})
    path = kernel_table_path(workspace.dataset(TARGET.name))
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    rows = {each.id: each.inputs[0].shape[each.op_type == "LSTM"] for each in drawn}
    table["gpu_kernels"] = [f"Memset (Device)|{HOPPER if rows[name] > 64 else 'void cutlass::Kernel2<a>'}" if op == "Gemm"
                            else f"{CELL}|{HOPPER if rows[name] > 8 else GEMV}"
                            for name, op in zip(table["Kernel_ID"], table["OpType"], strict=True)]
    table.to_csv(path, index=False)
    write_digests(workspace.dataset(TARGET.name))
    done = run_script(LEARN, "--workspace", tmp_path, "--target", TARGET.name, "--out", out, "--json")
    assert [(row["operator"], row["kernels"], row["right_%"]) for row in json.loads(done.stdout)] == [
        ("Gemm", 43, 100.0), ("LSTM", 11, 100.0)]
    learned = files.read_record(out, kernel_choice.SlowLaunches, kernel_choice.VERSION, LEARN)
    assert [learned.products.answer(product_numbers(gemm(rows, 256, 256)) or ()) for rows in (60, 70)] == [False, True]
    assert [learned.recurrent.answer(recurrent_numbers(lstm(rows, 64)) or ()) for rows in (6, 11)] == [False, True]
