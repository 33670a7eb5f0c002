"""The live load from a real Prometheus: known means, and a message for each way in which it can be missing."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import run_script
from prometheus_stand import (
    EVER_S,
    PASSWORD,
    PASSWORD_BCRYPT,
    READINGS,
    SCRAPE_S,
    USER,
    Exporter,
    MadeUpExporter,
    Page,
    Recorder,
    certificates,
    device_labels,
    prometheus,
    prometheus_or_skip,
    recorded,
    value,
    wait_for,
)
from trained_workspace import METRIC

from hase.benchmark.metrics.names import FIELDS, PART_LABEL, PROFILE_LABEL
from hase.benchmark.metrics.source import MANY, values
from hase.inference.live.load import InferenceConfig, current_load
from hase.inference.live.prometheus import PrometheusConfig, PrometheusError, PrometheusServer
from hase.inference.live.prometheus_readings import PrometheusSource
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

UTIL, POWER, CLOCK = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK"
SM, ENGINE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
TWELVE = tuple(FIELDS)[:12]
KNOWN = {name: FIELDS[name].maximum * (1 + place) / 20 for place, name in enumerate(TWELVE)}
TOKEN = "t0ken.of-a_user"


@pytest.fixture(scope="module", autouse=True)
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="module")
def exporters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Exporter]]:
    """The exporter, once for each of several devices."""
    folder = tmp_path_factory.mktemp("replays")

    def device(name: str, *readings: dict[str, float], host: str = "node7", uuid: str = "", index: str = "0",
               new_names: bool = False) -> Exporter:
        replay = recorded(folder / f"{name}.jsonl", readings if len(readings) > 1 else readings * READINGS)
        return Exporter(replay, device_labels(uuid or f"GPU-{name}", index, host), new_names)

    made = {
        "live": device("live", KNOWN), "busy": device("busy", {UTIL: 50.0}, host="node8"),
        "rising": device("rising", *({UTIL: 100.0 * i / READINGS} for i in range(READINGS)), host="node9"),
        "renamed": device("renamed", {UTIL: 40.0, CLOCK: 1980.0, POWER: 312.5, SM: 0.25}, new_names=True),
        "shared": device("shared", {UTIL: 10.0}), "killed": device("killed", {UTIL: 60.0}),
        "moved": device("moved", {UTIL: 30.0}), "moved_from": device("from", {UTIL: 60.0}, uuid="GPU-moved"),
        "cpu": device("cpu", {METRIC: 0.375}, uuid="node7", index=""),
    }
    yield made
    for exporter in made.values():
        exporter.close()


@pytest.fixture(scope="module")
def made_up() -> Iterator[MadeUpExporter]:
    def page(name: str, values: dict[str, float | str], **how: Any) -> Page:
        return Page(device_labels(f"GPU-{name}"), values, **how)

    def part(name: str, number: int, profile: str) -> tuple[dict[str, str], dict[str, float]]:
        return device_labels(f"GPU-{name}") | {PART_LABEL: str(number), PROFILE_LABEL: profile}, {SM: 0.9, POWER: 300.0}

    made = MadeUpExporter({
        "nan": page("nan", {UTIL: "NaN"}), "blank": page("blank", {UTIL: 4294967295}),
        "infinite": page("infinite", {UTIL: "+Inf"}), "old": page("old", {UTIL: 5}, age_s=40.0),
        "pods": Page(device_labels("GPU-pods") | {"pod": "a"}, {UTIL: 20}, more=[
            (device_labels("GPU-pods") | {"pod": "b"}, {UTIL: 20})]),
        "frozen": page("frozen", {SM: 0.4}, value_of={ENGINE: lambda scrape: 0.3 + 0.01 * (scrape % 20)}),
        "stuck": page("stuck", {SM: 0, ENGINE: 0, UTIL: 95}),
        "split": page("split", {}, more=[part("split", 1, "1g.18gb"), part("split", 2, "3g.71gb")]),
        "whole": page("whole", {SM: 0.5}, more=[part("whole", 1, "1g.18gb")]),
        "both": page("both", {UTIL: 30, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.9}), "never": page("never", {UTIL: 1}, locked=True)})
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(exporters: dict[str, Exporter], made_up: MadeUpExporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    targets = {name: (exporter.address, "metrics") for name, exporter in exporters.items()}
    targets |= {name: (made_up.address, name) for name in made_up.pages} | {"again": targets["shared"]}
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as server_port:
        wait_for(lambda: value(server_port, "count(up == 1)") == len(targets) - 1)  # all but the locked page
        yield server_port


def config(port: int, gpu: Any = None, **more: Any) -> PrometheusConfig:
    """A config for the Prometheus at `port`, with a window over all its samples."""
    return PrometheusConfig.model_validate(
        {"url": f"http://127.0.0.1:{port}", "gpu": gpu, "window_s": EVER_S, "max_age_s": 5, "timeout_s": 10, **more})


def latest(server: PrometheusServer, *fields: str) -> dict[str, float]:
    return values(PrometheusSource(server, fields or (UTIL,)).latest())


def read(settings: PrometheusConfig, *fields: str) -> dict[str, float]:
    return latest(PrometheusServer(settings), *fields)


def refusal(settings: PrometheusConfig, *fields: str) -> str:
    """Why there are no metrics."""
    with pytest.raises(PrometheusError) as raised:
        read(settings, *fields)
    return str(raised.value)


@pytest.fixture
def recorder(port: int) -> Iterator[Recorder]:
    """A proxy of the Prometheus that wants TOKEN."""
    recorder = Recorder(port, TOKEN)
    yield recorder
    recorder.close()


# what is read --------------------------------------------------------------------------------------------------------------


def test_twelve_fields_of_one_gpu_among_others(port: int) -> None:
    assert read(config(port, "GPU-live"), *TWELVE) == pytest.approx(KNOWN)
    assert read(config(port, {"index": 0, "host": "node8"})) == {UTIL: pytest.approx(50.0)}
    assert read(config(port, {"host": "node7"}), METRIC) == {METRIC: pytest.approx(0.375)}  # a CPU
    assert read(config(port, job="busy")) == {UTIL: pytest.approx(50.0)}
    mean = PrometheusSource(PrometheusServer(config(port, "GPU-live")), [SM]).window(3 * SCRAPE_S)[SM]
    assert (mean.value, 1 <= mean.readings <= 4) == (pytest.approx(KNOWN[SM]), True)


def test_the_mean_is_over_the_samples_of_the_window(port: int) -> None:
    """The metric only rises, so Prometheus's own means just before and just after are bounds."""
    window_s = 5 * SCRAPE_S
    over = f'_over_time({UTIL}{{UUID="GPU-rising"}}[{window_s * 1e3:.0f}ms])'
    wait_for(lambda: (value(port, "count" + over) or 0) >= 4)
    before = value(port, "avg" + over), value(port, "count" + over)
    mean = PrometheusSource(PrometheusServer(config(port, "GPU-rising", window_s=window_s, max_age_s=2)), [UTIL]).latest()[UTIL]
    after = value(port, "avg" + over), value(port, "count" + over)
    assert (before[0] or 0.0) - 1e-9 <= mean.value <= (after[0] or 0.0) + 1e-9
    assert (before[1] or 0.0) - 1 <= mean.readings <= (after[1] or 0.0) + 1


def test_old_and_new_names_and_units(port: int) -> None:
    expected = {UTIL: 40.0, CLOCK: 1980.0, POWER: 312.5, SM: 0.25}
    assert value(port, 'DCGM_FI_DEV_SM_CLOCK_HERTZ{UUID="GPU-renamed"}') == pytest.approx(1.98e9)
    assert read(config(port, "GPU-renamed"), *expected) == pytest.approx(expected)
    assert read(config(port, "GPU-both")) == {UTIL: 30.0}  # both at once: the old one


def test_parts_of_a_gpu(port: int) -> None:
    assert read(config(port, "GPU-whole"), SM) == {SM: 0.5}  # not that of the MIG instance
    text = refusal(config(port, "GPU-split"), SM, POWER)
    assert text.startswith("prometheus: GPU-split (index 0, host node7) is split into MIG instances (GPU_I_ID 1, 1g.18gb; "
                           "GPU_I_ID 2, 3g.71gb), and only these are reported; ")
    assert "dcgm-exporter --devices g" in text


def test_a_gpu_of_several_pods_is_read_once(port: int) -> None:
    pods = PrometheusSource(PrometheusServer(config(port, "GPU-pods")), [UTIL]).latest()[UTIL]
    assert pods.value == 20.0
    assert pods.readings <= (value(port, f'count_over_time({UTIL}{{UUID="GPU-pods",pod="a"}}[1m])') or 0.0)


# what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "message"), [
    ("GPU-nan", rf"UUID GPU-nan: metric {UTIL}: the device reports nan per cent, possible is 0 to 100; mend its exporter, or"),
    ("GPU-infinite", "the device reports inf"), ("GPU-blank", r"reports 4294967295, which stands for no value \(blank\); mend"),
    ("GPU-old", r"UTIL of GPU-old \(index 0, host node7\) is stale: its newest sample is 4\d\.\d s old, max_age_s is 5"),
    ("GPU-none", r"no metrics of UUID GPU-none, but of .*GPU-blank \(index 0, host node7\), job blank; .*GPU-busy.* more"),
    ("GPU-never", "can't be scraped at present: job never"),
    ("GPU-shared", r"several exporters report GPU-shared .*: job again, instance .*; job shared, instance .*prometheus\.job"),
    ({"index": 0, "host": "node7"}, r"several devices match: .*GPU-live.* more"),
])
def test_samples_that_are_no_load(port: int, gpu: Any, message: str) -> None:
    with pytest.raises(PrometheusError, match=message):
        read(config(port, gpu))


def test_samples_that_contradict_each_other(port: int, made_up: MadeUpExporter) -> None:
    wait_for(lambda: made_up.pages["frozen"].scrapes > MANY)
    frozen = refusal(config(port, "GPU-frozen"), SM, ENGINE)
    assert frozen.startswith(f"prometheus: UUID GPU-frozen: metric {SM}: frozen: ")
    assert f"readings of exactly 0.4 ratio while {ENGINE} moved" in frozen
    assert f"metric {SM}: stuck at 0 while {UTIL} says that the GPU is busy" in refusal(config(port, "GPU-stuck"), SM)


def test_missing_metrics(port: int) -> None:
    text = refusal(config(port, "GPU-busy"), UTIL, CLOCK)
    assert (f"no sample of {CLOCK} or DCGM_FI_DEV_SM_CLOCK_HERTZ within 60 s, though GPU-busy (index 0, host node8) reports "
            f"{UTIL}; these predictors need it") in text
    assert refusal(config(port), "DCGM_FI_DEV_CPU_UTIL_IRQ").startswith(
        f"prometheus.url http://127.0.0.1:{port}: HTTP 200, but it knows none of the metrics DCGM_FI_DEV_CPU_UTIL_IRQ")
    with pytest.raises(UserError, match="metric unheard_of: Prometheus can't read it here; it has DCGM_FI_PROF"):
        read(config(port), "unheard_of")


def test_an_exporter_that_fails_later(port: int, exporters: dict[str, Exporter]) -> None:
    """The window still has its old samples and their average."""
    settings = config(port, "GPU-killed")
    wait_for(lambda: value(port, f'count_over_time({UTIL}{{UUID="GPU-killed"}}[1m])') is not None)
    assert read(settings) == {UTIL: pytest.approx(60.0)}
    exporters["killed"].close()
    wait_for(lambda: value(port, 'up{job="killed"}') == 0.0)
    assert value(port, f'avg_over_time({UTIL}{{UUID="GPU-killed"}}[1m])') == pytest.approx(60.0)
    assert "the exporter of GPU-killed (index 0, host node7) can't be scraped (up is 0): job killed" in refusal(settings)
    wait_for(lambda: value(port, f'count_over_time({UTIL}{{UUID="GPU-killed"}}[300ms])') is None)
    assert "no sample of GPU-killed (index 0, host node7) within 0.3 s, though there were some within 1h" in refusal(
        settings.model_copy(update={"window_s": 0.3, "max_age_s": 0.3}))


def test_an_exporter_that_was_replaced(port: int, exporters: dict[str, Exporter]) -> None:
    """Of two that reported a GPU within the window, the one that is up counts."""
    exporters["moved_from"].close()
    wait_for(lambda: value(port, 'up{job="moved_from"}') == 0.0)
    assert value(port, f'count(count_over_time({UTIL}{{UUID="GPU-moved"}}[1m]))') == 2.0
    assert read(config(port, "GPU-moved")) == {UTIL: pytest.approx(30.0)}


@pytest.mark.parametrize(("status", "answer", "message"), [
    (200, "<html>{seen}</html>", "no JSON came back"), (200, "[1]", "no Prometheus answer"),
    (200, '{"status": "success", "data": {"resultType": "streams", "result": []}}', "with a streams"),
    (404, "not found", "HTTP 404: no JSON"), (302, "", "HTTP 302: it sends elsewhere"),
    (503, "Service Unavailable", "HTTP 503: it is not ready"),
    *((200, f'{{"data": {{"resultType": "matrix", "result": [{series}]}}}}', "holds a series that no Prometheus sends")
      for series in ('{"metric": {}, "values": [[1, "x"]]}', '{"metric": {"__name__": "a"}, "values": []}', '"a"')),
    (422, '{"status": "error", "errorType": "execution", "error": "too many samples"}', "too many samples")])
def test_servers_that_are_no_prometheus(recorder: Recorder, status: int, answer: str, message: str) -> None:
    recorder.answer = (status, answer)
    assert message in refusal(config(0, "GPU-live", url=recorder.url))


def test_servers_that_do_not_answer(port: int, exporters: dict[str, Exporter], tmp_path: Path) -> None:
    with prometheus(tmp_path, {"live": (exporters["live"].address, "metrics")}) as mortal_port:
        open_server = PrometheusServer(config(mortal_port, "GPU-live"))
        wait_for(lambda: value(mortal_port, UTIL) is not None)
        latest(open_server)
    with pytest.raises(PrometheusError, match="can't be reached: "):  # over the open connection
        latest(open_server)
    assert "can't be reached: Connection refused; is it running" in refusal(config(mortal_port, "GPU-live"))
    assert "can't be reached: " in refusal(config(port, url="http://no-such-host.invalid"))
    with socket.socket() as stalled:
        stalled.bind(("127.0.0.1", 0))
        stalled.listen()
        assert "no complete answer within timeout_s 0.2" in refusal(config(stalled.getsockname()[1], timeout_s=0.2))


# who asks ------------------------------------------------------------------------------------------------------------------


def test_users_and_certificates(exporters: dict[str, Exporter], tmp_path: Path) -> None:
    prometheus_or_skip()
    certificates(tmp_path)
    live = exporters["live"].address
    web = {"tls_server_config": {"cert_file": str(tmp_path / "server.pem"), "key_file": str(tmp_path / "server.key"),
                                 "client_ca_file": str(tmp_path / "ca.pem"), "client_auth_type": "RequireAndVerifyClientCert"},
           "basic_auth_users": {USER: PASSWORD_BCRYPT}}
    for name, password in (("password", PASSWORD + "\n"), ("wrong", "wr0ng-secret")):
        (tmp_path / name).write_text(password)
    with prometheus(tmp_path / "prometheus", {"live": (live, "metrics")}, web) as locked:
        def changed(**changes: Any) -> PrometheusConfig:
            return config(locked, "GPU-live", **{
                "url": f"https://127.0.0.1:{locked}", "user": USER, "password_file": tmp_path / "password",
                "ca_file": tmp_path / "ca.pem", "client_cert_file": tmp_path / "client.pem",
                "client_key_file": tmp_path / "client.key", **changes})

        def works() -> bool:
            with suppress(PrometheusError):
                return bool(read(changed(), *TWELVE))
            return False

        wait_for(works)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"password_file": tmp_path / "wrong"}, "HTTP 401: it refuses user and password"),
            ({"user": None, "password_file": None}, "HTTP 401: it refuses a request without user or token"),
            ({"ca_file": None}, "TLS fails: unable to get local issuer certificate"),
            ({"client_cert_file": None, "client_key_file": None}, "client_cert_file and client_key_file if it wants one"),
            ({"url": f"https://localhost:{locked}"}, "TLS fails: Hostname mismatch"),
            ({"url": f"http://127.0.0.1:{locked}"}, "it speaks TLS; write https://")]
        for changes, message in cases:
            assert message in (refused := refusal(changed(**changes)))
            assert "wr0ng" not in refused
        for key, path in (("ca_file", "none.pem"), ("client_key_file", "stranger.key"), ("ca_file", "password")):
            with pytest.raises(UserError, match=key):
                read(changed(**{key: tmp_path / path}))


def test_tokens_stay_secret(port: int, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, messages = tmp_path / "token", list[str]()
    settings = config(port, "GPU-live", url=recorder.url, token_file=token)
    server = PrometheusServer(settings)

    def refused(text: str, error: type[UserError], message: str) -> None:
        token.write_text(text)
        with pytest.raises(error, match=message) as raised:
            latest(server)
        messages.append(str(raised.value))

    with pytest.raises(UserError, match=r"token_file .*token: no such file"):
        latest(server)
    refused("wr0ng-secret", PrometheusError, "HTTP 403: it refuses the token")
    token.write_text(TOKEN + "\n")  # renewed: it is read each time
    for _ in range(3):
        assert latest(server) == {UTIL: pytest.approx(KNOWN[UTIL])}
    assert recorder.connections == 1
    for bad in ("two wr0ng-secrets", "wr0ng-secret\r\nX-Other: 1", "wr0ng-secret-ü"):
        refused(bad, UserError, "the token holds blanks")
    refused("", UserError, "it is empty")
    token.write_text("wr0ng-secret")
    for status in (200, 400, 403, 404, 500):  # a server that repeats the token
        recorder.answer = (status, "<html>{seen}</html>")
        messages.append(refusal(settings))
    assert not [text for text in messages if "wr0ng" in text]
    monkeypatch.delenv("HASE_TEST_TOKEN", raising=False)
    with pytest.raises(UserError, match="token_env: no environment variable"):
        read(config(port, url=recorder.url, token_env="HASE_TEST_TOKEN"))
    with pytest.raises(UserError, match="token_env"):  # the config is wrong, not the server: there is no idle device to assume
        current_load(InferenceConfig(prometheus=config(port, on_failure="idle", token_env="HASE_TEST_TOKEN")), fields=[UTIL])


# the config ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "message"), [
    ("url: localhost:9090", r"prometheus\.url: no address"),
    ("url: http://u:s3cret@host", r"prometheus\.url: an address without"),
    ("url: http://host:99999", r"prometheus\.url: no address"), ("url: http://host/?token=s3cret", "an address without"),
    ("password: s3cret", "password: unknown key"), ("user: me", "user goes with"), ("password_env: P", "user goes with"),
    ("token_env: T\n  token_file: f", "only one of"), ("client_key_file: k", "goes with client_cert_file"),
    ("window_s: 10\n  max_age_s: 20", "max_age_s 20 is longer than window_s 10"), ("timeout_s: 0", r"prometheus\.timeout_s"),
    ("on_failure: ignore", r"on_failure.*'error' or 'idle'"), ("gpu: 0", r"prometheus\.gpu: a UUID, or"),
    ("gpu: {indx: 0}", "did you mean index"),
])
def test_configs_that_do_not_fit(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(f"prometheus:\n  {lines}\n")
    with pytest.raises(UserError, match=message) as raised:
        read_config(tmp_path / "config.yaml", InferenceConfig)
    assert "s3cret" not in str(raised.value)


# what predictions make of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [
    ("inference/predict_model_latency.py", "--model", "anet_c16.onnx"),
    ("evaluator.py", "anet_c16.onnx", "--rounds", "1", "--budget-s", "0.02", "--patience-s", "0")])
def test_predictor_and_evaluator_ask(port: int, command: tuple[str, ...], tmp_path: Path,
                                     trained_workspace: Workspace) -> None:
    def shell(host: str, on_failure: str = "error") -> subprocess.CompletedProcess[str]:
        (tmp_path / "config.yaml").write_text(json.dumps({"prometheus": {
            "url": f"http://127.0.0.1:{port}", "gpu": {"host": host}, "on_failure": on_failure}}))
        return run_script(*command, "--workspace", trained_workspace.root, "--config", tmp_path / "config.yaml", "--json")

    def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        return report if command[0] == "evaluator.py" else report[0]

    assert answer(shell("node7"))["load"] == {METRIC: pytest.approx(0.375)}
    failed = shell("node1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: prometheus: no metrics of Hostname node1, but of node7 (host node7), ")
    idle = answer(shell("node1", "idle"))
    assert idle["load"] == "idle"
    assert idle["warnings"][0].startswith("predicted for an idle device, as prometheus.on_failure says, since the load is not")
