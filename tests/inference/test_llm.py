"""Requests to language models: dimensions by role, the runs of a request and what is between them, memory, answers."""

from __future__ import annotations

import csv
import functools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest
from command import printed, run_script
from conftest import Once
from decoder_models import TINY, genai_folder, plain_decoder
from forgotten_types import forget
from test_merged_decoders import merged_decoder

from hase.inference.library.predictor import Predictor
from hase.inference.llm.answers import LlmPrediction
from hase.inference.llm.language_model import DecoderStep, decoder_file, language_model
from hase.inference.llm.memory import longest_context
from hase.inference.llm.predicting import NO_LOOP, AnalysedModel, predict_language_model
from hase.inference.llm.requests import LlmRequest, interpolate_tokens, request_for
from hase.inference.memory.buffers import Arena
from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.llm import GenerationLoop, LearnedGeneration, PowerLimit
from hase.records.generations import Phase
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace

SCRIPT, TARGET, MIB = "inference/predict_llm.py", "nvidia-h200", 2**20


@pytest.fixture(scope="module")
def folders(once: Once) -> Path:
    """Model folders `half`, `int4` and `graph` as onnxruntime-genai's builder writes them, `doubtful` of which an operator was
    never measured, `plain` and a `pair`."""
    def make(folder: Path) -> None:
        genai_folder(folder / "half")
        genai_folder(folder / "int4", precision="int4")
        genai_folder(folder / "graph", cuda_graph=True)
        path = genai_folder(folder / "doubtful") / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            if node.op_type == "Sigmoid":
                node.op_type = "LpNormalization"
        path.write_bytes(model.SerializeToString())
        forget(Workspace(folder), "nvidia-h200-cuda-ort1.31-all", "LpNormalization")
        (folder / "plain").mkdir()
        onnx.save(plain_decoder(), folder / "plain" / "model.onnx")
        (folder / "pair").mkdir()
        onnx.save(plain_decoder(), folder / "pair" / "decode.onnx")
        onnx.save(plain_decoder(cached=False), folder / "pair" / "prefill.onnx")

    return once("language_models", make)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(target=TARGET)


def saved(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    onnx.save(model, folder / name)
    return folder / name


@pytest.mark.slow
def test_without_sharing_the_past_is_what_was_computed(tmp_path: Path) -> None:
    # The CPU provider has no MatMul of bfloat16, so ONNX Runtime opens no session of such a model there
    assert language_model(genai_folder(tmp_path, precision="bf16")).prefill.fixed == {"kv_cache_dim": 16}
    model = language_model(genai_folder(tmp_path, past_present_share_buffer=False, num_beams=2))
    assert model.step(3, 100, 0, 512) == DecoderStep(6, 100, 0, 0, 100)
    assert model.step(3, 1, 130, 512) == DecoderStep(6, 1, 130, 130, 131)
    beams = language_model(genai_folder(tmp_path, num_beams=2))
    assert (beams.shares_cache, "2 beams" in beams.notices[0]) == (False, True)


def test_names_of_dimensions_and_caches_do_not_matter(tmp_path: Path) -> None:
    """An exporter may call them anything, even by a formula. A merged decoder's branch is a dimension, too."""
    names = {"batch": "b", "sequence": "N", "past": "P", "total": "P + N"}
    path = saved(tmp_path, plain_decoder(past="cache_{1}_{0}", present="new_cache_{1}_{0}", name_of=names.__getitem__))
    part = decoder_file(path)
    assert part.caches == ("cache_key_0", "cache_value_0", "cache_key_1", "cache_value_1")
    assert set(part.presents) == {f"new_{name}" for name in part.caches}
    assert (part.dims(DecoderStep(2, 1, 40, 40, 41)), part.vocabulary_size) == ({"b": 2, "N": 1, "P": 40}, TINY.words)
    merged = decoder_file(saved(tmp_path, merged_decoder()))
    assert merged.dims(DecoderStep(2, 1, 8, 8, 9)) == {"batch": 2, "sequence": 1, "past_sequence": 8, "then": 1}


def test_a_pair_of_files(folders: Path) -> None:
    """In a folder, or both named: the one without a cache runs the prompt."""
    pair = folders / "pair"
    for model in (language_model(pair), language_model(pair / "prefill.onnx", pair / "decode.onnx")):
        assert (model.prefill.path.name, model.decode.path.name) == ("prefill.onnx", "decode.onnx")
    assert model.prefill.dims(model.step(2, 9, 0, 12)) == {"batch": 2, "sequence": 9}


def test_sizes_that_do_not_fit_or_are_not_known(tmp_path: Path) -> None:
    fixed, odd = plain_decoder(), plain_decoder()
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    part = decoder_file(saved(tmp_path, fixed))
    assert part.dims(DecoderStep(1, 1, 5, 5, 6)) == {"sequence": 1, "past": 5}
    with pytest.raises(UserError, match=r"made for 1 sequences .*not for 2"):
        part.dims(DecoderStep(2, 1, 5, 5, 6))
    path = saved(tmp_path, plain_decoder(name_of=lambda role: "length" if role in ("sequence", "past") else role))
    with pytest.raises(UserError, match=r"dimension length would have to be 1 .new tokens. and 40 .tokens in the cache."):
        decoder_file(path).dims(DecoderStep(2, 1, 40, 40, 41))
    odd.graph.input.append(onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["batch", "pixels"]))
    path = saved(tmp_path, odd)
    with pytest.raises(UserError, match=r"dimension pixels \(image, axis 1\) is; give its size: --dim pixels=SIZE"):
        decoder_file(path)
    assert decoder_file(path, given={"pixels": 64}).dims(DecoderStep(2, 1, 4, 4, 5))["pixels"] == 64
    with pytest.raises(UserError, match="no dynamic dimension pixel among its inputs"):
        language_model(path, dims={"pixels": 64, "pixel": 64})


def test_models_that_are_refused(tmp_path: Path, folders: Path) -> None:
    def refused(message: str, path: Path, decode: Path | None = None) -> None:
        with pytest.raises(UserError, match=message):
            language_model(path, decode)

    refused("no such model", tmp_path / "none")
    refused(r"neither genai_config.json nor an .onnx file", tmp_path)
    saved(tmp_path, plain_decoder(cached=False))
    refused("no cache of keys and values", tmp_path)
    a, b = (saved(tmp_path, plain_decoder(), name) for name in ("a.onnx", "b.onnx"))
    refused(r"several models .a.onnx, b.onnx, model.onnx.", tmp_path)
    refused("both take a cache", a, b)
    refused(r"its genai_config.json names its files", folders / "half", a)
    proto = plain_decoder()
    proto.graph.input.append(onnx.helper.make_tensor_value_info("block_table", onnx.TensorProto.INT32, ["batch", "blocks"]))
    refused(r"keeps its cache in pages .block_table., for continuous batching", saved(tmp_path, proto, "pages.onnx"))


@pytest.mark.parametrize(("config", "message"), [
    ("[1]", "not a config of onnxruntime-genai"), ("{", "not valid JSON"),
    ('{"model": {"decoder": {"pipeline": [{}]}}}', "the decoder is in several parts"),
    ('{"model": {"decoder": {"filename": "none.onnx"}}}', "no such file"),
    ('{"model": {"decoder": {"filename": "x", "inputs": []}}}', "model.decoder.inputs")])
def test_damaged_configs(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        language_model(tmp_path)


def test_lengths_and_what_is_between() -> None:
    """Start, middle, end and the powers of two between; the runs after the prompt's are one fewer than the tokens."""
    request = LlmRequest(1, 100, 1000, 2048)
    assert (request.cache_lengths[0], request.cache_lengths[-1], len(request.cache_lengths)) == (100, 1098, 999)
    assert request.predicted_lengths == [100, 128, 256, 512, 599, 1024, 1098]
    assert [LlmRequest(1, 128, count, 2048).predicted_lengths for count in (1, 2, 3)] == [[], [128], [128, 129]]
    values = interpolate_tokens(request, [100, 599, 1098], [1.0, 2.0, 4.0])
    assert (values[0], values[499], values[-1]) == (1.0, 2.0, 4.0)
    assert values.sum() == pytest.approx(1.5 * 499 + 3.0 * 499 + 0.5 * (1.0 + 4.0))  # trapezes


def test_requests_that_the_model_does_not_allow(folders: Path) -> None:
    model = language_model(folders / "half")
    assert request_for(model, 2, 100, 60) == LlmRequest(2, 100, 60, 2048)
    assert request_for(model, 2, 100, 60, 160) == LlmRequest(2, 100, 60, 160)
    assert request_for(language_model(folders / "plain"), 1, 100, 60).max_length == 160
    for numbers, message in (((1, 2000, 60), r"2060 tokens \(2000 \+ 60\) are more than its context, 2048"),
                             ((1, 100, 60, 159), "160 tokens .* are more than max_length, 159"),
                             ((1, 100, 60, 4096), "a max_length of 4096 tokens is more than its context"),
                             ((0, 100, 60), "batch=0: a whole number, 1 or more"), ((1, 100, 1.5), "generate=1.5")):
        with pytest.raises(UserError, match=message):
            request_for(model, *numbers)


@functools.cache
def answer_of(folder: Path, batch: int = 1, max_length: int | None = None, generate: int = 60) -> LlmPrediction:
    """The answer to a request on the H200; each is asked once."""
    return predict_language_model(folder, prompt=100, generate=generate, batch=batch, max_length=max_length, target=TARGET)


@pytest.mark.slow
def test_a_request_is_the_sum_of_its_runs(folders: Path) -> None:
    answer, request = answer_of(folders / "half", 2), LlmRequest(2, 100, 60, 2048)
    assert answer.tpot
    lengths = [token.cached for token in answer.tokens]
    assert lengths == [100, 128, 129, 158]
    for end in (lambda time: time.ms, lambda time: time.interval_ms[0], lambda time: time.interval_ms[1]):
        further = interpolate_tokens(request, lengths, [end(token) for token in answer.tokens]).sum()
        assert (end(answer.request), end(answer.tpot)) == pytest.approx((end(answer.ttft) + further, further / 59))
    assert [time and time.ms for time in (answer.tpot_start, answer.tpot_middle, answer.tpot_end)] == [
        answer.tokens[place].ms for place in (0, 2, 3)]
    assert answer.tokens_per_second == pytest.approx(60 / (answer.request.ms / 1e3))
    assert answer.device_tokens_per_second == pytest.approx(2 * answer.tokens_per_second)
    assert answer.energy
    assert answer.energy.token_j == pytest.approx(answer.energy.request_j / 120)
    assert answer.energy.token_interval_j[0] < answer.energy.token_j < answer.energy.token_interval_j[1]


@pytest.mark.slow
def test_runs_are_those_of_the_plain_predictor(folders: Path, predictor: Predictor) -> None:
    """With the dispatch of language models, and what genai's loop takes beside them."""
    answer, path = answer_of(folders / "int4"), folders / "int4" / "model.onnx"
    analysed, request = AnalysedModel(predictor, language_model(folders / "int4")), LlmRequest(1, 100, 60, 2048)
    learned, file = analysed.learned, analysed.model.decode
    past = {"batch_size": 1, "kv_cache_dim": 16, "past_sequence_length": 2048}
    steps: tuple[tuple[Phase, int, int], ...] = (("first", 100, 100), ("token", 1, 101))
    prompt, token = (predictor.run(path, composition=learned.compositions[step], dims={
        **past, "sequence_length": count, "total_sequence_length": total}) for step, count, total in steps)
    first_ms, loop_ms = (learned.loop_ms(step, file) or math.nan
                         for step in (analysed.prompt_step(request), analysed.token_step(request, 100)))
    assert answer.ttft.ms == pytest.approx(prompt.prediction.latency_ms + first_ms)
    assert answer.ttft.interval_ms[0] < prompt.prediction.interval_ms[0] + first_ms  # the loop on a faster host
    assert answer.prompt_share == prompt.prediction.time_share
    assert answer.tokens[0].ms == pytest.approx(token.prediction.latency_ms + loop_ms)
    assert answer.energy
    assert answer.energy.prompt_j > predictor.energy(prompt).idle_j
    # What a known pace leaves unknown counts once: the interval was fitted to language models' runs at many paces
    composition = AnalysedModel(predictor, language_model(folders / "half")).learned.compositions["token"]
    paced = predictor.run(folders / "half" / "model.onnx", composition=composition, host_pace=2.0, dims={
        **past, "sequence_length": 1, "total_sequence_length": 101})
    assert composition.calibrated
    ends = composition.calibrated.ends(paced.run.batch.latencies.sources[0])
    assert paced.prediction.interval_ms == pytest.approx([end * paced.alone_ms for end in ends], rel=0.01)


@pytest.mark.slow
def test_one_token_is_the_prompts_run_alone(folders: Path) -> None:
    answer = answer_of(folders / "half", generate=1)
    assert (answer.tpot, answer.tokens, answer.token_share, answer.request) == (None, (), None, answer.ttft)
    assert not answer.judged(None, 1.0).objectives
    low_ms, high_ms = answer.ttft.interval_ms
    chances = [answer.judged(limit_ms, None).objectives[0].chance for limit_ms in (low_ms, answer.ttft.ms, high_ms)]
    assert chances == pytest.approx([0.05, 0.5, 0.95])


@pytest.mark.slow
def test_a_shared_cache_is_as_long_as_max_length(folders: Path, predictor: Predictor) -> None:
    """However short the request. The logits of the prompts are among the activations. One that is not shared is held twice."""
    analysed = AnalysedModel(predictor, language_model(folders / "half"))
    for tokens in (160, 1280, 2048):
        memory = analysed.memory(LlmRequest(2, 100, 60, tokens))
        assert memory.cache_mib == 2 * 2 * TINY.layers * TINY.key_heads * TINY.head * tokens * 2 / MIB
        assert memory.activations_mib >= 2 * 100 * TINY.words * 2 / MIB
        parts = memory.model_dump()
        assert parts.pop("peak_mib") == pytest.approx(sum(parts.values()))
    said = [warning for warning in answer_of(folders / "half", 2).warnings if "allocates the cache for max_length" in warning]
    assert "2048 tokens, but the request needs 160: 1 MiB instead of 0.07812 MiB" in said[0]
    assert not any("makes the cache" in warning for warning in answer_of(folders / "half", 1, 160).warnings)
    one, pair = (AnalysedModel(predictor, language_model(folders / name)).memory(LlmRequest(2, 100, 60, 160))
                 for name in ("plain", "pair"))
    assert one.cache_mib == pair.cache_mib == pytest.approx(2 * 2 * TINY.layers * TINY.hidden * 4 / MIB * (158 + 159))
    assert pair.weights_mib == pytest.approx(2 * one.weights_mib, rel=0.01)  # a session each


@pytest.mark.parametrize(("sizes_mib", "regions_mib"), [
    ([1, 1, 1, 1, 1], 1 + 2 + 4),  # they double
    ([3, 1, 1], 4 + 4),  # doubled until the first fits; 1 MiB of it is left
    ([1023, 1024, 1], 1024 + 1024 + 1024),  # up to 1 GiB
    ([3000, 1, 1100, 1024], 4096 + 4096)])  # the first region's rest has room for the last, and the second is as large as it
def test_an_arenas_regions(sizes_mib: list[int], regions_mib: int) -> None:
    arena = Arena()
    for size in sizes_mib:
        arena.allocate(size * MIB)
    assert arena.reserved_bytes == regions_mib * MIB


@pytest.mark.parametrize("grows_mib", [lambda n: 3.0 * n, lambda n: 0.001 * n * n, lambda n: 3.0 * (n // 64 * 64)])
def test_the_longest_context_is_found_soon(grows_mib: Callable[[int], float]) -> None:
    left_mib = mock.Mock(side_effect=lambda tokens: 9000.0 - grows_mib(tokens))
    longest = longest_context(left_mib, 10, 2**20)
    assert left_mib.call_count <= 14
    assert left_mib(longest) >= 0 > left_mib(int(1.01 * longest) + 64)
    assert longest_context(left_mib, 10, 500) == 500
    assert longest_context(lambda tokens: -1.0, 10, 500) == 0


@pytest.mark.slow
def test_the_largest_batch_and_context_of_an_answer(folders: Path, predictor: Predictor) -> None:
    """Their memory fits, and that of one sequence more does not: which is said once, of the request as a whole. The warnings of
    single runs, which count the cache otherwise, are left out."""
    answer, analysed = answer_of(folders / "plain", 2), AnalysedModel(predictor, language_model(folders / "plain"))
    most, longest, room_mib = answer.largest_batch or 0, answer.longest_context or 0, answer.device_memory_mib or 0.0
    request = LlmRequest(2, 100, 60, 160)
    fits, too_large = (analysed.memory(request._replace(batch=most + more)).peak_mib for more in (0, 1))
    assert fits <= room_mib < too_large
    peak_mib = analysed.memory(request._replace(prompt=longest - 60, max_length=longest)).peak_mib
    assert 0.9 * room_mib < peak_mib <= room_mib
    more = answer_of(folders / "plain", most + 1)
    assert (answer.fits_memory, more.fits_memory, more.largest_batch) == (True, False, most)
    (said,) = (warning for warning in more.warnings if "memory" in warning)
    assert "it does not fit in the memory: its peak is" in said


@pytest.mark.slow
def test_what_genais_loop_takes_is_added_once_it_is_known(tmp_path: Path, folders: Path) -> None:
    """`generation.json` beside what else was learned: the loop's time is added to each step, at the host's pace, and more to
    the first. Here nothing was learned of the target's energy."""
    shipped = next(SHIPPED.glob(f"{TARGET}*"))
    copied = shutil.copytree(shipped, Workspace(tmp_path).predictors(shipped.name),
                             ignore=shutil.ignore_patterns("energy.json", "generation.json", "generation_energy.json"))

    def asked(pace: float) -> LlmPrediction:
        return predict_language_model(folders / "half", batch=2, workspace=tmp_path, prompt=100, generate=60, target=TARGET,
                                      host_pace=pace)

    before, slow_before = asked(1.0), asked(1.5)
    costs = read_composition(copied).costs
    assert costs
    files.write_json(target_files.GENERATION.path(copied), LearnedGeneration(
        target=copied.name, genai_version="0.18.0", predictors_created="", product_ms=costs.product_ms, attention_ms=0.0,
        loop=GenerationLoop(step_ms=0.5, sequence_ms=0.01, first_ms=0.3, first_layer_ms=0.05, first_sequence_ms=0.02,
                            million_logits_ms=2.0)))
    answer, slow = asked(1.0), asked(1.5)
    on_host, logits_ms, first = 0.5 + 2 * 0.01, 2 * 2.0 * 512 / 1e6, 0.3 + TINY.layers * 0.05 + 2 * 0.02
    assert [(NO_LOOP in one.warnings, one.genai_loop_ms) for one in (before, answer)] == [
        (True, None), (False, pytest.approx(on_host + logits_ms))]
    assert (answer.ttft.ms, slow.ttft.ms, answer.request.ms) == pytest.approx((
        before.ttft.ms + on_host + first + logits_ms, slow_before.ttft.ms + 1.5 * (on_host + first) + logits_ms,
        before.request.ms + first + 60 * (on_host + logits_ms)))
    assert (answer.energy, any("no joules" in warning for warning in answer.warnings)) == (None, True)


def test_a_device_at_its_power_limit_lowers_its_clocks_after_a_while() -> None:
    limit = PowerLimit(hold_ms=30.0, limit_w=700.0, exponent=2.0)
    assert limit.sustained_ms(20.0, 1400.0) == 20.0
    assert limit.sustained_ms(100.0, 700.0) == 100.0
    assert limit.sustained_ms(100.0, 770.0) == pytest.approx(30.0 + 70.0 * 1.21)


@pytest.mark.slow
def test_a_config_that_asks_for_cuda_graphs(folders: Path) -> None:
    """Further tokens are a CUDA graph with a mask of max_length; the prompt's run is not."""
    node_by_node, graph = answer_of(folders / "half"), answer_of(folders / "graph")
    assert (node_by_node.cuda_graph, graph.cuda_graph, graph.ttft) == (False, True, node_by_node.ttft)
    assert graph.tokens[0].ms < node_by_node.tokens[0].ms
    model = language_model(folders / "graph")
    assert (model.step(1, 1, 100, 2048).mask_length, model.step(1, 100, 0, 2048).mask_length) == (2048, 100)


@pytest.mark.slow
def test_weights_may_be_missing(tmp_path: Path) -> None:
    """With --no-weights, and the answer says so once; it also says that the config names another provider."""
    folder = genai_folder(tmp_path, provider="cpu")
    whole = answer_of(folder, generate=1)
    assert any("the config names the cpu provider" in warning for warning in whole.warnings)
    (folder / "model.onnx.data").unlink()
    without = predict_language_model(folder, prompt=100, generate=1, target=TARGET, no_weights=True)
    assert (without.ttft, without.memory) == (whole.ttft, whole.memory)
    assert sum("its weights were not read (--no-weights)" in warning for warning in without.warnings) == 1
    with pytest.raises(UserError, match=r"model.onnx.data"):
        predict_language_model(folder, prompt=100, generate=2, target=TARGET)


@pytest.mark.slow
def test_the_command(folders: Path, tmp_path: Path) -> None:
    """JSON, a table, a plot, objectives and exit statuses."""
    words, table, plot = ["--target", TARGET, "--generate", "20"], tmp_path / "sweep.csv", tmp_path / "sweep.png"
    said = printed(SCRIPT, "--model", folders / "half", *words, "--sweep", "--batch", "1,2", "--csv", table, "--plot", plot)
    assert len(said.splitlines()) == 1 + 2 * 2  # 2048 and 8192 are more than the context
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [(row["batch"], row["prompt"]) for row in rows] == [("1", "128"), ("1", "512"), ("2", "128"), ("2", "512")]
    assert plot.read_bytes().startswith(b"\x89PNG")
    words += ["--prompt", "50"]
    done = run_script(SCRIPT, "--model", folders / "half", *words, "--json", "--ttft-ms", "1e4", "--tpot-ms", "1e-6")
    assert (done.returncode, {one["objective"]: one["met"] for one in json.loads(done.stdout)[0]["objectives"]}) == (
        4, {"ttft": True, "tpot": False})
    done = run_script(SCRIPT, "--model", folders / "doubtful", "--workspace", folders, *words, "--tpot-ms", "1e4",
                      "--fail-on-rough")
    assert (done.returncode, "meets 10000 ms by" in done.stdout, "largest batch" in done.stdout) == (3, True, True)


@pytest.mark.parametrize(("options", "status", "message"), [
    (["--prompt", "0"], 2, "--prompt: '0' is not a whole number, 1 or more"),
    (["--generate", "1", "--tpot-ms", "3"], 2, "--tpot-ms: a request for one token has no further tokens"),
    (["--plot", "x.txt"], 2, "x.txt: a .png, .svg or .pdf"),
    (["--measure-missing", "--strict"], 2, "--measure-missing: with --strict, measured times are not used"),
    (["--dim", "batch_size=2,3"], 1, "this command takes one size, not 2"),
    (["--measure-missing"], 1, "can only be measured on such a machine")])
def test_wrong_options(options: list[str], status: int, message: str, folders: Path) -> None:
    done = run_script(SCRIPT, "--model", folders / "half", "--target", TARGET, *options)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize(("wrong", "message"), [
    ({"model": None}, "model=None: give the path"), ({"decode": 3}, "decode=3: give the path"),
    ({"dims": {"x": "y"}}, "dims: x='y'"), ({"batch": 0}, "batch=0: a whole number"), ({"host_pace": 100.0}, "host pace 100")])
def test_wrong_arguments(wrong: dict[str, Any], message: str, folders: Path) -> None:
    with pytest.raises(UserError, match=message):
        predict_language_model(**{"model": folders / "half", "prompt": 8, "generate": 1, "target": TARGET, **wrong})


@pytest.mark.slow
@pytest.mark.measuring
@pytest.mark.usefixtures("canary")
def test_kernels_are_measured_at_three_lengths(tmp_path: Path) -> None:
    """On this machine; between the lengths, times are interpolated."""
    folder, here = genai_folder(tmp_path / "model", replace(TINY, layers=1), "int4-fp32", "cpu"), local_target("cpu").name
    printed(SCRIPT, "--workspace", tmp_path, "--model", folder, "--target", here, "--prompt", "200", "--generate", "60",
            "--measure-missing")
    answer = predict_language_model(folder, prompt=200, generate=60, workspace=tmp_path, target=here)
    assert answer.token_share
    assert min(answer.prompt_share["measured"], answer.token_share["measured"]) > 0.98
    assert [token.cached for token in answer.tokens] == [200, 229, 258]  # 256, which is less sure, is left out
    assert answer.tpot
    # Two hundred tokens take about six times as long as one here; twenty may not, on a machine that others disturb.
    assert 0.0 < answer.tpot.ms < answer.ttft.ms
    assert answer.energy is None
    assert any("does not set the number of threads" in warning for warning in answer.warnings)
