"""Finds the files of a language model in a folder, and how onnxruntime-genai runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hase.inference.llm.dimensions import DecoderFile, Step, decoder_file
from hase.inference.llm.genai_config import FILE, GenaiConfig, read_genai_config
from hase.utils.errors import UserError
from hase.utils.paths import Workspace, model_files


@dataclass(frozen=True)
class LanguageModel:
    """A language model, and how its requests are run.

    Attributes:
        name: of its folder or file.
        prefill, decode: the files that run the prompt and each further token; mostly the same one.
        shares_cache: one buffer is the cache of all runs, as long as a request's `max_length`.
        beams: sequences that are followed for each one of a request.
        captures_cuda_graph: each further token is run as a CUDA graph.
        provider: the first execution provider in the config, in lower case; None where there is no config.
        threads: on a CPU, as the config says; None where it does not, and 0 where there is no config.
        max_length: tokens of prompt and answer, as the config says; None where nothing does.
        context_length: the most that the model allows; None where nothing says.
        notices: what the reader should know.
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

    def step(self, batch: int, new: int, before: int, max_length: int) -> Step:
        """A run that computes `new` tokens of each sequence after `before` others, in a request of at most `max_length`."""
        masked = max_length if self.captures_cuda_graph and before else before + new
        return Step(batch * self.beams, new, before, max_length if self.shares_cache else before, masked)


def language_model(model: Path, decode: Path | None = None, dims: Mapping[str, int] | None = None,
                   workspace: Workspace | None = None) -> LanguageModel:
    """Finds a language model.

    Args:
        model: a folder with genai_config.json; one with a decoder's ONNX file, or with two, of which one takes a cache; or such
            a file itself.
        decode: the file that runs each further token, where `model` is a file that runs prompts only.
        dims: sizes of dimensions by name, where their role does not say how large they are.
        workspace: where a bare name is looked for, too.

    Raises:
        UserError: there is no such model, it is none that generates tokens with a cache, or it has no dimension of a name in
            `dims`.
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
    """The one or two ONNX files of a folder.

    Raises:
        UserError: it holds none, or more.
    """
    paths = model_files([folder])
    if not paths:
        raise UserError(f"{folder}: neither {FILE} nor an .onnx file in this folder")
    if len(paths) > 2:
        raise UserError(f"{folder}: several models ({', '.join(path.name for path in paths)}), and no {FILE} that says which "
                        "is which; name the file with --model, and one that only runs further tokens with --decode-model")
    return paths


def _of_pair(name: str, parts: list[DecoderFile]) -> LanguageModel:
    """The model of one file, or of two of which one takes a cache.

    Raises:
        UserError: none of them takes a cache, or both do.
    """
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
    """The model that a genai_config.json describes.

    Raises:
        UserError: its files are missing, or onnxruntime-genai runs them in a way that is not predicted.
    """
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
