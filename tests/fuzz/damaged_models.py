"""Campaign `models`: wrong ONNX files, by a seed: small models damaged in their bytes or in one to three fields, and models
made to do harm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.reading import Outcome, Parts, Reader
from hase.inference import predict
from hase.ort_analysis.isolated.analysis import check_opens, graph_of, own_sizes
from hase.utils.lazy import onnx
from hase.utils.model_files import COLLECTION_KEY, DEFAULT_DIMS_KEY, GROUP_KEY

if TYPE_CHECKING:
    import onnx

OPSETS = (("", 17), ("mine", 1))
WIDTH = 8
FLOAT = 1  # ONNX's number of float32
DEFAULTS = ("", "x", "[]", "1", "null", '{"batch": "x"}', '{"batch": 1.5}', '{"batch": null}', '{"batch": -1}',
            '{"batch": [2]}', '{"batch": 1e400}', '{"batch": 10000000000000000000000}', "[" * 5000,
            '{"batch": ' + "9" * 5000 + "}")
NAMES = ("", ".", "..", "a/b", "../x", "a|b", "a\0b", "\x1b[2J", "\n", "x" * 5000, "é", "con", "a\\b", " ")


def value(name: str, shape: Sequence[int | str] = (1, WIDTH), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


def new_node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **fields: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, inputs, outputs, **fields)


def model_of(nodes: Sequence[onnx.NodeProto], constants: Sequence[onnx.TensorProto] = (),
             inputs: Sequence[onnx.ValueInfoProto] = (), outputs: Sequence[onnx.ValueInfoProto] = (),
             functions: Sequence[onnx.FunctionProto] = ()) -> onnx.ModelProto:
    """A model; by default it turns x, float32[1, WIDTH], into y."""
    graph = onnx.helper.make_graph(nodes, "g", inputs or [value("x")], outputs or [value("y")], constants)
    opsets = [onnx.helper.make_opsetid(*opset) for opset in OPSETS]
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def network() -> onnx.ModelProto:
    """Convolutions with a dynamic batch, and the metadata that an exporter of Hase writes."""
    rng = np.random.default_rng(0)
    constants = [onnx.numpy_helper.from_array(rng.normal(size=(4, 3, 3, 3)).astype(np.float32), "w"),
                 onnx.numpy_helper.from_array(rng.normal(size=(4,)).astype(np.float32), "b"),
                 onnx.numpy_helper.from_array(rng.normal(size=(4 * WIDTH * WIDTH, 5)).astype(np.float32), "m"),
                 onnx.numpy_helper.from_array(np.array([0, -1], np.int64), "s")]
    nodes = [new_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
             new_node("Relu", ["c"], ["r"], name="relu"), new_node("Reshape", ["r", "s"], ["f"], name="flat"),
             new_node("MatMul", ["f", "m"], ["p"], name="product"),
             new_node("Softmax", ["p"], ["y"], name="soft", axis=-1)]
    made = model_of(nodes, constants, [value("x", ("batch", 3, WIDTH, WIDTH))], [value("y", ("batch", 5))])
    for key, text in ((DEFAULT_DIMS_KEY, '{"batch": 2}'), (GROUP_KEY, "network"), (COLLECTION_KEY, "fuzz")):
        made.metadata_props.add(key=key, value=text)
    return made


def loop(depth: int = 1) -> onnx.ModelProto:
    """Loops of three trips within one another."""
    def body(level: int) -> onnx.GraphProto:
        inside = (new_node("Loop", ["trips", "on", f"v{level}"], [f"w{level}"], body=body(level - 1)) if level else
                  new_node("Relu", ["v0"], ["w0"]))
        nodes = [new_node("Identity", [f"c{level}"], [f"d{level}"]), inside]
        return onnx.helper.make_graph(nodes, f"body{level}", [
            value(f"i{level}", [], onnx.TensorProto.INT64), value(f"c{level}", [], onnx.TensorProto.BOOL), value(f"v{level}")],
            [value(f"d{level}", [], onnx.TensorProto.BOOL), value(f"w{level}")])

    constants = [onnx.numpy_helper.from_array(np.array(3), "trips"), onnx.numpy_helper.from_array(np.array(True), "on")]
    return model_of([new_node("Loop", ["trips", "on", "x"], ["y"], body=body(depth - 1))], constants)


def choice(depth: int = 1) -> onnx.ModelProto:
    """Ifs within one another; an input decides."""
    branch = onnx.helper.make_graph([new_node("Relu", ["x"], ["y0"])], "then", [], [value("y0")])
    for level in range(1, depth + 1):
        otherwise = onnx.helper.make_graph([new_node("Abs", ["x"], [f"z{level}"])], "else", [], [value(f"z{level}")])
        node = new_node("If", ["c"], [f"y{level}"], then_branch=branch, else_branch=otherwise)
        branch = onnx.helper.make_graph([node], "then", [], [value(f"y{level}")])
    return model_of(branch.node, inputs=[value("x"), value("c", [], onnx.TensorProto.BOOL)], outputs=[value(f"y{depth}")])


def calls(depth: int = 2, each: int = 1) -> onnx.ModelProto:
    """Functions that call functions, each `each` times."""
    opsets = [onnx.helper.make_opsetid(*opset) for opset in OPSETS]
    functions = [onnx.helper.make_function("mine", "f0", ["a"], ["b"], [new_node("Relu", ["a"], ["b"])], opsets)]
    for level in range(1, depth):
        names = ["a", *(f"t{number}" for number in range(each - 1)), "b"]
        nodes = [new_node(f"f{level - 1}", [read], [made], domain="mine") for read, made in pairwise(names)]
        functions.append(onnx.helper.make_function("mine", f"f{level}", ["a"], ["b"], nodes, opsets))
    return model_of([new_node(f"f{depth - 1}", ["x"], ["y"], domain="mine")], functions=functions)


def words() -> onnx.ModelProto:
    """Text that an encoder turns into numbers."""
    encoder = new_node("LabelEncoder", ["t"], ["n"], domain="ai.onnx.ml", keys_strings=["a", "b"],
                       values_floats=[1.0, 2.0])
    made = model_of([encoder, new_node("Mul", ["n", "n"], ["y"])],
                    inputs=[value("t", [1, 2], onnx.TensorProto.STRING)], outputs=[value("y", [1, 2])])
    made.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    return made


SOUND: tuple[Callable[[], onnx.ModelProto], ...] = (network, network, loop, choice, calls, words)


def folded(products: int = 400, side: int = 4096) -> onnx.ModelProto:
    """Products of constants, which a runtime computes while it optimises: hours."""
    constants = [onnx.numpy_helper.from_array(np.array([side, side]), "shape")]
    nodes = [new_node("ConstantOfShape", ["shape"], ["p0"]),
             *(new_node("MatMul", [f"p{n}", "p0"], [f"p{n + 1}"]) for n in range(products)),
             new_node("MatMul", ["x", f"p{products}"], ["y"])]
    return model_of(nodes, constants, [value("x", (1, side))], [value("y", (1, side))])


def large_constants(gib: int) -> onnx.ModelProto:
    """A tensor of so many GiB from a file of some bytes, added up while the model is optimised."""
    constants = [onnx.numpy_helper.from_array(np.array([gib << 28]), "shape")]
    nodes = [new_node("ConstantOfShape", ["shape"], ["large"]), new_node("Exp", ["large"], ["e"]),
             new_node("ReduceSum", ["e"], ["s"]), new_node("Add", ["x", "s"], ["y"])]
    return model_of(nodes, constants)


def types_in_types(depth: int) -> onnx.ModelProto:
    """An input that is a sequence of sequences of …"""
    kind = inner = onnx.TypeProto()
    for _ in range(depth):
        inner = inner.sequence_type.elem_type
    inner.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model_of([new_node("Relu", ["x"], ["y"])], inputs=[value("x"), onnx.ValueInfoProto(name="q", type=kind)])


def circle() -> onnx.ModelProto:
    """A function that calls itself."""
    made = calls(2)
    made.functions[0].node[0].CopyFrom(new_node("f1", ["a"], ["b"], domain="mine"))
    return made


def wide(nodes: int) -> onnx.ModelProto:
    """Nodes one after another."""
    names = ["x", *(f"t{number}" for number in range(nodes - 1)), "y"]
    return model_of([new_node("Relu", [read], [made]) for read, made in pairwise(names)])


HARMFUL: dict[str, Callable[[], onnx.ModelProto]] = {
    "ifs 14 deep": lambda: choice(14), "ifs 22 deep": lambda: choice(22), "ifs 28 deep": lambda: choice(28),
    "loops 14 deep": lambda: loop(14), "loops 22 deep": lambda: loop(22),
    "2^12 calls": lambda: calls(12, 2), "2^16 calls": lambda: calls(16, 2), "2^60 calls": lambda: calls(60, 2),
    "calls 3,000 deep": lambda: calls(3000), "a function that calls itself": circle,
    "constants folded for hours": folded, "a constant of 2 GiB": lambda: large_constants(2),
    "a constant of 7 GiB": lambda: large_constants(7), "a constant of 320 GiB": lambda: large_constants(320),
    "types 40 deep": lambda: types_in_types(40), "20,000 nodes": lambda: wide(20_000),
}


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few bits flipped."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def torn(data: bytes, rng: random.Random) -> bytes:
    """Cut short, a part taken out, repeated, or overwritten by zeros."""
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice([1, 8, 200, 4000]))
    return rng.choice([data[:begin], data[:begin] + data[end:], data[:end] + data[begin:],
                       data[:begin] + bytes(end - begin) + data[end:]])


def edit(what: str, model: onnx.ModelProto, rng: random.Random) -> None:
    """Damages a model in one way of EDITS, by way of protobuf."""
    graph, weights, tensor = model.graph, model.graph.initializer, onnx.TensorProto
    values, node = [*graph.input, *graph.output], rng.choice(graph.node)

    def dims(info: onnx.ValueInfoProto) -> Any:
        return info.type.tensor_type.shape.dim

    match what:
        case "odd dimension":
            rng.choice([dim for info in (*values, *graph.value_info) for dim in dims(info)]).dim_value = rng.choice(
                [0, -1, 2**31, 2**40, 2**62, 7])
        case "odd weight":
            weight = rng.choice(weights)
            weight.dims[rng.randrange(len(weight.dims))] = rng.choice([0, -1, 2**31, 2**62, 3, 4])
            weight.data_type = rng.choice([0, 1, 1, 1, 7, 8, 10, 16, 22, 99])
        case "type of an end":
            rng.choice(values).type.tensor_type.elem_type = rng.choice([0, 6, 8, 9, 11, 99])
        case "cycle":
            first, last = sorted(rng.sample(range(len(graph.node)), 2))
            graph.node[first].input[0] = graph.node[last].output[0]
        case "missing input":
            node.input[rng.randrange(len(node.input))] = rng.choice(["", "nowhere", "../x"])
        case "odd attribute":
            name = rng.choice([*(each.name for each in node.attribute), "pads", "strides", "kernel_shape", "group", "axis"])
            for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
                node.attribute.remove(attribute)
            odd = rng.choice([[0, 0], [-1, -1], [2**62] * 2, [2**31 - 1] * 2, 1.5, "x", 2**62, -1])
            node.attribute.append(onnx.helper.make_attribute(name, odd))
        case "same names":
            node, namesake = rng.sample(list(graph.node), 2)
            node.name, node.output[0] = namesake.name, namesake.output[0]
        case "odd version":
            model.opset_import[0].version = rng.choice([0, -1, 1, 5, 17, 99, 2**31, 2**62])
            model.ir_version = rng.choice([0, 1, 3, 10, 99, 2**40])
        case "odd operator":
            node.op_type = rng.choice(["", "Nothing", "../x", "If", "Loop", "Sqrt", "MatMul", "Concat", "NonZero", "C" * 2000])
            node.domain = rng.choice(["", "com.microsoft", "ai.onnx.ml", "mine", "../.."])
        case "other place":  # of a weight's data
            weight, sizes = rng.choice(weights), ["0", "4", "-1", "", "x", str(2**62)]
            places = ["/dev/zero", "../x", "model.bin", "", ".", "*/_ORT_MEM_ADDR_/*", "x" * 5000]
            weight.data_location = tensor.EXTERNAL
            for key, texts in (("location", places), ("offset", sizes), ("length", sizes)):
                weight.external_data.add(key=key, value=rng.choice(texts))
        case "less data":
            weight = rng.choice(weights)
            weight.raw_data = weight.raw_data[:rng.randrange(len(weight.raw_data))]
        case "odd metadata":
            key = rng.choice([DEFAULT_DIMS_KEY, DEFAULT_DIMS_KEY, GROUP_KEY, COLLECTION_KEY])
            for entry in [entry for entry in model.metadata_props if entry.key == key and rng.random() < 0.8]:
                model.metadata_props.remove(entry)
            model.metadata_props.add(key=key, value=rng.choice(DEFAULTS if key == DEFAULT_DIMS_KEY else NAMES))
        case "no type":
            rng.choice(values).ClearField("type")
        case "sequence":
            rng.choice(values).type.sequence_type.elem_type.tensor_type.elem_type = rng.choice([1, 99])
        case "no rank":
            rng.choice(values).type.tensor_type.ClearField("shape")
        case "odd names":
            node.name, graph.name, node.output[0] = rng.choices(NAMES, k=3)
            rng.choice(dims(rng.choice(graph.input))).dim_param = rng.choice(NAMES)


EDITS = ("odd metadata", "odd dimension", "odd weight", "type of an end", "cycle", "missing input",
         "odd attribute", "same names", "odd version", "odd operator", "other place", "less data", "no type",
         "sequence", "no rank", "odd names")


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    """A name in the file with a byte that text can't hold."""
    graph = onnx.load_from_string(data).graph
    names = [*(name for node in graph.node for name in (*node.output, node.name, node.op_type)), graph.name,
             *(each.name for each in (*graph.input, *graph.initializer))]
    name = rng.choice([name for name in names if name]).encode()
    return data.replace(name, b"\xff" + name[1:])


def beyond_64_bits(data: bytes, rng: random.Random) -> bytes:
    """A further weight or input, of which a size or a type is a number beyond 64 bits."""
    number = rng.choice([b"\xff" * 10 + b"\x7f", b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f"])  # the first has too many bytes
    field = rng.choice([b"\x08", b"\x10"])  # of TensorProto: dims, data_type
    tensor = field + number + b"\x42\x01w"  # and its name
    graph = b"\x2a" + bytes([len(tensor)]) + tensor  # an initializer; protobuf joins it with the graph before
    return data + b"\x3a" + bytes([len(graph)]) + graph


def damaged_model(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The damage by name, and the damaged bytes: bytes of the file changed, or one to three fields by way of protobuf."""
    kind = rng.random()
    for most, damage in ((0.2, flipped), (0.35, torn), (0.4, not_utf8), (0.45, beyond_64_bits)):
        if kind < most:
            return damage.__name__, damage(data, rng)
    model, done = onnx.load_from_string(data), []
    for what in rng.sample(EDITS, rng.choice([1, 1, 2, 3])):
        with suppress(ValueError, IndexError, TypeError):  # nothing left to damage in this way, or no such value in protobuf
            edit(what, model, rng)
            done.append(what)
    return ", ".join(done), model.SerializeToString()


CASES = 500
QUESTIONS = ("predicted_ms", "predicted_ms", "predicted_ms", "looked_at", "opened")  # by the number of a model
PATIENT = ("constants folded for hours", "20,000 nodes", "2^16 calls")  # many seconds each


def predicted_ms(path: str) -> list[float]:
    """Predictors for an H200 come with Hase, so nothing has to be trained."""
    return [predict(path, target="nvidia-h200", force=True).latency_ms]


def looked_at(path: str) -> None:
    """What commands ask of a model besides its record."""
    own_sizes(Path(path), {"batch": [1, 2]})
    graph_of(Path(path), "cuda", {"batch": 2}, True)


def opened(path: str) -> None:
    """What commands that run a model ask before."""
    check_opens(Path(path), "cpu", {"batch": 2}, False)


def damaged(count: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of damaged models. The files that give faults are left in `folder`."""
    sound = [(make.__name__, make().SerializeToString()) for make in SOUND]
    with Reader("fuzz.damaged_models") as reader:
        for number in range(count):
            rng, path = random.Random(f"{seed} {number}"), folder / f"damaged_{number}.onnx"
            name, data = rng.choice(sound)
            damage, changed = damaged_model(data, rng)
            path.write_bytes(changed)
            outcome = reader.read((QUESTIONS[number % len(QUESTIONS)], str(path)), f"{number}: {name}: {damage}")
            if not outcome.fault:
                path.unlink()
            yield outcome


def harmful(patient: bool, folder: Path) -> Iterator[Outcome]:
    """The outcomes of models that are made to do harm; those of PATIENT only on request."""
    with Reader("fuzz.damaged_models") as reader:
        for name, make in HARMFUL.items():
            if patient or name not in PATIENT:
                path = folder / "harmful.onnx"
                path.write_bytes(make().SerializeToString())
                yield reader.read(("predicted_ms", str(path)), name)
                path.unlink()


def parts(count: int, seed: int, folder: Path) -> Parts:
    """`count` damaged models and the harmful ones, whose slowest run only where all CASES are asked for."""
    yield "damaged models", damaged(count, seed, folder)
    yield "models made to do harm", harmful(count >= CASES, folder)
