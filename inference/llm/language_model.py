"""Finds the files of a language model, how onnxruntime-genai runs them, and the role of each input dimension.

An input is recognised by the name in the config, else by parts of its name, its element type and its rank. Its axes then have
their roles by convention: a cache is [batch, heads, length, head size], the mask [batch, tokens so far]. So an exporter's
dimension names do not matter. A dimension without a role gets the only size that the model's weights and attributes allow (the
head size), or must be given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hase.ort_analysis.isolated import analysis
from hase.records.kernel_record import OpenTensor
from hase.utils import files
from hase.utils.errors import UserError, first_problem
from hase.utils.paths import Workspace, model_files

GENAI_CONFIG = "genai_config.json"
Size = Annotated[int, Field(ge=1, le=2**40)]
Role = Literal["batch", "new", "cached", "total"]
Roles: TypeAlias = tuple[Role | None, ...]
# The roles of the axes of masks and positions, by rank.
MASK_ROLES: dict[int, Roles] = {2: ("batch", "total"), 3: ("batch", "new", "total"), 4: ("batch", None, "new", "total")}
POSITION_ROLES: dict[int, Roles] = {1: ("new",), 2: ("batch", "new"), 3: (None, "batch", "new")}
NOUNS: dict[Role, str] = {"batch": "sequences", "new": "new tokens", "cached": "tokens in the cache", "total": "tokens so far"}
CACHE = re.compile(r"past|present|cache|(^|[._])kv([._]|$)", re.IGNORECASE)
STATE = re.compile(r"conv|recurrent|ssm|scale", re.IGNORECASE)  # in a cache's name: it does not grow with the tokens
CROSS = re.compile(r"encoder|cross", re.IGNORECASE)  # in an input's name: it is as long as an encoder's output
BRANCH = "use_cache_branch"  # an input that takes one branch of an If with a cache, and the other without
PAGED = ("block_table", "slot_mapping")  # inputs of models whose caches lie in pages
WHOLE_NUMBERS = ("int32", "int64")


@dataclass(frozen=True)
class LanguageModel:
    """A language model, and how its requests are run."""

    name: str
    prefill: DecoderFile  # runs the prompt
    decode: DecoderFile  # runs each further token; usually the same file
    shares_cache: bool = False  # one buffer is the cache of all runs; its length is a request's `max_length`
    beams: int = 1
    captures_cuda_graph: bool = False  # further tokens run as a CUDA graph
    provider: str | None = None  # the first execution provider in the config, in lower case; None without a config
    threads: int | None = 0  # on a CPU, by the config; None if it does not say, and 0 without a config
    max_length: int | None = None  # tokens of prompt and answer, by the config
    context_length: int | None = None  # the most tokens that the model allows
    notices: tuple[str, ...] = ()

    def step(self, batch: int, new: int, before: int, max_length: int) -> DecoderStep:
        """The run that computes `new` tokens of each sequence after `before` others, in a request of at most `max_length`."""
        mask_length = max_length if self.captures_cuda_graph and before else before + new
        return DecoderStep(batch * self.beams, new, before, max_length if self.shares_cache else before, mask_length)


def language_model(model: Path, decode: Path | None = None, dims: Mapping[str, int] | None = None,
                   workspace: Workspace | None = None) -> LanguageModel:
    """Finds a language model. `model` is a folder with genai_config.json; a folder with a decoder's ONNX file, or with two of
    which one takes a cache; or such a file itself. `decode` is the file that runs further tokens, if `model` is a file that
    runs prompts only. `dims` are sizes of dimensions by name, if their role does not determine them."""
    folder = model.parent if model.name == GENAI_CONFIG else model
    if (folder / GENAI_CONFIG).is_file():
        if decode is not None:
            raise UserError(f"{folder}: its {GENAI_CONFIG} names its files; leave the second file out")
        found = _from_config(folder, read_genai_config(folder), dims)
    elif folder.is_dir() and decode is None:
        found = _from_files(folder.name, _onnx_files(folder), dims)
    else:
        find_model = (workspace or Workspace()).find_model
        paths = [find_model(path) for path in (folder, decode) if path is not None]
        found = _from_files(paths[0].stem, paths, dims)
    if unknown := sorted(set(dims or {}) - set(found.prefill.fixed) - set(found.decode.fixed)):
        raise UserError(f"{model}: no dynamic dimension {', '.join(unknown)} among its inputs")
    return found


def _onnx_files(folder: Path) -> list[Path]:
    """The one or two ONNX files of a folder."""
    paths = model_files([folder])
    if not paths:
        raise UserError(f"{folder}: neither {GENAI_CONFIG} nor an .onnx file in this folder")
    if len(paths) > 2:
        raise UserError(f"{folder}: several models ({', '.join(path.name for path in paths)}), and no {GENAI_CONFIG} that says "
                        "which is which; name the file with --model, and one that only runs further tokens with --decode-model")
    return paths


def _from_files(name: str, paths: list[Path], dims: Mapping[str, int] | None) -> LanguageModel:
    """The model in one file, or in two files of which one takes a cache."""
    parts = [decoder_file(path, given=dims) for path in paths]
    with_cache = [part for part in parts if part.caches]
    listed = " and ".join(map(str, paths))
    if not with_cache:
        raise UserError(f"{listed}: no cache of keys and values among the inputs, so nothing generates tokens one by one; "
                        "predict a single run with inference/predict_model_latency.py")
    if len(parts) > 1 and len(with_cache) != 1:
        raise UserError(f"{listed}: both take a cache; give the one that is used as --model, without the other")
    prefill = next((part for part in parts if part is not with_cache[0]), with_cache[0])
    return LanguageModel(name, prefill, with_cache[0])


def _from_config(folder: Path, config: GenaiConfig, dims: Mapping[str, int] | None) -> LanguageModel:
    """The model that a genai_config.json describes."""
    model, search = config.model, config.search
    if model.decoder.pipeline or not model.decoder.filename:
        raise UserError(f"{folder / GENAI_CONFIG}: the decoder is in several parts ({model.type}); only one in a single file "
                        "is predicted: name the files themselves with --model and --decode-model")
    part = decoder_file(folder / model.decoder.filename, config, dims)
    if not part.caches:
        raise UserError(f"{part.path}: no cache of keys and values among the inputs that {GENAI_CONFIG} names")
    notices = [f"onnxruntime-genai follows {search.num_beams} beams for each sequence; all are counted, and choosing among "
               "them is not"] if search.num_beams > 1 else []
    if search.chunk_size:
        notices.append(f"the config splits prompts into chunks of {search.chunk_size} tokens; a prompt is predicted as one run")
    return LanguageModel(
        folder.resolve().name, part, part, config.shares_cache, search.num_beams,
        config.captures_cuda_graph and config.shares_cache, next(iter(config.providers), "cpu"),
        model.decoder.session_options.intra_op_num_threads, search.max_length or model.context_length, model.context_length,
        tuple(notices))


class GenaiSection(BaseModel):
    """A section of genai_config.json; other entries are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class GenaiInputs(GenaiSection):
    """The names of the model's inputs; in those of caches, %d stands for the layer."""

    input_ids: str = "input_ids"
    inputs_embeds: str = "inputs_embeds"
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    past_key_names: str = "past_key_values.%d.key"
    past_value_names: str = "past_key_values.%d.value"
    past_names: str = ""


class GenaiOutputs(GenaiSection):
    """The names of the model's outputs that hold the caches; %d stands for the layer."""

    present_key_names: str = "present.%d.key"
    present_value_names: str = "present.%d.value"
    present_names: str = ""


class GenaiSessionOptions(GenaiSection):
    """The options of a session."""

    intra_op_num_threads: int | None = None  # on a CPU; by default, onnxruntime-genai uses half of the machine's threads
    provider_options: tuple[dict[str, dict[str, Any] | None], ...] = ()  # each maps a provider's name to its options


class GenaiDecoder(GenaiSection):
    """The decoder's file and the names of its tensors. `pipeline` lists the files of a model in several parts."""

    filename: str = ""
    inputs: GenaiInputs = GenaiInputs()
    outputs: GenaiOutputs = GenaiOutputs()
    session_options: GenaiSessionOptions = GenaiSessionOptions()
    pipeline: tuple[Any, ...] = ()


class GenaiModel(GenaiSection):
    """The model: its maximum number of tokens, and its decoder."""

    context_length: Size | None = None
    decoder: GenaiDecoder
    type: str = ""


class GenaiSearch(GenaiSection):
    """How tokens are generated. If `max_length` is missing or 0, onnxruntime-genai uses the model's context length."""

    max_length: Annotated[int, Field(ge=0, le=2**40)] = 0
    num_beams: Size = 1
    past_present_share_buffer: bool = False
    chunk_size: int | None = None


class GenaiConfig(GenaiSection):
    """The entries of genai_config.json that Hase reads."""

    model: GenaiModel
    search: GenaiSearch = GenaiSearch()

    @property
    def providers(self) -> dict[str, dict[str, Any]]:
        """The options of each execution provider, by its name in lower case, except the CPU's."""
        return {name.lower(): options or {} for entry in self.model.decoder.session_options.provider_options
                for name, options in entry.items()}

    @property
    def captures_cuda_graph(self) -> bool:
        """Whether tokens are generated with a CUDA graph."""
        return str(self.providers.get("cuda", {}).get("enable_cuda_graph", "0")) == "1"

    @property
    def shares_cache(self) -> bool:
        """Whether one buffer of `max_length` tokens is the cache of all runs. With several beams, caches are separate
        (onnxruntime-genai's kv_cache.cpp: DefaultKeyValueCache)."""
        return self.search.past_present_share_buffer and self.search.num_beams == 1


def read_genai_config(folder: Path) -> GenaiConfig:
    """Reads the config in a model's folder."""
    path = folder / GENAI_CONFIG
    try:
        return GenaiConfig.model_validate(files.read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: not a config of onnxruntime-genai: {first_problem(error)}") from None


class InputAxis(NamedTuple):
    """An axis of an input that has a role."""

    tensor: str
    axis: int
    size: int | str  # in the file: a number, or a name
    role: Role


class DecoderStep(NamedTuple):
    """One run of a decoder: it computes `new` tokens of each sequence after `before` others."""

    batch: int
    new: int
    before: int
    cache_length: int  # of the buffer: `before`, unless runs share a longer one
    mask_length: int

    def size(self, role: Role) -> int:
        return {"batch": self.batch, "new": self.new, "cached": self.cache_length, "total": self.mask_length}[role]


@dataclass(frozen=True)
class DecoderFile:
    """An ONNX file of a language model."""

    path: Path
    axes: tuple[InputAxis, ...]
    caches: tuple[str, ...]  # inputs with keys, values and other states
    presents: tuple[str, ...]  # outputs with the same
    fixed: Mapping[str, int]  # sizes of dimensions without a role
    has_branches: bool  # an input says whether the cache is used
    vocabulary_size: int  # logits per token; 0 if unknown

    def dims(self, step: DecoderStep) -> dict[str, int]:
        """The sizes of all dynamic dimensions in a run. Raises UserError if the file does not allow them."""
        sizes: dict[str, int] = dict(self.fixed)
        roles: dict[str, Role] = {}
        for tensor, axis, size, role in self.axes:
            wanted = step.size(role)
            if isinstance(size, int):
                if size != wanted:
                    raise UserError(f"{self.path}: made for {size} {NOUNS[role]} ({tensor}, axis {axis}), not for {wanted}")
            elif sizes.setdefault(size, wanted) != wanted:
                raise UserError(f"{self.path}: dimension {size} would have to be {sizes[size]} "
                                f"({NOUNS[roles[size]] if size in roles else 'given'}) and {wanted} ({NOUNS[role]}); export "
                                "the model with a name for each")
            else:
                roles[size] = role
        if self.has_branches:
            sizes["then" if step.before else "else"] = 1
        return sizes


def decoder_file(path: Path, config: GenaiConfig | None = None, given: Mapping[str, int] | None = None) -> DecoderFile:
    """Reads the dimensions of a language model's file. Sizes in `given`, by the dimension's name, take precedence over roles.
    """
    interface, given = analysis.interface_of(path), dict(given or {})
    inputs = config.model.decoder.inputs if config else GenaiInputs()
    outputs = config.model.decoder.outputs if config else GenaiOutputs()
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
    unknown = {size: f"{name}, axis {axis}" for name, tensor in interface.inputs.items()
               for axis, size in enumerate(tensor.shape)
               if isinstance(size, str) and size not in with_role and size not in given and size not in interface.set_by_model}
    if unknown:
        listed = "; ".join(f"{size} ({where})" for size, where in unknown.items())
        raise UserError(f"{path}: nothing says how large dimension {listed} is; give its size: " + " ".join(
            f"--dim {size}=SIZE" for size in unknown))
    fixed = {size: value for size, value in {**interface.set_by_model, **given}.items()
             if size not in with_role and any(size in tensor.shape for tensor in interface.inputs.values())}
    sizes = [tensor.shape[-1] for name, tensor in interface.outputs.items() if name not in presents and tensor.shape]
    vocabulary_size = max((size for size in sizes if isinstance(size, int)), default=0)
    return DecoderFile(path, tuple(axes), caches, presents, fixed, BRANCH in interface.inputs, vocabulary_size)


def _caches(tensors: Mapping[str, OpenTensor], templates: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that hold caches: their names match a template or look like a cache's."""
    patterns = [re.compile(re.escape(template).replace("%d", r"\d+")) for template in templates if template]
    named = [name for name in tensors if any(pattern.fullmatch(name) for pattern in patterns)]
    return tuple(name for name, tensor in tensors.items()
                 if name in named or (CACHE.search(name) and len(tensor.shape) >= 3))


def _cache_axes(name: str, tensor: OpenTensor, set_by_model: Mapping[str, int]) -> list[InputAxis]:
    """The axes of a cache that have a role; none if it has fewer than three axes. Keys and values in one tensor are [2, batch,
    heads, length, head size]."""
    if len(tensor.shape) < 3:
        return []
    first = len(tensor.shape) - 4 if tensor.shape[0] == 2 and len(tensor.shape) == 5 else 0
    axes = [InputAxis(name, first, tensor.shape[first], "batch")]
    if STATE.search(name) or CROSS.search(name):
        return axes
    inner = range(first + 1, len(tensor.shape) - 1)
    preferred = sorted(inner, key=lambda axis: (axis != first + 2, axis))
    lengths = [axis for axis in preferred if isinstance(tensor.shape[axis], str) and tensor.shape[axis] not in set_by_model]
    if length := next(iter([*lengths, *preferred]), None):
        axes.append(InputAxis(name, length, tensor.shape[length], "cached"))
    return axes


def _axes(name: str, tensor: OpenTensor, names: GenaiInputs) -> list[InputAxis]:
    """The axes of another input that have a role; none if decoders have no such input."""
    rank = len(tensor.shape)
    roles: Roles = ()
    if CROSS.search(name):
        roles = ("batch",)
    elif name == names.attention_mask or "mask" in name.lower():
        roles = MASK_ROLES.get(rank, ())
    elif name == names.position_ids or "position" in name.lower():
        roles = POSITION_ROLES.get(rank, ())
    elif name == names.inputs_embeds or "embed" in name.lower():
        roles = ("batch", "new", None) if rank == 3 else ()
    elif name == names.input_ids or (tensor.dtype in WHOLE_NUMBERS and rank == 2):
        roles = ("batch", "new")
    return [InputAxis(name, axis, tensor.shape[axis], role) for axis, role in enumerate(roles)
            if role is not None and axis < rank]
