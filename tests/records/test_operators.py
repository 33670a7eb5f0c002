"""The table of operators: it names real operators and inputs, and marks operators without a row."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx.defs import OpSchema
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from hase.ort_analysis.cuda.placement import cuda_operators
from hase.records.kernel_costs import bytes_read, flops, waits_between_launches
from hase.records.kernel_record import KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.operators import OPERATORS, TABLE, Operator, operator_row
from hase.utils.paths import ROOT

OF_ONNX = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
OF_ORT = {schema.name for schema in get_all_operator_schema()}
ALL = OF_ONNX | OF_ORT
OF_TVM = {"Rsqrt", "Silu"}  # in ONNX's style


def newest(name: str) -> list[OpSchema]:
    """The newest definition of an operator in each of ONNX's domains and ONNX Runtime's."""
    schemas = (*onnx.defs.get_all_schemas_with_history(), *get_all_operator_schema())
    named = sorted((schema for schema in schemas if schema.name == name), key=lambda schema: schema.since_version)
    return list({schema.domain: schema for schema in named}.values())


def inputs_named(row: Operator) -> Iterator[int]:
    """The positions of inputs in a row."""
    single = (row.shape_input, row.index_input, row.weights_input)
    yield from (position for position in single if position is not None)
    yield from (*row.table_inputs, *row.size_inputs, *row.single_inputs, *row.in_place)


def test_rows_are_of_real_operators_each_with_one() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert {row.name for row in TABLE} <= ALL | cuda_operators() | OF_TVM
    assert {row.base for row in TABLE} - {""} <= {row.name for row in TABLE}


@pytest.mark.parametrize("row", [row for row in TABLE if any(True for _ in inputs_named(row))], ids=lambda row: row.name)
def test_an_operator_has_the_inputs_that_its_row_names(row: Operator) -> None:
    assert max(inputs_named(row)) < max(schema.max_input for schema in newest(row.name))


@pytest.mark.parametrize("row", [row for row in TABLE if row.input_since], ids=lambda row: row.name)
def test_an_attribute_became_the_second_input(row: Operator) -> None:
    version, attribute = row.input_since or (0, "")
    before, after = (onnx.defs.get_schema(row.name, opset, "") for opset in (version - 1, version))
    assert attribute in before.attributes
    assert attribute not in after.attributes
    assert after.inputs[1].name == attribute


@pytest.mark.parametrize("row", [row for row in TABLE if row.changed_in or row.ceiling_changed_in], ids=lambda row: row.name)
def test_a_meaning_changes_with_a_version_of_the_operator(row: Operator) -> None:
    history = onnx.defs.get_all_schemas_with_history()
    versions = {schema.since_version for schema in history if schema.name == row.name and not schema.domain}
    assert {*row.changed_in, *row.ceiling_changed_in} <= versions


def test_every_operator_of_a_provider_has_a_row_or_is_marked() -> None:
    """None of them gets a class from its name alone, as unknown ones do."""
    for name in cuda_operators() | ALL:
        row = operator_row(name)
        assert row.name == name
        assert name in OPERATORS or row == Operator(name, "other")
    assert operator_row("ReduceMedian") == Operator("ReduceMedian", "reduction", cost="reduction")
    assert operator_row("Abracadabra") == Operator("Abracadabra", "other")


@pytest.mark.slow
def test_no_other_module_lists_operators() -> None:
    """Properties of an operator are columns of the table. Runtimes have their own rules, the sampler draws by operator, and
    recipes measure some."""
    own_lists = {"features.py": "parts of names, which a saved predictor's features count",
                 "held_out_errors.py": "the classes of nn-Meter's authors"}
    listing = {path.name for package in ("records", "benchmark", "graph_model", "learned", "training", "inference")
               for path in (ROOT / package).glob("**/*.py") if path.parent.name != "ort" and any(listed_operators(path))}
    assert listing - {"operators.py"} == own_lists.keys()


def listed_operators(path: Path) -> Iterator[list[str]]:
    """The names in each tuple, list, set or dictionary of a module that holds three operators or more."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            parts += node.keys
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts += node.elts
        names = [str(part.value) for part in parts if isinstance(part, ast.Constant) and part.value in ALL]
        if len(names) >= 3:
            yield names


def test_costs_follow_the_row() -> None:
    image, weights = KernelInput(dtype="float32", shape=(1, 8, 6, 6)), KernelInput(dtype="float32", shape=(4, 8, 3, 3))
    made = [Tensor(dtype="float32", shape=(1, 4, 4, 4))]
    assert flops("Conv", {}, [image, weights], made) == flops("FusedConv", {}, [image, weights], made) == 64 * 2 * 8 * 3 * 3
    assert flops("ConvTranspose", {}, [image, weights], made) == 2 * image.elements * 8 * 3 * 3
    assert flops("Sigmoid", {}, [image], [image]) == 10 * image.elements
    assert flops("ReduceMean", {}, [image], made) == flops("ReduceMedian", {}, [image], made) == image.elements
    assert flops("Transpose", {}, [image], [image]) == flops("Loop", {}, [image], [image]) == 0
    words = KernelInput(dtype="int64", shape=(7,))
    table = KernelInput(dtype="float32", shape=(1000, 16), constant=True)
    assert bytes_read("Gather", {}, [table, words], [Tensor(dtype="float32", shape=(7, 16))]) == 7 * 16 * 4 + 7 * 8
    assert bytes_read("Reshape", {}, [image, words], [image]) == 0


def test_fourier_transforms_cost_what_their_length_takes() -> None:
    """5 N log2 N operations where N is a power of two; else three transforms of the power of two that holds 2N - 1 numbers."""
    signal, step = KernelInput(dtype="float32", shape=(2, 4096)), KernelInput(dtype="int64", constant=True, values=(64,))
    for length, cost in ((512, 5 * 512 * 9), (400, 3 * 5 * 1024 * 10)):
        window = KernelInput(dtype="float32", shape=(length,), constant=True)
        frames = Tensor(dtype="float32", shape=(2, 7, length // 2 + 1, 2))
        assert flops("STFT", {"onesided": 1}, [signal, step, window], [frames]) == 2 * 7 * cost
    rows, across = KernelInput(dtype="float32", shape=(3, 128, 1)), Tensor(dtype="float32", shape=(3, 128, 2))
    for axis, cost in ((-2, 3 * 5 * 128 * 7), (0, 128 * 3 * 5 * 8 * 3)):
        given = KernelInput(dtype="int64", constant=True, values=(axis,))
        assert flops("DFT", {}, [rows, KernelInput(dtype=""), given], [across]) == cost


@pytest.mark.parametrize(("op_type", "inputs", "outputs", "wanted"), [
    ("Concat", [(1, 4)] * 32, [(32, 4)], 0), ("Concat", [(1, 4)] * 33, [(33, 4)], 4),
    ("Split", [(4, 4)], [(2, 4), (2, 4)], 0), ("Split", [(4, 4)], [(1, 4), (3, 4)], 4),
    ("LSTM", [(10, 1, 4), (1, 16, 4), (1, 16, 4)], [(10, 1, 1, 4)], 9), ("Relu", [(4, 4)], [(4, 4)], 0)])
def test_launches_follow_the_row(op_type: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]],
                                 wanted: int) -> None:
    assert waits_between_launches(describe_kernel(
        op_type, "", 20, {}, [KernelInput(dtype="float32", shape=shape) for shape in inputs],
        [Tensor(dtype="float32", shape=shape) for shape in outputs])) == wanted
