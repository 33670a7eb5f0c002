"""The files of a language model: where they are, how onnxruntime-genai runs them, and the role of each input dimension.

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
from hase.records.kernel_record import Interface, OpenTensor
from hase.utils import files
from hase.utils.errors import UserError, first_problem
from hase.utils.paths import Workspace, model_files

FILE = "genai_config.json"
Size = Annotated[int, Field(ge=1, le=2**40)]
Role = Literal["batch", "new", "cached", "total"]
Roles: TypeAlias = tuple[Role | None, ...]
# axis roles of masks and positions, by rank
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
    """A language model, and how its requests are run.

    Attributes:
        prefill, decode: the files that run the prompt and each further token; usually the same one.
        shares_cache: one buffer is the cache of all runs; its length is a request's `max_length`.
        captures_cuda_graph: further tokens run as a CUDA graph.
        provider: the first execution provider in the config, in lower case; None without a config.
        threads: on a CPU, by the config; None if it does not say, and 0 without a config.
        max_length: tokens of prompt and answer, by the config.
        context_length: the most tokens that the model allows.
    """

    name: str
    prefill: DecoderFile
    decode: DecoderFile
    shares_cache: bool = False
    beams: int = 1
    captures_cuda_graph: bool = False
    provider: str | None = None
    threads: int | None = 0
    max_length: int | None = None
    context_length: int | None = None
    notices: tuple[str, ...] = ()

    def step(self, batch: int, new: int, before: int, max_length: int) -> DecoderStep:
        """The run that computes `new` tokens of each sequence after `before` others, in a request of at most `max_length`."""
        masked = max_length if self.captures_cuda_graph and before else before + new
        return DecoderStep(batch * self.beams, new, before, max_length if self.shares_cache else before, masked)


def language_model(model: Path, decode: Path | None = None, dims: Mapping[str, int] | None = None,
                   workspace: Workspace | None = None) -> LanguageModel:
    """Finds a language model.

    Args:
        model: a folder with genai_config.json; a folder with a decoder's ONNX file, or with two of which one takes a cache; or
            such a file itself.
        decode: the file that runs further tokens, if `model` is a file that runs prompts only.
        dims: sizes of dimensions by name, if their role does not determine them.
    """
    result = _language_model(model, decode, dims, workspace or Workspace())
    if unknown := sorted(set(dims or {}) - set(result.prefill.fixed) - set(result.decode.fixed)):
        raise UserError(f"{model}: no dynamic dimension {', '.join(unknown)} among its inputs")
    return result


def _language_model(model: Path, decode: Path | None, dims: Mapping[str, int] | None, workspace: Workspace) -> LanguageModel:
    if model.name == FILE:
        model = model.parent
    if (model / FILE).is_file():
        if decode is not None:
            raise UserError(f"{model}: its {FILE} names its files; leave the second file out")
        return _of_config(model, read_genai_config(model), dims)
    if model.is_dir() and decode is None:
        return _of_pair(model.name, [decoder_file(path, given=dims) for path in _files_in(model)])
    paths = [workspace.find_model(path) for path in (model, decode) if path is not None]
    return _of_pair(paths[0].stem, [decoder_file(path, given=dims) for path in paths])


def _files_in(folder: Path) -> list[Path]:
    """The one or two ONNX files of a folder."""
    paths = model_files([folder])
    if not paths:
        raise UserError(f"{folder}: neither {FILE} nor an .onnx file in this folder")
    if len(paths) > 2:
        raise UserError(f"{folder}: several models ({', '.join(path.name for path in paths)}), and no {FILE} that says which "
                        "is which; name the file with --model, and one that only runs further tokens with --decode-model")
    return paths


def _of_pair(name: str, parts: list[DecoderFile]) -> LanguageModel:
    """The model of one file, or of two files of which one takes a cache."""
    cached = [part for part in parts if part.caches]
    if not cached:
        raise UserError(f"{' and '.join(str(part.path) for part in parts)}: no cache of keys and values among the inputs, so "
                        "nothing generates tokens one by one; predict a single run with "
                        "inference/predict_model_latency.py")
    if len(parts) > 1 and len(cached) != 1:
        raise UserError(f"{' and '.join(str(part.path) for part in parts)}: both take a cache; give the one that is used as "
                        "--model, without the other")
    prefill = next((part for part in parts if part is not cached[0]), cached[0])
    return LanguageModel(name, prefill, cached[0])


def _of_config(folder: Path, config: GenaiConfig, dims: Mapping[str, int] | None) -> LanguageModel:
    """The model that a genai_config.json describes."""
    model, search = config.model, config.search
    if model.decoder.pipeline or not model.decoder.filename:
        raise UserError(f"{folder / FILE}: the decoder is in several parts ({model.type}); only one in a single file is "
                        "predicted: name the files themselves with --model and --decode-model")
    part = decoder_file(folder / model.decoder.filename, config, dims)
    if not part.caches:
        raise UserError(f"{part.path}: no cache of keys and values among the inputs that {FILE} names")
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
    """The options of a session.

    `provider_options` is a list of mappings from a provider's name to its options. `intra_op_num_threads` is for a CPU; by
    default onnxruntime-genai uses half of the machine's threads.
    """

    intra_op_num_threads: int | None = None
    provider_options: tuple[dict[str, dict[str, Any] | None], ...] = ()


class GenaiDecoder(GenaiSection):
    """The decoder's file and the names of its tensors; `pipeline`: the files of a model in several parts."""

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
        """The options of each execution provider, by its name in lower case; the CPU's is not listed."""
        return {name.lower(): options or {} for entry in self.model.decoder.session_options.provider_options
                for name, options in entry.items()}

    @property
    def captures_cuda_graph(self) -> bool:
        """Whether tokens are generated with a CUDA graph."""
        return str(self.providers.get("cuda", {}).get("enable_cuda_graph", "0")) == "1"

    @property
    def shares_cache(self) -> bool:
        """Whether one buffer of `max_length` tokens is the cache of all runs. With several beams, caches are separate
        (onnxruntime-genai's kv_cache.cpp: DefaultKeyValueCache).
        """
        return self.search.past_present_share_buffer and self.search.num_beams == 1


def read_genai_config(folder: Path) -> GenaiConfig:
    """The config of a model's folder."""
    path = folder / FILE
    try:
        return GenaiConfig.model_validate(files.read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: not a config of onnxruntime-genai: {first_problem(error)}") from None


class InputAxis(NamedTuple):
    """An axis of an input that has a role, and its size in the file: a number, or a name."""

    tensor: str
    axis: int
    size: int | str
    role: Role


class DecoderStep(NamedTuple):
    """One run of a decoder: it computes `new` tokens of each sequence after `before` others.

    Attributes:
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
        axes: the axes with a role.
        caches, presents: the inputs and the outputs that hold keys, values and other states.
        fixed: sizes of dimensions that have no role.
        has_branches: an input says whether the cache is used.
        words: logits per token (the vocabulary); 0 if unknown.
    """

    path: Path
    axes: tuple[InputAxis, ...]
    caches: tuple[str, ...]
    presents: tuple[str, ...]
    fixed: Mapping[str, int]
    has_branches: bool
    words: int

    def dims(self, step: DecoderStep) -> dict[str, int]:
        """The sizes of all dynamic dimensions in a run."""
        sizes: dict[str, int] = dict(self.fixed)
        roles: dict[str, Role] = {}
        for tensor, axis, size, role in self.axes:
            wanted = step.size(role)
            if isinstance(size, int):
                if size != wanted:
                    raise UserError(f"{self.path}: made for {size} {NOUNS[role]} ({tensor}, axis {axis}), and {wanted} are "
                                    "asked for")
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
             if size not in with_role and _is_open(interface, size)}
    sizes = [tensor.shape[-1] for name, tensor in interface.outputs.items() if name not in presents and tensor.shape]
    words = max((size for size in sizes if isinstance(size, int)), default=0)
    return DecoderFile(path, tuple(axes), caches, presents, fixed, BRANCH in interface.inputs, words)


def _is_open(interface: Interface, size: str) -> bool:
    return any(size in tensor.shape for tensor in interface.inputs.values())


def _caches(tensors: Mapping[str, OpenTensor], templates: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that hold caches, by the templates or by their names."""
    patterns = [re.compile(re.escape(template).replace("%d", r"\d+")) for template in templates if template]
    named = [name for name in tensors if any(pattern.fullmatch(name) for pattern in patterns)]
    return tuple(name for name, tensor in tensors.items()
                 if name in named or (CACHE.search(name) and len(tensor.shape) >= 3))


def _cache_axes(name: str, tensor: OpenTensor, set_by_model: Mapping[str, int]) -> list[InputAxis]:
    """The axes of a cache with a role; none if its rank is unknown.

    Keys and values in one tensor are [2, batch, heads, length, head size].
    """
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
    """The axes of an input with a role; none if decoders have no such input."""
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
