"""The dimensions of a decoder's inputs by their role, and their sizes in a run.

An input is told by the name that the config gives it, else by what its name holds, its element type and its rank. Its axes then
have their roles by convention: a cache is [batch, heads, length, size of a head], the mask [batch, tokens so far]. So it does
not matter what an exporter calls a dimension. A dimension without a role gets the only size that the model's weights and
attributes allow (the size of a head), or has to be given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from hase.inference.llm.genai_config import GenaiConfig, Inputs, Outputs
from hase.ort_analysis.isolated import analysis
from hase.records.interface import Interface, OpenTensor
from hase.utils.errors import UserError

Role = Literal["batch", "new", "cached", "total"]
Roles: TypeAlias = tuple[Role | None, ...]
# of the axes of the mask and of the positions, by their rank
OF_MASK: dict[int, Roles] = {2: ("batch", "total"), 3: ("batch", "new", "total"), 4: ("batch", None, "new", "total")}
OF_POSITIONS: dict[int, Roles] = {1: ("new",), 2: ("batch", "new"), 3: (None, "batch", "new")}
SAID: dict[Role, str] = {"batch": "sequences", "new": "new tokens", "cached": "tokens in the cache", "total": "tokens so far"}
CACHE = re.compile(r"past|present|cache|(^|[._])kv([._]|$)", re.IGNORECASE)
STATE = re.compile(r"conv|recurrent|ssm|scale", re.IGNORECASE)  # in a cache's name: it does not grow with the tokens
CROSS = re.compile(r"encoder|cross", re.IGNORECASE)  # in an input's name: it is as long as an encoder's output
BRANCH = "use_cache_branch"  # an input that takes one branch of an If with a cache, and the other without
PAGED = ("block_table", "slot_mapping")  # inputs of models whose caches lie in pages
WHOLE = ("int32", "int64")


class Axis(NamedTuple):
    """An axis of an input that has a role, and its size in the file: a number, or a name."""

    tensor: str
    axis: int
    size: int | str
    role: Role


class Step(NamedTuple):
    """One run of a decoder.

    Attributes:
        batch: sequences.
        new: tokens of each that are computed.
        before: tokens of each that were computed before.
        cached: length of the cache's buffer; `before`, unless runs share a longer one.
        masked: length of the mask.
    """

    batch: int
    new: int
    before: int
    cached: int
    masked: int

    def size(self, role: Role) -> int:
        return {"batch": self.batch, "new": self.new, "cached": self.cached, "total": self.masked}[role]


@dataclass(frozen=True)
class DecoderFile:
    """An ONNX file of a language model.

    Attributes:
        axes: those with a role.
        caches, presents: the inputs and the outputs that hold keys, values and other states.
        fixed: sizes of dimensions that have no role.
        has_branches: an input says whether the cache is used.
        words: logits for each token; 0 where the file does not say.
    """

    path: Path
    axes: tuple[Axis, ...]
    caches: tuple[str, ...]
    presents: tuple[str, ...]
    fixed: Mapping[str, int]
    has_branches: bool
    words: int

    def dims(self, step: Step) -> dict[str, int]:
        """The sizes of all dynamic dimensions in a run.

        Raises:
            UserError: the file fixes a size to another one, or two roles have one name and different sizes.
        """
        sizes: dict[str, int] = dict(self.fixed)
        roles: dict[str, Role] = {}
        for tensor, axis, size, role in self.axes:
            wanted = step.size(role)
            if isinstance(size, int):
                if size != wanted:
                    raise UserError(f"{self.path}: made for {size} {SAID[role]} ({tensor}, axis {axis}), and {wanted} are "
                                    "asked for")
            elif sizes.setdefault(size, wanted) != wanted:
                raise UserError(f"{self.path}: dimension {size} would have to be {sizes[size]} "
                                f"({SAID[roles[size]] if size in roles else 'given'}) and {wanted} ({SAID[role]}); export the "
                                "model with a name for each")
            else:
                roles[size] = role
        if self.has_branches:
            sizes["then" if step.before else "else"] = 1
        return sizes


def decoder_file(path: Path, config: GenaiConfig | None = None, given: Mapping[str, int] | None = None) -> DecoderFile:
    """Reads what a file of a language model takes.

    Args:
        path: an ONNX file.
        config: names its inputs and outputs.
        given: sizes of dimensions by name, which come before any role.

    Raises:
        UserError: it can't be read, it generates no tokens or keeps its cache in pages, or nothing says how large a dimension
            is.
    """
    interface, given = analysis.interface_of(path), dict(given or {})
    inputs = config.model.decoder.inputs if config else Inputs()
    outputs = config.model.decoder.outputs if config else Outputs()
    if paged := next((name for name in PAGED if name in interface.inputs), None):
        raise UserError(f"{path}: keeps its cache in pages ({paged}), for continuous batching: that is not predicted; export "
                        "the model without PagedAttention")
    caches = _caches(interface.inputs, (inputs.past_key_names, inputs.past_value_names, inputs.past_names))
    presents = _caches(interface.outputs, (outputs.present_key_names, outputs.present_value_names, outputs.present_names))
    axes = [axis for name, tensor in interface.inputs.items()
            for axis in (_cache_axes(name, tensor, interface.set_by_model) if name in caches else _axes(name, tensor, inputs))]
    if not any(axis.role == "new" for axis in axes):
        raise UserError(f"{path}: no language model: none of its inputs holds tokens ({', '.join(interface.inputs)})")
    axes = [axis for axis in axes if axis.size not in given]
    with_role = {axis.size for axis in axes}
    unknown = {size: f"{name}, axis {place}" for name, tensor in interface.inputs.items()
               for place, size in enumerate(tensor.shape)
               if isinstance(size, str) and size not in with_role and size not in given and size not in interface.set_by_model}
    if unknown:
        places = "; ".join(f"{size} ({place})" for size, place in unknown.items())
        raise UserError(f"{path}: nothing says how large dimension {places} is; give its size: " + " ".join(
            f"--dim {size}=SIZE" for size in unknown))
    fixed = {size: value for size, value in {**interface.set_by_model, **given}.items()
             if size not in with_role and _is_open(interface, size)}
    sizes = [tensor.shape[-1] for name, tensor in interface.outputs.items() if name not in presents and tensor.shape]
    words = max((size for size in sizes if isinstance(size, int)), default=0)
    return DecoderFile(path, tuple(axes), caches, presents, fixed, BRANCH in interface.inputs, words)


def _is_open(interface: Interface, size: str) -> bool:
    return any(size in tensor.shape for tensor in interface.inputs.values())


def _caches(tensors: Mapping[str, OpenTensor], templates: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that hold caches: those that a template names and, where none does, those whose names say so."""
    patterns = [re.compile(re.escape(template).replace("%d", r"\d+")) for template in templates if template]
    named = [name for name in tensors if any(pattern.fullmatch(name) for pattern in patterns)]
    return tuple(name for name, tensor in tensors.items()
                 if name in named or (CACHE.search(name) and len(tensor.shape) >= 3))


def _cache_axes(name: str, tensor: OpenTensor, set_by_model: Mapping[str, int]) -> list[Axis]:
    """The axes of a cache with a role; none where its rank is unknown. Keys and values in one tensor are [2, batch, heads,
    length, size of a head]."""
    if len(tensor.shape) < 3:
        return []
    first = len(tensor.shape) - 4 if tensor.shape[0] == 2 and len(tensor.shape) == 5 else 0
    axes = [Axis(name, first, tensor.shape[first], "batch")]
    if STATE.search(name) or CROSS.search(name):
        return axes
    inner = range(first + 1, len(tensor.shape) - 1)
    preferred = sorted(inner, key=lambda axis: (axis != first + 2, axis))
    lengths = [axis for axis in preferred if isinstance(tensor.shape[axis], str) and tensor.shape[axis] not in set_by_model]
    if length := next(iter([*lengths, *preferred]), None):
        axes.append(Axis(name, length, tensor.shape[length], "cached"))
    return axes


def _axes(name: str, tensor: OpenTensor, names: Inputs) -> list[Axis]:
    """The axes of an input with a role; none where the input is none of those that a decoder has."""
    rank = len(tensor.shape)
    roles: Roles = ()
    if CROSS.search(name):
        roles = ("batch",)
    elif name == names.attention_mask or "mask" in name.lower():
        roles = OF_MASK.get(rank, ())
    elif name == names.position_ids or "position" in name.lower():
        roles = OF_POSITIONS.get(rank, ())
    elif name == names.inputs_embeds or "embed" in name.lower():
        roles = ("batch", "new", None) if rank == 3 else ()
    elif name == names.input_ids or (tensor.dtype in WHOLE and rank == 2):
        roles = ("batch", "new")
    return [Axis(name, axis, tensor.shape[axis], role) for axis, role in enumerate(roles) if role is not None and axis < rank]
