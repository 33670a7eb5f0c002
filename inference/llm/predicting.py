"""Predicts requests to a language model: time to first token, time per token, memory, energy, and what fits."""

from __future__ import annotations

import os
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
from hase.inference.prediction.answers import make_monotonic
from hase.inference.prediction.conditions import AS_USUAL, RunMode
from hase.inference.prediction.energy import EnergyPrediction, energy_of
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
LESS_SURE = 0.01  # of a token's kernel time: intermediate lengths with this much less measured are left out
PADDED = "prompts of a batch count as padded to the longest; continuous batching is not predicted"
NO_LOOP = "without what genai's loop takes per token: not measured for this target"


@dataclass
class AnalysedModel:
    """A language model on a target, with cached records of its runs."""

    predictor: Predictor
    model: LanguageModel
    _records: dict[tuple[Path, tuple[tuple[str, int], ...]], ModelRecord] = field(default_factory=dict)

    @cached_property
    def learned(self) -> GenerationModels:
        """The fitted corrections for token generation on the target."""
        return generation_models(self.predictor)

    def file(self, step: DecoderStep) -> DecoderFile:
        return self.model.decode if step.before else self.model.prefill

    def record(self, step: DecoderStep) -> ModelRecord:
        """The record of the file that runs a step."""
        file = self.file(step)
        dims = file.dims(step)
        key = file.path, tuple(sorted(dims.items()))
        if key not in self._records:
            self._records[key] = self.predictor.record(file.path, dims)
        return self._records[key]

    def prompt_step(self, request: LlmRequest) -> DecoderStep:
        return self.model.step(request.batch, request.prompt, 0, request.max_length)

    def token_step(self, request: LlmRequest, cached: int) -> DecoderStep:
        """The run for one token when the cache holds `cached` tokens."""
        return self.model.step(request.batch, 1, cached, request.max_length)

    def runs(self, request: LlmRequest) -> tuple[DecoderRun, ...]:
        """The runs of a request that can need the most memory: the prompt, and the last token."""
        steps = [self.prompt_step(request), *(self.token_step(request, cached) for cached in request.main_lengths[-1:])]
        return tuple(DecoderRun(self.file(step), self.record(step)) for step in steps)

    def memory(self, request: LlmRequest) -> LlmMemory:
        """The peak memory of a request."""
        return request_memory(self.runs(request), self.model.shares_cache)


class RequestRuns(NamedTuple):
    """The predicted runs of a request: the prompt, and a token at some lengths of the cache and in the middle of the
    generation. The latter is None if the prompt's run gives the only token.
    """

    prompt: PredictedRun
    tokens: dict[int, PredictedRun]
    middle: PredictedRun | None

    @property
    def cuda_graph(self) -> bool:
        """Whether the tokens are predicted as a CUDA graph."""
        return any(run.prediction.way.cuda_graph for run in self.tokens.values())

    @property
    def all(self) -> list[PredictedRun]:
        return [self.prompt, *self.tokens.values()]


def predict_language_model(model: str | Path | LanguageModel, *, prompt: int, generate: int, batch: int = 1,
                           max_length: int | None = None, decode: str | Path | None = None,
                           dims: Mapping[str, int] | None = None, workspace: Workspace | str | Path | None = None,
                           target: str | None = None, strict: bool = False, force: bool = False, no_weights: bool = False,
                           host_pace: float | HostPace | None = None) -> LlmPrediction:
    """Predicts a request to a language model: a folder as onnxruntime-genai's builder writes it, or a decoder's ONNX file.

    Args:
        prompt, generate, batch: tokens of each prompt, tokens generated for it, and number of prompts.
        max_length: tokens of prompt and answer for which the cache is allocated; by default as in genai_config.json.
        decode: the file that runs further tokens, if `model` runs prompts only.
        dims: sizes of dimensions whose role is not known, by name.

    Raises:
        UserError: the model, the predictors, the request or the pace can't be used; the message says why.
    """
    predictor = Predictor(workspace, target, strict=strict, force=force, no_weights=no_weights)
    if not isinstance(model, LanguageModel):
        paths = _path("model", model), None if decode is None else _path("decode", decode)
        model = language_model(*paths, checked_dims(dims), predictor.workspace)
    return predict_requests(predictor, model, [request_for(model, batch, prompt, generate, max_length)], host_pace)[0]


def _path(name: str, given: object) -> Path:
    """The path that an argument names."""
    if not isinstance(given, (str, os.PathLike)):
        raise UserError(f"{name}={shown(given)}: give the path of a folder or of an ONNX file")
    return Path(given)


def predict_requests(predictor: Predictor, model: LanguageModel, requests: Sequence[LlmRequest],
                     host_pace: float | HostPace | None = None) -> list[LlmPrediction]:
    """Predicts requests to a language model, in their order."""
    return [answer for answer, _ in requests_with_runs(predictor, model, requests, host_pace)]


def requests_with_runs(predictor: Predictor, model: LanguageModel, requests: Sequence[LlmRequest],
                       host_pace: float | HostPace | None = None) -> list[tuple[LlmPrediction, RequestRuns]]:
    """Predicts requests, each with the runs that it was made from. Runs that several requests share are predicted once."""
    analysed = AnalysedModel(predictor, model)
    with optimized_once():
        asked = predicted_runs(analysed, requests, host_pace)
        longest: dict[tuple[int, int], int | None] = {}
        answers = []
        for request, (runs, notices) in zip(requests, asked, strict=True):
            key = request.batch, request.generate
            if key not in longest:
                longest[key] = _longest_context(analysed, request)
            answers.append((_prediction(analysed, request, runs, notices, longest[key]), runs))
    return answers


def measure_missing(predictor: Predictor, model: LanguageModel, requests: Iterable[LlmRequest]) -> None:
    """Measures the missing kernels of some requests on this machine, which must be the target.

    They are those of the prompts, and of a token at the start, in the middle and at the end of each generation.
    """
    analysed, sizes = AnalysedModel(predictor, model), dict[Path, list[dict[str, int]]]()
    for request in requests:
        for step in (analysed.prompt_step(request), *(analysed.token_step(request, cached) for cached in request.main_lengths)):
            file = analysed.file(step)
            sizes_of_file = sizes.setdefault(file.path, [])
            if (dims := file.dims(step)) not in sizes_of_file:
                sizes_of_file.append(dims)
    with optimized_once():
        for path, sizes_of_file in sizes.items():
            predictor.measure_missing(path, sizes_of_file).log()


def predicted_runs(analysed: AnalysedModel, requests: Sequence[LlmRequest],
                   host_pace: float | HostPace | None) -> list[tuple[RequestRuns, tuple[str, ...]]]:
    """The runs of each request, including genai's loop, and notices about how they were predicted."""
    prompts = [analysed.prompt_step(request) for request in requests]
    tokens = [{cached: analysed.token_step(request, cached) for cached in request.predicted_lengths} for request in requests]
    steps = list(dict.fromkeys([*prompts, *(step for token_steps in tokens for step in token_steps.values())]))
    shown_steps = progress(steps, "analysing") if is_command() else steps
    records = {step: analysed.record(step) for step in shown_steps}
    further = [step for step in steps if step.before]
    token_mode, notices = _token_mode(analysed, records[further[0]]) if further else (AS_USUAL, ())
    known: dict[DecoderStep, PredictedRun] = {}
    loop_pace: float | None = None  # of the prompts' host; a captured graph does not wait for it, and genai's loop does
    phases: dict[Phase, tuple[list[DecoderStep], RunMode]] = {
        "first": ([step for step in steps if not step.before], AS_USUAL), "token": (further, token_mode)}
    for phase, (phase_steps, run_mode) in phases.items():
        pace = None if run_mode.cuda_graph else host_pace  # a captured graph does not wait for its host
        runs = analysed.predictor.runs([records[step] for step in phase_steps], run_mode=run_mode, host_pace=pace,
                                       composition=analysed.learned.compositions.get(phase))
        in_order = make_monotonic([run.prediction for run in runs])
        loop_pace = next((run.prediction.host_pace for run in runs if run.prediction.host_pace), loop_pace)
        known |= {step: run_of_step(run._replace(prediction=prediction), step, analysed.file(step), analysed.learned, loop_pace)
                  for step, run, prediction in zip(phase_steps, runs, in_order, strict=True)}
    return [(RequestRuns(known[prompt], sure_tokens({cached: known[step] for cached, step in token_steps.items()}, request),
                  known[token_steps[request.middle_length]] if token_steps else None), notices)
            for request, prompt, token_steps in zip(requests, prompts, tokens, strict=True)]


def _token_mode(analysed: AnalysedModel, record: ModelRecord) -> tuple[RunMode, tuple[str, ...]]:
    """How further tokens are run, and a notice if that is not what the model's config asks for."""
    fitted = analysed.predictor.fitted
    if not analysed.model.captures_cuda_graph or fitted.target.flavour.device != "cuda":
        return AS_USUAL, ()
    obstacle = capture_obstacle(record) if fitted.composition.cuda_graph else "no model was measured as a CUDA graph"
    if obstacle is not None:
        return AS_USUAL, (f"the config asks for CUDA graphs, and tokens are predicted without: {obstacle}",)
    return RunMode(cuda_graph=True), ()


def sure_tokens(tokens: dict[int, PredictedRun], request: LlmRequest) -> dict[int, PredictedRun]:
    """The tokens without intermediate ones that rest less on measured kernels than the outline (see --measure-missing)."""
    if not tokens:
        return {}
    least = min(tokens[cached].prediction.time_share["measured"] for cached in request.main_lengths) - LESS_SURE
    return {cached: run for cached, run in tokens.items()
            if cached in request.main_lengths or run.prediction.time_share["measured"] >= least}


def _longest_context(analysed: AnalysedModel, request: LlmRequest) -> int | None:
    """The most tokens of prompt and answer that fit in the target's memory; None if unknown."""
    device_mib, model = _device_mib(analysed.predictor), analysed.model
    if device_mib is None:
        return None

    def left_mib(tokens: int) -> float:
        prompt = tokens - request.generate
        return device_mib - analysed.memory(request._replace(prompt=prompt, max_length=tokens)).peak_mib

    return longest_context(left_mib, min(request.generate + 1, request.max_length), model.context_length or MOST_CONTEXT)


def _device_mib(predictor: Predictor) -> float | None:
    return device_memory_mib(predictor.fitted.target, predictor.fitted.predictors.sidecar.machines)


def _prediction(analysed: AnalysedModel, request: LlmRequest, runs: RequestRuns, notices: Sequence[str],
                longest: int | None) -> LlmPrediction:
    """The answer to a request, from its runs."""
    model, fitted, learned = analysed.model, analysed.predictor.fitted, analysed.learned
    memory, device_mib = analysed.memory(request), _device_mib(analysed.predictor)
    first = _time(runs.prompt.prediction)
    loop_ms = learned.loop_ms(analysed.token_step(request, request.prompt), model.decode, cuda_graph=runs.cuda_graph)
    lengths, times = list(runs.tokens), [_time(run.prediction) for run in runs.tokens.values()]
    ends = [time.ms for time in times], *zip(*(time.interval_ms for time in times), strict=True)
    further = [interpolate_tokens(request, lengths, values) for values in ends] if lengths else []
    sums = [float(values.sum()) for values in further] or [0.0, 0.0, 0.0]
    whole = _spanned(first.ms + sums[0], first.interval_ms[0] + sums[1], first.interval_ms[1] + sums[2])
    at = dict(zip(lengths, times, strict=True))
    energy, energy_warnings = _energy(learned, request, runs)
    warnings = (*model.notices, *notices, *_missing_weights(analysed), *_config_warnings(model, fitted.target),
                *(() if learned.generation else (NO_LOOP,)), *((PADDED,) if request.batch > 1 else ()),
                *_memory_warnings(model, request, memory, device_mib),
                *distinct(warning for run in runs.all for warning in _run_warnings(run.prediction)), *energy_warnings)
    return LlmPrediction(
        model=model.name, target=fitted.target.name, batch=request.batch, prompt=request.prompt, generate=request.generate,
        max_length=request.max_length, shares_cache=model.shares_cache, cuda_graph=runs.cuda_graph,
        ttft=first,
        tpot=_spanned(*(total / len(request.cache_lengths) for total in sums)) if lengths else None,
        tpot_start=at[lengths[0]] if lengths else None, tpot_middle=at[request.middle_length] if lengths else None,
        tpot_end=at[lengths[-1]] if lengths else None,
        tokens=tuple(TokenTime(cached=cached, **time.model_dump()) for cached, time in at.items()), request=whole,
        tokens_per_second=1e3 * request.generate / whole.ms,
        device_tokens_per_second=1e3 * request.batch * request.generate / whole.ms, genai_loop_ms=loop_ms, memory=memory,
        device_memory_mib=device_mib, fits_memory=None if device_mib is None else memory.peak_mib <= device_mib,
        largest_batch=None if device_mib is None else largest_batch(
            memory, request.batch, analysed.runs(request), model.shares_cache, device_mib),
        longest_context=longest, context_length=model.context_length, energy=energy,
        prompt_share=runs.prompt.prediction.time_share,
        token_share=runs.middle.prediction.time_share if runs.middle else None,
        host_pace=runs.prompt.prediction.host_pace, host_pace_source=runs.prompt.prediction.host_pace_source,
        rough_estimate=any(run.prediction.rough_estimate for run in runs.all), warnings=tuple(dict.fromkeys(warnings)))


def _missing_weights(analysed: AnalysedModel) -> tuple[str, ...]:
    """A warning if files of the model's weights are missing. Records, which the runs are predicted from, do not tell."""
    if not analysed.predictor.no_weights:
        return ()
    paths = dict.fromkeys((analysed.model.prefill.path, analysed.model.decode.path))
    return weights_warning([missing for path in paths for missing in missing_weights(path)])


def _config_warnings(model: LanguageModel, target: Target) -> list[str]:
    """Warnings if the config runs the model in another way than the target was measured."""
    warnings, device = [], target.flavour.device
    if model.provider not in (None, device):
        warnings.append(f"the config has it run by the {model.provider} provider, and the target's is {device}: predicted as "
                        f"if the config named {device}; a model that is built for that may have other operators")
    if device == "cpu" and model.threads not in (0, target.threads):
        asked = (f"asks for {model.threads} threads" if model.threads else
                 "does not say how many threads, and onnxruntime-genai takes half as many as the machine has")
        warnings.append(f"the config {asked}; predicted for {target.threads}, as on the target: set "
                        f"session_options.intra_op_num_threads to {target.threads}")
    return warnings


def _time(prediction: Prediction) -> LlmTime:
    return _spanned(prediction.latency_ms, *prediction.interval_ms)


def _spanned(ms: float, low_ms: float, high_ms: float) -> LlmTime:
    return LlmTime(ms=ms, interval_ms=(low_ms, high_ms))


def _run_warnings(prediction: Prediction) -> list[str]:
    """The warnings of a run, except those about memory: it is predicted for the whole request."""
    single = memory_warnings(prediction.memory, prediction.device_memory_mib)
    return [warning for warning in prediction.warnings if warning not in single]


def _memory_warnings(model: LanguageModel, request: LlmRequest, memory: LlmMemory, device_mib: float | None) -> tuple[str, ...]:
    """Warnings about a request's cache and its memory."""
    warnings, needed = [], request.prompt + request.generate
    if model.shares_cache and request.max_length > needed:
        enough_mib = memory.cache_mib * needed / request.max_length
        warnings.append(f"onnxruntime-genai makes the cache for max_length = {request.max_length} tokens, and the request "
                        f"needs {needed}: {cell(memory.cache_mib)} MiB in place of {cell(enough_mib)} MiB; set "
                        "max_length where you generate, and --max-length here")
    if device_mib is not None and memory.peak_mib > device_mib:
        warnings.append(f"it does not fit in the memory: its peak is {memory.peak_mib / 1024:.4g} GiB, and the device has "
                        f"{device_mib / 1024:.4g} GiB; its times are ones that no run has")
    return tuple(warnings)


def _energy(learned: GenerationModels, request: LlmRequest, runs: RequestRuns) -> tuple[LlmEnergy | None, tuple[str, ...]]:
    """The energy of a request, and warnings about it; None if the target has no energy model."""
    if learned.energy is None:
        return None, ("no joules: nothing was learned of this target's energy (docs/energy.md)",)
    limited = bool(learned.generation and learned.generation.power_limit)
    prompt = energy_of(runs.prompt, learned.energy, limited)
    tokens: dict[int, EnergyPrediction] = {
        cached: energy_of(run, learned.energy, limited) for cached, run in runs.tokens.items()}
    totals = [prompt.energy_j, *prompt.interval_j]
    if tokens:
        token_values = ([token.energy_j for token in tokens.values()],
                     *zip(*(token.interval_j for token in tokens.values()), strict=True))
        totals = [total + float(interpolate_tokens(request, list(tokens), values).sum())
                  for total, values in zip(totals, token_values, strict=True)]
    count = request.batch * request.generate
    return LlmEnergy(prompt_j=prompt.energy_j, request_j=totals[0], token_j=totals[0] / count,
                     token_interval_j=(totals[1] / count, totals[2] / count),
                     rough_estimate=any(energy.rough_estimate for energy in (prompt, *tokens.values()))), tuple(
        distinct(warning for energy in (prompt, *tokens.values()) for warning in energy.warnings))
