"""Converts JSON documents of older versions: pure functions on plain data.

What changed: `execution_provider` is now `device`, `ort_version` is `runtime` and `runtime_version`, the model name of a device
is `device_name`, and the record of a model has its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from model_zoo.exporting.torch_models import group_of

Document = dict[str, Any]
SWITCH_MS = 0.2  # the value where an older sharing.json has no `switch_ms`: fitted to an H200
SHARING_MODES = {"exclusive": "time_slices"}  # older names of modes


def renamed(document: Document, names: Mapping[str, str]) -> Document:
    """The document with some of its keys renamed, in the same order."""
    return {names.get(key, key): value for key, value in document.items()}


def flavour(old: Document) -> Document:
    new = renamed(old, {"execution_provider": "device", "ort_version": "runtime_version"})
    return {"device": new.pop("device"), "runtime": new.pop("runtime", "ort")} | new


def target(old: Document) -> Document:
    return _current_mode(renamed(old, {"device": "device_name"}) | {"flavour": flavour(old["flavour"])})


def _current_mode(document: Document) -> Document:
    mode = document.get("sharing")
    return document | {"sharing": SHARING_MODES[mode]} if mode in SHARING_MODES else document


def machine(old: Document) -> Document:
    return renamed(old, {"device": "device_name"})


def record(old: Document) -> Document:
    """A model's record. Its group follows from its name, as the group of a torchvision model does."""
    new = {"version": 2, "model": old["model"], "file_stem": old["model"].partition("@")[0], "group": group_of(old["model"])}
    return new | {key: value for key, value in old.items() if key not in new} | {"flavour": flavour(old["flavour"])}


def index(old: Document) -> Document:
    models = sorted({model for of_type in old["kernels"].values() for entry in of_type.values() for model in entry["models"]})
    return {"version": 2, "flavour": flavour(old["flavour"]), "groups": {model: group_of(model) for model in models},
            "kernels": old["kernels"]}


def header(old: Document) -> Document:
    """`dataset.json`; `datasets` adds the `groups` of the models, which it finds in the journal."""
    return old | {"version": 2, "target": target(old["target"]),
                  "machines": {uuid: machine(one) for uuid, one in old["machines"].items()}, "groups": old.get("groups", {})}


def sidecar(old: Document) -> Document:
    return {"feature_schema": "kernel", "feature_version": 1} | old | {
        "version": 3, "target": target(old["target"]), "machines": [machine(one) for one in old["machines"]]}


def composition(old: Document) -> Document:
    return old | {"version": 2, "models": [{"model": one["model"], "group": group_of(one["model"])} | one
                                           for one in old["models"]]}


def sharing(old: Document) -> Document:
    return {"switch_ms": SWITCH_MS} | old | {"version": 3}


def kernel_errors(old: Document) -> Document:
    return old | {"version": 2, "target": target(old["target"])}


def reading(old: Document) -> Document:
    """A reading of the sharing probe."""
    return _current_mode(renamed(old, {"execution_provider": "device"}) | {"version": 2})


def pace(old: Document) -> Document:
    """A machine's host pace."""
    return renamed(old, {"execution_provider": "device"}) | {"version": 2, "machine": machine(old["machine"])}


class Kind(NamedTuple):
    """A kind of document.

    Attributes:
        name: shown to the user.
        marks: keys by which it is recognised. All documents of this kind have them; KINDS is searched in order.
        version: the version that is converted.
        convert: returns the new document.
    """

    name: str
    marks: frozenset[str]
    version: int
    convert: Callable[[Document], Document]


KINDS = (
    Kind("record", frozenset({"nodes", "kernels", "opsets"}), 1, record),
    Kind("kernel errors", frozenset({"kernels", "target", "label"}), 1, kernel_errors),
    Kind("index", frozenset({"kernels", "flavour"}), 1, index),
    Kind("predictors", frozenset({"features", "measured_sha256"}), 2, sidecar),
    Kind("dataset", frozenset({"metrics", "machines", "target"}), 1, header),
    Kind("composition", frozenset({"candidates", "left_out"}), 1, composition),
    Kind("sharing", frozenset({"slice_ms", "waits_ms"}), 2, sharing),
    Kind("probe reading", frozenset({"tiny", "long", "machine_uuid"}), 1, reading),
    Kind("host pace", frozenset({"probe_us", "boot_id"}), 1, pace),
)


def kind_of(document: Any) -> Kind | None:
    """The kind of a document; None if no document of its kind is ever converted."""
    keys = document.keys() if isinstance(document, dict) else frozenset[str]()
    return next((kind for kind in KINDS if kind.marks <= keys), None)
