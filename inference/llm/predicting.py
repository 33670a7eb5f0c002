"""Predicts requests to a language model: time to first token, time per token, memory, energy, and what fits."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hase.inference.library.predictor import Predictor
from hase.inference.llm.answers import LlmEnergy, LlmMemory, LlmPrediction, LlmTime, TokenTime
from hase.inference.llm.language_model import DecoderFile, DecoderStep, LanguageModel, language_model
from hase.inference.llm.memory import DecoderRun, largest_batch, longest_context, request_memory
from hase.inference.llm.requests import (
    GenerationModels,
    LlmRequest,
    generation_models,
    interpolate_tokens,
    request_for,
    run_of_step,
)
from hase.inference.memory.session import device_memory_mib, memory_warnings
from hase.inference.prediction.answers import widen_to_smaller_sizes
from hase.inference.prediction.conditions import AS_USUAL, RunMode
from hase.inference.prediction.energy import energy_of
from hase.inference.prediction.run import weights_warning
from hase.inference.prediction.sources import checked_dims, missing_weights, shown
from hase.ort_analysis.cuda.placement import capture_obstacle
from hase.ort_analysis.isolated.analysis import optimized_once
from hase.utils.errors import UserError
from hase.utils.logger import progress
from hase.utils.processes import is_command
from hase.utils.text import cell, distinct

if TYPE_CHECKING:
    from hase.inference.prediction.answers import Prediction
    from hase.inference.prediction.conditions import HostPace
    from hase.inference.prediction.run import PredictedRun
    from hase.records.generations import Phase
    from hase.records.kernel_record import ModelRecord
    from hase.utils.fingerprint import Target
    from hase.utils.paths import Workspace

MOST_CONTEXT = 2**20  # tokens; the limit of the search if a model's own is unknown
LESS_MEASURED = 0.01  # share of kernel time: intermediate lengths of the cache with this much less measured are left out
PADDED = "all prompts of a batch count as padded to the longest; continuous batching is not predicted"
NO_LOOP = "without the time of genai's loop for each token: it was not measured for this target"


@dataclass
class AnalysedModel:
    """A language model on a target, with the records of its runs, each analysed once."""

    predictor: Predictor
    model: LanguageModel
    _records: dict[tuple[Path, tuple[tuple[str, int], ...]], ModelRecord] = field(default_factory=dict)

    @cached_property
    def learned(self) -> GenerationModels:
        """The fitted corrections for token generation on the target."""
        return generation_models(self.predictor)

    def file(self, step: DecoderStep) -> DecoderFile:
        """The file that runs a step."""
        return self.model.decode if step.before else self.model.prefill

    def record(self, step: DecoderStep) -> ModelRecord:
        """The record of a step: that of its file at its sizes."""
        file = self.file(step)
        dims = file.dims(step)
        key = file.path, tuple(sorted(dims.items()))
        if key not in self._records:
            self._records[key] = self.predictor.record(file.path, dims)
        return self._records[key]

    def prompt_step(self, request: LlmRequest) -> DecoderStep:
        return self.model.step(request.batch, request.prompt, 0, request.max_length)

    def token_step(self, request: LlmRequest, cached: int) -> DecoderStep:
        """The run of one further token when the cache holds `cached` tokens."""
        return self.model.step(request.batch, 1, cached, request.max_length)

    def runs(self, request: LlmRequest) -> tuple[DecoderRun, ...]:
        """The runs of a request that may need the most memory: the prompt's, and the last token's."""
        steps = [self.prompt_step(request), *(self.token_step(request, cached) for cached in request.main_lengths[-1:])]
        return tuple(DecoderRun(self.file(step), self.record(step)) for step in steps)

    def memory(self, request: LlmRequest) -> LlmMemory:
        return request_memory(self.runs(request), self.model.shares_cache)


class RequestRuns(NamedTuple):
    """The predicted runs of a request: the prompt's, and those of a further token by the number of tokens in the cache."""

    prompt: PredictedRun
    tokens: dict[int, PredictedRun]
    middle: PredictedRun | None  # of a token in the middle of the generation; None if the prompt's run gives the only token

    @property
    def cuda_graph(self) -> bool:
        """Whether the tokens are predicted as a CUDA graph."""
        return any(run.prediction.way.cuda_graph for run in self.tokens.values())

    @property
    def all_runs(self) -> list[PredictedRun]:
        return [self.prompt, *self.tokens.values()]


def predict_language_model(model: str | Path | LanguageModel, *, prompt: int, generate: int, batch: int = 1,
                           max_length: int | None = None, decode: str | Path | None = None,
                           dims: Mapping[str, int] | None = None, workspace: Workspace | str | Path | None = None,
                           target: str | None = None, strict: bool = False, force: bool = False, no_weights: bool = False,
                           host_pace: float | HostPace | None = None) -> LlmPrediction:
    """Predicts a request to a language model in a folder of onnxruntime-genai's builder, or in a decoder's ONNX file.

    Args:
        prompt, generate, batch: tokens of each prompt, tokens generated for it, and number of prompts.
        max_length: tokens of prompt and answer for which the cache is allocated; by default as in genai_config.json.
        decode: the file that runs further tokens, if `model` runs prompts only.
        dims: sizes of dimensions whose role is not known, by name.

    Raises UserError: the model, the predictors, the request or the pace can't be used; the message says why.
    """
    predictor = Predictor(workspace, target, strict=strict, force=force, no_weights=no_weights)
    if not isinstance(model, LanguageModel):
        paths = _path("model", model), None if decode is None else _path("decode", decode)
        model = language_model(*paths, checked_dims(dims), predictor.workspace)
    return predict_requests(predictor, model, [request_for(model, batch, prompt, generate, max_length)], host_pace)[0]


def _path(name: str, given: object) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise UserError(f"{name}={shown(given)}: give the path of a folder or of an ONNX file")
    return Path(given)


def predict_requests(predictor: Predictor, model: LanguageModel, requests: Sequence[LlmRequest],
                     host_pace: float | HostPace | None = None) -> list[LlmPrediction]:
    """Predicts several requests to a language model."""
    return [answer for answer, _ in requests_with_runs(predictor, model, requests, host_pace)]


def requests_with_runs(predictor: Predictor, model: LanguageModel, requests: Sequence[LlmRequest],
                       host_pace: float | HostPace | None = None) -> list[tuple[LlmPrediction, RequestRuns]]:
    """Predicts requests; also returns the runs that each was predicted from. Runs that several requests share are predicted
    once."""
    analysed = AnalysedModel(predictor, model)
    with optimized_once():
        predicted = _predicted_runs(analysed, requests, host_pace)
        by_size = {(request.batch, request.generate): request for request in reversed(requests)}  # the first of each
        longest = {size: _longest_context(analysed, request) for size, request in by_size.items()}
        return [(_prediction(analysed, request, runs, notices, longest[request.batch, request.generate]), runs)
                for request, (runs, notices) in zip(requests, predicted, strict=True)]


def measure_missing(predictor: Predictor, model: LanguageModel, requests: Iterable[LlmRequest]) -> None:
    """Measures the missing kernels of some requests on this machine, which must be the target: those of the prompts, and of a
    token at the start, in the middle and at the end of each generation."""
    analysed, sizes_by_path = AnalysedModel(predictor, model), defaultdict[Path, list[dict[str, int]]](list)
    for request in requests:
        for step in (analysed.prompt_step(request), *(analysed.token_step(request, cached) for cached in request.main_lengths)):
            file = analysed.file(step)
            if (dims := file.dims(step)) not in sizes_by_path[file.path]:
                sizes_by_path[file.path].append(dims)
    with optimized_once():
        for path, sizes in sizes_by_path.items():
            predictor.measure_missing(path, sizes).log()


def _predicted_runs(analysed: AnalysedModel, requests: Sequence[LlmRequest],
                   host_pace: float | HostPace | None) -> list[tuple[RequestRuns, tuple[str, ...]]]:
    """The runs of each request, including genai's loop, and notices about how they were predicted."""
    prompts = [analysed.prompt_step(request) for request in requests]
    tokens = [{cached: analysed.token_step(request, cached) for cached in request.predicted_lengths} for request in requests]
    steps = list(dict.fromkeys([*prompts, *(step for token_steps in tokens for step in token_steps.values())]))
    records = {step: analysed.record(step) for step in (progress(steps, "analysing") if is_command() else steps)}
    further = [step for step in steps if step.before]
    token_mode, notices = _token_mode(analysed, records[further[0]]) if further else (AS_USUAL, ())
    known: dict[DecoderStep, PredictedRun] = {}
    loop_pace: float | None = None  # of the prompts' host, for which genai's loop waits, although a captured graph does not
    phases: dict[Phase, tuple[list[DecoderStep], RunMode]] = {
        "first": ([step for step in steps if not step.before], AS_USUAL), "token": (further, token_mode)}
    for phase, (phase_steps, run_mode) in phases.items():
        pace = None if run_mode.cuda_graph else host_pace  # a captured graph does not wait for its host
        runs = analysed.predictor.runs([records[step] for step in phase_steps], run_mode=run_mode, host_pace=pace,
                                       composition=analysed.learned.compositions.get(phase))
        in_order = widen_to_smaller_sizes([run.prediction for run in runs])
        loop_pace = next((run.prediction.host_pace for run in runs if run.prediction.host_pace), loop_pace)
        known |= {step: run_of_step(run._replace(prediction=prediction), step, analysed.file(step), analysed.learned, loop_pace)
                  for step, run, prediction in zip(phase_steps, runs, in_order, strict=True)}
    return [(RequestRuns(known[prompt], _as_measured({cached: known[step] for cached, step in token_steps.items()}, request),
                         known[token_steps[request.middle_length]] if token_steps else None), notices)
            for request, prompt, token_steps in zip(requests, prompts, tokens, strict=True)]


def _token_mode(analysed: AnalysedModel, record: ModelRecord) -> tuple[RunMode, tuple[str, ...]]:
    """How further tokens run, and a notice if the model's config says something else."""
    fitted = analysed.predictor.fitted
    if not analysed.model.captures_cuda_graph or fitted.target.flavour.device != "cuda":
        return AS_USUAL, ()
    obstacle = capture_obstacle(record) if fitted.composition.cuda_graph else "no model was measured as a CUDA graph"
    if obstacle is not None:
        return AS_USUAL, (f"the config asks for CUDA graphs, but tokens are predicted without: {obstacle}",)
    return RunMode(cuda_graph=True), ()


def _as_measured(tokens: dict[int, PredictedRun], request: LlmRequest) -> dict[int, PredictedRun]:
    """The runs of tokens, without those between the request's outline that have fewer measured kernels than it: it is what
    --measure-missing measures."""
    measured = {cached: run.prediction.time_share["measured"] for cached, run in tokens.items()}
    least = min((measured[cached] for cached in request.main_lengths), default=0.0) - LESS_MEASURED
    return {cached: run for cached, run in tokens.items() if cached in request.main_lengths or measured[cached] >= least}


def _longest_context(analysed: AnalysedModel, request: LlmRequest) -> int | None:
    """The most tokens of prompt and answer that fit in the target's memory; None if unknown."""
    device_mib = _device_mib(analysed.predictor)
    if device_mib is None:
        return None

    def left_mib(tokens: int) -> float:
        prompt = tokens - request.generate
        return device_mib - analysed.memory(request._replace(prompt=prompt, max_length=tokens)).peak_mib

    return longest_context(left_mib, min(request.generate + 1, request.max_length),
                           analysed.model.context_length or MOST_CONTEXT)


def _device_mib(predictor: Predictor) -> float | None:
    return device_memory_mib(predictor.fitted.target, predictor.fitted.predictors.sidecar.machines)


def _prediction(analysed: AnalysedModel, request: LlmRequest, runs: RequestRuns, notices: Sequence[str],
                longest: int | None) -> LlmPrediction:
    """The answer to a request, from its runs."""
    model, fitted, learned = analysed.model, analysed.predictor.fitted, analysed.learned
    memory, device_mib = analysed.memory(request), _device_mib(analysed.predictor)
    first = _run_time(runs.prompt.prediction)
    loop_ms = learned.loop_ms(analysed.token_step(request, request.prompt), model.decode, cuda_graph=runs.cuda_graph)
    lengths, times = list(runs.tokens), [_run_time(run.prediction) for run in runs.tokens.values()]
    ends = [time.ms for time in times], *zip(*(time.interval_ms for time in times), strict=True)
    further = [interpolate_tokens(request, lengths, values) for values in ends] if lengths else []
    sums = [float(values.sum()) for values in further] or [0.0, 0.0, 0.0]
    whole = _llm_time(first.ms + sums[0], first.interval_ms[0] + sums[1], first.interval_ms[1] + sums[2])
    at = dict(zip(lengths, times, strict=True))
    energy, energy_warnings = _energy(learned, request, runs)
    warnings = (*model.notices, *notices, *_missing_weights(analysed), *_config_warnings(model, fitted.target),
                *(() if learned.generation else (NO_LOOP,)), *((PADDED,) if request.batch > 1 else ()),
                *_memory_warnings(model, request, memory, device_mib),
                *distinct(warning for run in runs.all_runs for warning in _run_warnings(run.prediction)), *energy_warnings)
    return LlmPrediction(
        model=model.name, target=fitted.target.name, batch=request.batch, prompt=request.prompt, generate=request.generate,
        max_length=request.max_length, shares_cache=model.shares_cache, cuda_graph=runs.cuda_graph,
        ttft=first, tpot=_llm_time(*(total / len(request.cache_lengths) for total in sums)) if lengths else None,
        tpot_start=at[lengths[0]] if lengths else None, tpot_middle=at[request.middle_length] if lengths else None,
        tpot_end=at[lengths[-1]] if lengths else None,
        tokens=tuple(TokenTime(cached=cached, **time.model_dump()) for cached, time in at.items()), request=whole,
        tokens_per_second=1e3 * request.generate / whole.ms,
        device_tokens_per_second=1e3 * request.batch * request.generate / whole.ms, genai_loop_ms=loop_ms, memory=memory,
        device_memory_mib=device_mib, fits_memory=None if device_mib is None else memory.peak_mib <= device_mib,
        largest_batch=None if device_mib is None else largest_batch(
            memory, request.batch, analysed.runs(request), model.shares_cache, device_mib),
        longest_context=longest, context_length=model.context_length, energy=energy,
        prompt_share=runs.prompt.prediction.time_share, token_share=runs.middle.prediction.time_share if runs.middle else None,
        host_pace=runs.prompt.prediction.host_pace, host_pace_source=runs.prompt.prediction.host_pace_source,
        rough_estimate=any(run.prediction.rough_estimate for run in runs.all_runs), warnings=tuple(dict.fromkeys(warnings)))


def _missing_weights(analysed: AnalysedModel) -> tuple[str, ...]:
    """A warning if files of the model's weights are missing, which the records of runs do not show."""
    if not analysed.predictor.no_weights:
        return ()
    paths = dict.fromkeys((analysed.model.prefill.path, analysed.model.decode.path))
    return weights_warning([missing for path in paths for missing in missing_weights(path)])


def _config_warnings(model: LanguageModel, target: Target) -> list[str]:
    """Warnings if the config does not run the model as the target was measured."""
    warnings, device = [], target.flavour.device
    if model.provider not in (None, device):
        warnings.append(f"the config names the {model.provider} provider, but the target's is {device}: predicted as if the "
                        f"config named {device}; a model that is built for that may have other operators")
    if device == "cpu" and model.threads not in (0, target.threads):
        threads = (f"asks for {model.threads} threads" if model.threads else
                   "does not set the number of threads, so onnxruntime-genai uses half of the machine's")
        warnings.append(f"the config {threads}; predicted for {target.threads}, as on the target: set "
                        f"session_options.intra_op_num_threads to {target.threads}")
    return warnings


def _run_time(prediction: Prediction) -> LlmTime:
    return _llm_time(prediction.latency_ms, *prediction.interval_ms)


def _llm_time(ms: float, low_ms: float, high_ms: float) -> LlmTime:
    return LlmTime(ms=ms, interval_ms=(low_ms, high_ms))


def _run_warnings(prediction: Prediction) -> list[str]:
    """The warnings of a run, except those about memory, which is predicted for the whole request."""
    about_memory = memory_warnings(prediction.memory, prediction.device_memory_mib)
    return [warning for warning in prediction.warnings if warning not in about_memory]


def _memory_warnings(model: LanguageModel, request: LlmRequest, memory: LlmMemory, device_mib: float | None) -> tuple[str, ...]:
    """Warnings about a request's cache and its memory."""
    warnings, needed = [], request.prompt + request.generate
    if model.shares_cache and request.max_length > needed:
        enough_mib = memory.cache_mib * needed / request.max_length
        warnings.append(f"onnxruntime-genai allocates the cache for max_length = {request.max_length} tokens, but the request "
                        f"needs {needed}: {cell(memory.cache_mib)} MiB instead of {cell(enough_mib)} MiB; set max_length where "
                        "you generate, and --max-length here")
    if device_mib is not None and memory.peak_mib > device_mib:
        warnings.append(f"it does not fit in the memory: its peak is {memory.peak_mib / 1024:.4g} GiB, and the device "
                        f"has {device_mib / 1024:.4g} GiB; no run will have these times")
    return tuple(warnings)


def _energy(learned: GenerationModels, request: LlmRequest, runs: RequestRuns) -> tuple[LlmEnergy | None, tuple[str, ...]]:
    """The energy of a request, and warnings about it; None if the target has no energy model."""
    if learned.energy is None:
        return None, ("no joules: nothing was learned about this target's energy (docs/energy.md)",)
    limited = bool(learned.generation and learned.generation.power_limit)
    prompt, *tokens = energies = [energy_of(run, learned.energy, limited) for run in runs.all_runs]
    totals_j = [prompt.energy_j, *prompt.interval_j]
    if tokens:
        token_values = zip(*((token.energy_j, *token.interval_j) for token in tokens), strict=True)
        totals_j = [total + float(interpolate_tokens(request, list(runs.tokens), values).sum())
                    for total, values in zip(totals_j, token_values, strict=True)]
    request_j, low_j, high_j = totals_j
    count = request.batch * request.generate
    answer = LlmEnergy(prompt_j=prompt.energy_j, request_j=request_j, token_j=request_j / count,
                       token_interval_j=(low_j / count, high_j / count),
                       rough_estimate=any(energy.rough_estimate for energy in energies))
    return answer, tuple(distinct(warning for energy in energies for warning in energy.warnings))
