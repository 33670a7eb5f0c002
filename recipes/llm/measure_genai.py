"""Measures language models with onnxruntime-genai: time to first token, time per token, memory, energy, and what the GPU does.

For each model in `<workspace>/llm/models` and each point in networks.yaml (batch, length of the prompt), it runs some requests
after a warm-up, reads the host's probe between them, then runs single steps under the profiler, and some points long enough
for the energy of a token. Writes a line for each point to `<workspace>/llm/measured/<model>.jsonl`, and its traced steps to
`<model>.steps.jsonl`. With --memory, it writes the memory of single requests to `<model>.memory.jsonl` instead, each in a new
process, since ONNX Runtime gives no memory back. Points that were measured before are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from hase.benchmark.measuring.gpu_trace import in_range, read, record_ranges
from hase.benchmark.measuring.quiet_host import SLOT_S
from hase.benchmark.metrics import gpu_sources as nvml
from hase.benchmark.ort.probes import host_probe, measure_pace
from hase.inference.llm.language_model import GENAI_CONFIG, read_genai_config
from hase.recipes.llm.networks import NETWORKS_FILE, LanguageNetworks, Point, model_folder
from hase.records.generations import REMEDY, Generation, GenerationMemory, StepEnergy, TracedStep, measured_file
from hase.records.traces import GpuRun
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda, machine
from hase.utils.lazy import multiprocessing, onnxruntime
from hase.utils.lazy import onnxruntime_genai as genai
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import turns

EXAMPLES = """
python recipes/llm/measure_genai.py --workspace out/llm
python recipes/llm/measure_genai.py --workspace out/llm --model llama-int4 --at-most-s 120
python recipes/llm/measure_genai.py --workspace out/llm --memory
python recipes/llm/measure_genai.py --workspace out/judged --networks recipes/llm/judged.yaml --point 1x2048 --point 8x512
"""
REQUESTS = 3
WARM_UP_TOKENS = 4
TRACED_STEPS = 3  # the prompt, and two tokens
ENERGY_S = 1.5
ENERGY_TOKENS = 3000  # more than fit into ENERGY_S
POLL_S = 0.005
PACE_S = 0.5
log = get_logger("llm")


class RepeatedRequests:
    """Requests of one size to a loaded model; `cache` is the length of the cache."""

    def __init__(self, model: Any, settings: Mapping[str, Any], batch: int, prompt: int, generate: int) -> None:
        """`settings` are the section `model` of genai_config.json."""
        self._model = model
        window = settings["decoder"].get("sliding_window", {}).get("window_size", 0)
        self.cache = max(prompt + generate, window) + 1  # a cache that is shorter than the window is refused
        self._tokens = np.random.default_rng(0).integers(3, settings["vocab_size"], (batch, prompt)).astype(np.int32)
        self._params = genai.GeneratorParams(model)
        self._params.set_search_options(max_length=self.cache, min_length=self.cache, batch_size=batch, do_sample=False)

    def create(self) -> Any:
        """Creates a generator with its cache."""
        return genai.Generator(self._model, self._params)

    def first(self, generator: Any) -> None:
        """Processes the prompt and makes the first token."""
        generator.append_tokens(self._tokens)
        self.token(generator)

    def token(self, generator: Any) -> None:
        """Makes one more token, and waits for it."""
        generator.generate_next_token()
        generator.get_next_tokens()


def timed_ms(run: Callable[[], Any]) -> tuple[Any, float]:
    """Calls `run`; returns its result and its time in ms."""
    start_s = time.perf_counter()
    result = run()
    return result, round(1e3 * (time.perf_counter() - start_s), 4)


def used_mib() -> float:
    """The memory in use on the first GPU; 0 without one."""
    return nvml.used_memory_mib() if has_cuda() else 0.0


@contextmanager
def poll_peak_mib() -> Iterator[list[float]]:
    """Polls the GPU's memory during the block; yields a list with the peak."""
    peak_mib, over = [used_mib()], threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            peak_mib[0] = max(peak_mib[0], used_mib())

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield peak_mib
    finally:
        over.set()
        thread.join()


def measure_energy(step: Callable[[], None]) -> StepEnergy:
    """Measures the energy of repeated calls of `step`."""
    gpu, steps = nvml.first_gpu(), 0
    step()
    start_j, start_s = nvml.energy_counter_j(gpu), time.monotonic()
    while time.monotonic() - start_s < ENERGY_S:
        step()
        steps += 1
    seconds = time.monotonic() - start_s
    return StepEnergy(steps=steps, seconds=round(seconds, 4), joules=round(nvml.energy_counter_j(gpu) - start_j, 3))


def measure_energies(requests: RepeatedRequests) -> dict[str, StepEnergy]:
    """Measures the energy of prompts with the first token, and of further tokens of one long request."""
    first = measure_energy(lambda: requests.first(requests.create()))
    generator = requests.create()
    requests.first(generator)
    return {"first_energy": first, "token_energy": measure_energy(lambda: requests.token(generator))}


def trace_steps(requests: RepeatedRequests) -> list[GpuRun]:
    """Runs the first steps of a request under the profiler."""
    generator = requests.create()

    def steps() -> None:
        with in_range(0):
            requests.first(generator)
        for number in range(1, TRACED_STEPS):
            with in_range(number):
                requests.token(generator)

    return read(record_ranges(steps, TRACED_STEPS))


def step_record(run: GpuRun, step: int, model: str, batch: int, prompt: int) -> TracedStep:
    """Makes the record of a traced step."""
    names = tuple(dict.fromkeys(work.name for work in run.work))
    index_of = {name: index for index, name in enumerate(names)}

    def since_start(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(round(moment - run.start_us, 2) for moment in times)

    return TracedStep(
        model=model, batch=batch, prompt=prompt, step=step, host_us=round(run.host_us, 2), names=names,
        work=tuple(index_of[work.name] for work in run.work), start_us=since_start([work.start_us for work in run.work]),
        duration_us=tuple(round(work.duration_us, 2) for work in run.work),
        launched_us=since_start([launch.start_us for launch in run.launches]))


def read_probe_us(device: str) -> float:
    """Reads the host's probe; 0 on a CPU, which has none."""
    return round(1e6 * host_probe(device).reading_s(), 2) if device == "cuda" else 0.0


def run_in_slots(run: Callable[[], Any], count: int, slot_s: float,
                 device: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Calls `run` `count` times in slots of `slot_s`, since a virtual host's pace changes.

    Returns the time of each call (ms), and the slower of the probe's readings (µs) before and after its slot.
    """
    times_ms, probes_us, before_us = list[float](), list[float](), read_probe_us(device)
    while len(times_ms) < count:
        slot = [timed_ms(run)[1] for _ in turns(1, slot_s, count - len(times_ms))]
        after_us = read_probe_us(device)
        times_ms += slot
        probes_us += [max(before_us, after_us)] * len(slot)
        before_us = after_us
    return tuple(times_ms), tuple(probes_us) if device == "cuda" else ()


def measure(requests: RepeatedRequests, generate: int, idle_mib: float, device: str) -> dict[str, Any]:
    """Measures the fields of a `Generation` that every point has."""
    create_ms, generators = list[float](), list[Any]()

    def first() -> None:
        requests.first(generators[-1])

    def renew_generator() -> None:
        generators.clear()  # the former one gives its cache back first
        generator, time_ms = timed_ms(requests.create)
        generators.append(generator)
        create_ms.append(time_ms)

    with poll_peak_mib() as peak_mib:
        renew_generator()
        first()
        run_in_slots(partial(requests.token, generators[-1]), min(WARM_UP_TOKENS, generate), SLOT_S, device)
        create_ms.clear()  # the warm-up does not count
        firsts = []
        for _ in range(REQUESTS):
            renew_generator()
            firsts.append(run_in_slots(first, 1, 0.0, device))
        token_ms, token_probe_us = run_in_slots(partial(requests.token, generators[-1]), generate, SLOT_S, device)
    return {"create_ms": tuple(create_ms), "first_ms": tuple(times[0] for times, _ in firsts), "token_ms": (token_ms,),
            "first_probe_us": tuple(probes[0] for _, probes in firsts if probes),
            "token_probe_us": (token_probe_us,) if token_probe_us else (), "peak_mib": round(peak_mib[0] - idle_mib, 1)}


def load_model(path: Path, device: str) -> tuple[Any, dict[str, Any]]:
    """Loads a model, and the section `model` of its genai_config.json."""
    if device == "cuda":
        onnxruntime.preload_dlls()  # genai uses the libraries that this loads
    return genai.Model(str(path)), files.read_json(path / GENAI_CONFIG)["model"]


def request_memory(path: Path, point: Point, generate: int, device: str) -> dict[str, Any]:
    """Measures the fields of a `GenerationMemory`. The process must not have run anything before."""
    before_mib = used_mib()
    host_probe(device)
    context_mib = used_mib() - before_mib
    model, settings = load_model(path, device)
    weights_mib = used_mib() - before_mib - context_mib
    requests = RepeatedRequests(model, settings, *point, generate)
    with poll_peak_mib() as peak_mib:
        generator = requests.create()
        requests.first(generator)
        for _ in range(generate):
            requests.token(generator)
    return {"cache": requests.cache, "context_mib": round(context_mib, 1), "weights_mib": round(weights_mib, 1),
            "peak_mib": round(peak_mib[0] - before_mib - context_mib, 1)}


def measure_memory(path: Path, points: Iterable[Point], generate: int, device: str, out: Path) -> None:
    """Measures the memory of points of one model, one after the other, each in its own process."""
    for batch, prompt in points:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                measured = pool.submit(request_memory, path, (batch, prompt), generate, device).result()
            except (RuntimeError, MemoryError) as error:  # genai's errors, or the process died
                measured = {"failed": failure_text(error), "cache": 0}
        files.append_records(out, [GenerationMemory(model=path.name, batch=batch, prompt=prompt, generated=generate,
                                                    machine=machine(device), taken=datetime.now(UTC), **measured)])
        outcome = measured.get("failed") or f"peak {measured['peak_mib']:.0f} MiB"
        print(f"{path.name}\t{batch}\t{prompt}\t{outcome}", flush=True)


def failure_text(error: BaseException) -> str:
    """The start of an error's message."""
    return str(error)[:500] or type(error).__name__


def measure_times(path: Path, points: Iterable[Point], generate: int, device: str, out: Path,
                  energy_points: Sequence[Point] = ()) -> None:
    """Measures points of one model, one after the other, in this process, and the energy of `energy_points`."""
    family, _, precision = path.name.rpartition("-")
    pace = [measure_pace(device, PACE_S).probe_us] if device == "cuda" else []
    idle_mib = used_mib()
    (model, settings), loaded_ms = timed_ms(lambda: load_model(path, device))
    weights_mib = used_mib() - idle_mib
    log.info("%s: loaded in %.1f s", path.name, loaded_ms / 1e3)
    for batch, prompt in points:
        requests, steps = RepeatedRequests(model, settings, batch, prompt, generate), list[TracedStep]()
        try:
            measured = measure(requests, generate, idle_mib, device)
            if device == "cuda" and (batch, prompt) in energy_points:
                measured |= measure_energies(RepeatedRequests(model, settings, batch, prompt, ENERGY_TOKENS))
            if device == "cuda":
                steps = [step_record(run, number, path.name, batch, prompt) for number, run in enumerate(trace_steps(requests))]
        except (RuntimeError, MemoryError) as error:  # genai's errors, such as too little memory
            measured = {"failed": failure_text(error)}
        if device == "cuda":
            pace.append(measure_pace(device, PACE_S).probe_us)
        files.append_records(out, [Generation(
            model=path.name, family=family, precision=precision, batch=batch, prompt=prompt, generated=generate,
            cache=requests.cache, captured=read_genai_config(path).captures_cuda_graph, weights_mib=round(weights_mib, 1),
            probe_us=tuple(pace[-2:]), machine=machine(device), taken=datetime.now(UTC), **measured)])
        if steps:
            files.append_records(out.with_name(f"{path.name}.steps.jsonl"), steps)
        if "failed" in measured:
            log.error("%s: batch %d, prompt %d: %s", path.name, batch, prompt, measured["failed"])
        else:
            print(f"{path.name}\t{batch}\t{prompt}\tfirst {np.median(measured['first_ms']):.2f} ms\t"
                  f"token {np.median(measured['token_ms']):.3f} ms\tpeak {measured['peak_mib']:.0f} MiB", flush=True)


def points_to_measure(workspace: Workspace, names: Sequence[str], wanted: Sequence[Point],
                      memory: bool) -> dict[Path, list[Point]]:
    """The wanted points of each model that were not measured yet, by its folder."""
    folder = model_folder(workspace, "", "").parent
    models = sorted(path for path in folder.glob("*-*")
                    if (path / GENAI_CONFIG).is_file() and (not names or path.name in names))
    if not models:
        raise UserError(f"{folder}: no models; build some: python recipes/llm/make_models.py")
    schema = GenerationMemory if memory else Generation
    to_measure = {}
    for path in models:
        records: list[Any] = files.read_records(measured_file(workspace, path.name, memory), schema, REMEDY)
        measured = {(record.batch, record.prompt) for record in records}
        to_measure[path] = [point for point in wanted if point not in measured]
    return to_measure


def parse_point(text: str) -> Point:
    """Parses a point such as `8x512`."""
    batch, by, prompt = text.partition("x")
    if not by:
        raise argparse.ArgumentTypeError(f"'{text}': give a batch and the length of the prompt, such as 8x512")
    return cli.count(batch), cli.count(prompt)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--networks", type=Path, default=NETWORKS_FILE, metavar="FILE", help="default: networks.yaml")
    parser.add_argument("--model", action="append", default=[], metavar="NAME",
                        help="the name of one folder (repeatable; default: all)")
    parser.add_argument("--memory", action="store_true", help="measure memory, not times")
    parser.add_argument("--point", type=parse_point, action="append", metavar="BATCHxPROMPT",
                        help="measure this point (repeatable; default: all in the file of networks)")
    parser.add_argument("--no-energy", dest="energy", action="store_false",
                        help="measure no energy, which takes six seconds at each point")
    parser.add_argument("--at-most-s", type=cli.positive, default=float("inf"), metavar="S",
                        help="start no point after this time (default: measure all)")
    args = parser.parse_args()
    workspace, networks = cli.start(args), read_config(args.networks, LanguageNetworks)
    device, end_s, started = "cuda" if has_cuda() else "cpu", time.monotonic() + args.at_most_s, 0
    wanted = args.point or (networks.memory_points if args.memory else networks.points)
    to_measure = points_to_measure(workspace, args.model, wanted, args.memory)

    def in_time(points: Iterable[Point]) -> Iterator[Point]:
        nonlocal started
        for point in points:
            if time.monotonic() > end_s:
                return
            started += 1
            yield point

    for path, points in to_measure.items():
        if points and time.monotonic() < end_s:
            out = measured_file(workspace, path.name, args.memory)
            out.parent.mkdir(parents=True, exist_ok=True)
            run = measure_memory if args.memory else partial(
                measure_times, energy_points=networks.energy_points if args.energy else ())
            run(path, in_time(points), networks.generate, device, out)
    if left := sum(map(len, to_measure.values())) - started:
        log.warning("%d points were not measured for lack of time; the same command measures them", left)
    return 0


if __name__ == "__main__":
    cli.run(main)
