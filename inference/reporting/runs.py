"""Sections of pages about a prediction: where a run's time goes (by operator, by layer, over time), and what it is based on."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hase.inference.prediction.run import node_spans
from hase.inference.prediction.targets import CardPredictors
from hase.utils.lazy import onnx
from hase.utils.pages.page import COLOURS, PageSection, PageTable, Piece, Shares, Timeline, TimelineSpan, TreeMap, TreeMapPart

if TYPE_CHECKING:
    from hase.inference.llm.answers import LlmPrediction
    from hase.inference.prediction.answers import Prediction
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.targets import Fitted
    from hase.records.kernel_record import Node


MOST_SPANS = 8000  # in a timeline, so that a page stays below 2 MB
SCOPES = "pkg.torch.onnx.name_scopes"
LEAST_DRAWN = 0.995  # of the GPU's times; if they are drawn shorter, a page says so
LEAST_SHARE = 0.0005  # of the whole run; smaller parts of a layer are grouped


def operators_by_time(predictions: Sequence[Prediction]) -> list[str]:
    """The kernel types with the most time in all of the predictions; each gets its own colour."""
    shares: dict[str, float] = {}
    for prediction in predictions:
        for kernel in prediction.kernels:
            shares[kernel.type] = shares.get(kernel.type, 0.0) + kernel.share
    return sorted(shares, key=lambda operator: -shares[operator])[:COLOURS]


def run_sections(run: PredictedRun, file: Path) -> list[PageSection]:
    """Where a run's time goes, and the run over time."""
    timeline, explanation = run_over_time(run)
    return [PageSection("Where the time goes", where_time_goes(run, file), _kernel_total(run)),
            PageSection("The run over time", [timeline], explanation)]


def folded_run(name: str, run: PredictedRun, file: Path) -> PageSection:
    """A collapsible section: where the time of one run among several goes."""
    timeline, explanation = run_over_time(run)
    return PageSection(name, [*where_time_goes(run, file), timeline], f"{_kernel_total(run)} {explanation}", folded=True)


def _kernel_total(run: PredictedRun) -> str:
    nodes, sum_ms = sum(run.prediction.kernel_count.values()), run.prediction.kernel_sum_ms
    return f"The kernels of its {nodes} nodes take {sum_ms:.4g} ms together."


def where_time_goes(run: PredictedRun, file: Path) -> list[Piece]:
    """Where a run's time goes: what is measured, by operator, and by layer of the model in the file."""
    prediction = run.prediction
    layers, layered = time_by_layer(run, file)
    return [Shares("Where the kernels' times come from", {str(name): share for name, share in prediction.time_share.items()}),
            PageTable(operator_rows(prediction), "By operator", bar="time (ms)", coloured="operator", most=10),
            TreeMap("By layer of the model" if layered else "By operator and node", layers, "ms")]


def operator_rows(prediction: Prediction) -> list[dict[str, object]]:
    """A row for each kernel type, most time first."""
    rows: dict[str, dict[str, float]] = {}
    for kernel in prediction.kernels:
        row = rows.setdefault(kernel.type, {"ms": 0.0, "share": 0.0, "runs": 0, "kernels": 0, "measured": 0.0})
        row["ms"] += kernel.total_ms
        row["share"] += kernel.share
        row["runs"] += kernel.count
        row["kernels"] += 1
        row["measured"] += kernel.total_ms if kernel.provenance == "measured" else 0.0
    return [{"operator": operator, "time (ms)": row["ms"], "share": f"{row['share']:.1%}", "runs": int(row["runs"]),
             "kernels": int(row["kernels"]), "measured": f"{row['measured'] / row['ms'] if row['ms'] else 0:.0%}"}
            for operator, row in sorted(rows.items(), key=lambda item: -item[1]["ms"])]


def run_over_time(run: PredictedRun) -> tuple[Timeline, str]:
    """The tracks of a run, and sentences about them."""
    record, spans = run.run.record, node_spans(run)
    nodes = [record.nodes[index] for index in run.run.order]
    tracks: dict[str, list[TimelineSpan]] = {"host": [], "GPU": []} if run.run.costs else {"kernels": []}
    for node, span in zip(nodes[:MOST_SPANS], spans, strict=False):
        operator = record.kernel_of(node).type
        for name, when in zip(tracks, span, strict=False):
            if when is not None:
                tracks[name].append(TimelineSpan(*when, f"{node.name} ({operator})", operator))
    text = "Nodes one after another, each as long as its kernel; what the host does between them is in the latency only."
    if run.run.costs:
        gpu_ms = sum(end - begin for _, when in spans if when for begin, end in [when])
        busy = gpu_ms / run.alone_ms if run.alone_ms else 0.0
        text = (f"The host launches node after node, and the GPU works through them: it is busy for {min(busy, 1):.0%} of the "
                "run. Where it pauses, it waits for the host.")
        times = [(end - begin, gpu_ms) for (_, when), gpu_ms, launches in zip(
            spans, run.run.tracks.gpu_ms.tolist(), run.run.tracks.launches, strict=True)
            if when and launches == 1 for begin, end in [when]]  # more launches have pauses between them
        drawn_ms, known_ms = sum(drawn for drawn, _ in times), sum(known for _, known in times)
        if drawn_ms < LEAST_DRAWN * known_ms:
            text += (f" GPU times are drawn {1 - drawn_ms / known_ms:.1%} shorter than in the tables, so that the run ends "
                     "with the predicted latency.")
    if len(nodes) > MOST_SPANS:
        text += f" The first {MOST_SPANS} of {len(nodes)} nodes are shown."
    return Timeline("Host and GPU" if run.run.costs else "Kernels", tracks), text


def time_by_layer(run: PredictedRun, file: Path) -> tuple[TreeMapPart, bool]:
    """The time of a run's kernels (ms) by layer, or by operator if the model has no layers; and whether it has."""
    record, scopes = run.run.record, _scopes(file)
    paths = [_layers_of_node(node, record.kernel_of(node).op_type, scopes) for node in record.nodes]
    deep = [path for path in paths if len(path) > 1]
    common = next((depth for depth, parts in enumerate(zip(*deep, strict=False)) if len(set(parts)) > 1),
                  min(map(len, deep), default=0))  # number of layers that hold the whole model, such as `distilbert`
    layered = len({path[:common + 1] for path in deep}) > 1
    whole = TreeMapPart(record.file_stem)
    for index, (node, kernel) in enumerate(zip(record.nodes, run.run.nodes, strict=True)):
        operator = record.kernel_of(node).type
        path = (*(paths[index][common:] if layered else (operator,)), f"{operator} ({node.name})")
        layer = whole
        for name in path[:-1]:
            layer = layer.parts.setdefault(name, TreeMapPart(name))
        layer.parts[path[-1]] = TreeMapPart(operator, node.runs * kernel.latency_ms, operator,
                                            f"{node.name}, {kernel.provenance}")
    return _tidied(whole, LEAST_SHARE * whole.total), layered


def _layers_of_node(node: Node, operator: str, scopes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The layers of a node, outermost first.

    For a fused node, those of its first original node with the same operator, else of its first with any layers.
    """
    origins = sorted(node.origins, key=lambda origin: origin.op_type != operator)
    names = [*(origin.name for origin in origins), node.name]
    return next((path for name in names if (path := scopes.get(name) or _layers_in_name(name))), ())


def _layers_in_name(name: str) -> tuple[str, ...]:
    """The layers in a node's name: `/layer1/layer1.0/conv1/Conv` gives `("layer1", "0", "conv1")`; none without slashes."""
    parts = [part for part in name.split("/")[:-1] if part]
    return tuple(part.removeprefix(f"{before}.") for before, part in zip(["", *parts], parts, strict=False))


def _scopes(file: Path) -> dict[str, tuple[str, ...]]:
    """The layers in the metadata of a model's nodes, by node name; empty for a record."""
    if file.suffix == ".json":
        return {}
    try:
        model = onnx.load(file, load_external_data=False)
    except OSError:
        return {}  # the file disappeared after the prediction; layers then come from node names
    scopes = {node.name: entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == SCOPES}
    return {name: path for name, text in scopes.items() if (path := _layers_in_scopes(text))}


def _layers_in_scopes(text: str) -> tuple[str, ...]:
    """The layers in torch's name scopes: `["", "layer1", "layer1.0", "layer1.0.conv1", "conv2d_1"]` gives
    `("layer1", "0", "conv1")`."""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ()
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        return ()
    layers = [scope for scope in scopes[:-1] if scope]
    return tuple(layer.removeprefix(f"{before}.") for before, layer in zip(["", *layers], layers, strict=False))


def _tidied(part: TreeMapPart, least: float) -> TreeMapPart:
    """Simplifies a part: joins the names of a layer and its only part, and groups parts below `least`."""
    parts = [_tidied(child, least) for child in part.parts.values()]
    if len(parts) == 1 and parts[0].parts and part.name:
        return TreeMapPart(f"{part.name}.{parts[0].name}", parts=parts[0].parts)
    small = [child for child in parts if child.total < least]
    kept = {str(index): child for index, child in enumerate(parts) if child.total >= least or len(small) == 1}
    if len(small) > 1:
        kept["small"] = TreeMapPart(f"{len(small)} smaller", sum(child.total for child in small), note="each below 0.05 %")
    return TreeMapPart(part.name, part.amount, part.group, part.note, kept)


def device_name(fitted: Fitted) -> str:
    """The name of the device that a prediction is for."""
    if isinstance(fitted.predictors, CardPredictors) and fitted.predictors.gpu:
        return fitted.predictors.gpu.name
    machines = fitted.predictors.sidecar.machines
    return machines[-1].device_name if machines else fitted.target.name


def target_basis(fitted: Fitted) -> dict[str, str]:
    """The basis of all answers for a target."""
    machines = fitted.predictors.sidecar.machines
    versions = ", ".join(f"{name} {number}" for name, number in machines[-1].versions.items()) if machines else ""
    return {"target": fitted.target.name, "device": device_name(fitted),
            **({"measured with": f"{versions}, driver {machines[-1].driver}"} if versions else {})}


def about(warned: Mapping[str, Sequence[str]], asked: int) -> dict[str, Sequence[str]]:
    """The warnings of a page, each with the names of the answers that it concerns; none if it concerns all `asked` answers."""
    return {text: () if len(names) == asked else names for text, names in warned.items()}


def pace_of(answer: Prediction | LlmPrediction) -> str:
    """The host's pace that an answer assumes, in words."""
    if answer.host_pace_source is None:
        return "does not matter"
    return "not known" if answer.host_pace is None else f"{answer.host_pace:.3g} ({answer.host_pace_source})"


def sentence(words: str) -> str:
    """Words with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"
