"""`genai_config.json`, as onnxruntime-genai's builder writes it beside a model (version 0.18): the parts that sizes and times
depend on. What it says besides is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hase.utils import files
from hase.utils.errors import UserError

FILE = "genai_config.json"
Size = Annotated[int, Field(ge=1, le=2**40)]


class Section(BaseModel):
    """A part of the file; it may hold more than is read."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Inputs(Section):
    """The names of the model's inputs; in those of caches, %d stands for the layer."""

    input_ids: str = "input_ids"
    inputs_embeds: str = "inputs_embeds"
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    past_key_names: str = "past_key_values.%d.key"
    past_value_names: str = "past_key_values.%d.value"
    past_names: str = ""


class Outputs(Section):
    """The names of the model's outputs that hold the caches, as in `Inputs`."""

    present_key_names: str = "present.%d.key"
    present_value_names: str = "present.%d.value"
    present_names: str = ""


class SessionOptions(Section):
    """`provider_options` holds a mapping for each provider, of its name to its options. `intra_op_num_threads`: on a CPU; by
    default onnxruntime-genai takes half as many as the machine has."""

    intra_op_num_threads: int | None = None
    provider_options: tuple[dict[str, dict[str, Any] | None], ...] = ()


class Decoder(Section):
    """The decoder: its file, and the names of its tensors. `pipeline`: the files of a model in several parts."""

    filename: str = ""
    inputs: Inputs = Inputs()
    outputs: Outputs = Outputs()
    session_options: SessionOptions = SessionOptions()
    pipeline: tuple[Any, ...] = ()


class Model(Section):
    context_length: Size | None = None
    decoder: Decoder
    type: str = ""


class Search(Section):
    """How tokens are generated. onnxruntime-genai takes the model's context length where `max_length` is not given or 0."""

    max_length: Annotated[int, Field(ge=0, le=2**40)] = 0
    num_beams: Size = 1
    past_present_share_buffer: bool = False
    chunk_size: int | None = None


class GenaiConfig(Section):
    model: Model
    search: Search = Search()

    @property
    def providers(self) -> dict[str, dict[str, Any]]:
        """The options of each execution provider, by its name in lower case; none for the CPU's."""
        return {name.lower(): options or {} for entry in self.model.decoder.session_options.provider_options
                for name, options in entry.items()}

    @property
    def captures_cuda_graph(self) -> bool:
        """Whether each token is generated with a CUDA graph."""
        return str(self.providers.get("cuda", {}).get("enable_cuda_graph", "0")) == "1"

    @property
    def shares_cache(self) -> bool:
        """Whether one buffer of `max_length` tokens is the cache of all runs. Several beams keep a cache of their own each
        (onnxruntime-genai's kv_cache.cpp: DefaultKeyValueCache)."""
        return self.search.past_present_share_buffer and self.search.num_beams == 1


def read_genai_config(folder: Path) -> GenaiConfig:
    """The config of a model's folder.

    Raises:
        UserError: it is missing or damaged.
    """
    path = folder / FILE
    try:
        return GenaiConfig.model_validate(files.read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: not a config of onnxruntime-genai: {where}: {first['msg']}") from None
