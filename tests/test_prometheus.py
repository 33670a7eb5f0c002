"""The live load from a real Prometheus: known means, and each way in which it can't be had, told apart."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_stand import (
    EVER_S,
    PASSWORD,
    PASSWORD_BCRYPT,
    USER,
    Exporter,
    Page,
    Recorder,
    certificates,
    gpu_labels,
    prometheus,
    prometheus_or_skip,
    value,
    wait_for,
)
from trained_workspace import METRIC, trained

from benchmark.metric_fields import FIELDS
from inference.live_metrics import SAME_NAMES, live_metrics
from inference.load import InferenceConfig, Load, current_load
from inference.prometheus import PrometheusConfig, PrometheusError, Server, server_for
from utils.config import load_config
from utils.errors import UserError
from utils.paths import ROOT

UTIL, SM, POWER = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_POWER_USAGE"
TWELVE = tuple(FIELDS)[:12]
KNOWN = {name: FIELDS[name].maximum * (1 + place) / 20 for place, name in enumerate(TWELVE)}
TOKEN = "t0ken.of-a_user"
BREAKING = ("killed", "stalled", "garbled", "locked")  # what becomes of exporters that were well


@pytest.fixture(scope="module", autouse=True)
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    def page(name: str, values: dict[str, float | str], host: str = "node7", **how: Any) -> Page:
        return Page(gpu_labels(f"GPU-{name}", host=host), values, **how)

    pages = {
        "live": page("live", dict(KNOWN)), "busy": page("busy", {UTIL: 50}, host="node8"),
        "rising": page("rising", {}, "node9", value_of={UTIL: lambda scrape: 7.0 * scrape % 100}),
        "step": page("step", {UTIL: 20}), "nan": page("nan", {UTIL: "NaN"}), "blank": page("blank", {UTIL: 4294967295}),
        "infinite": page("infinite", {UTIL: "+Inf"}), "old": page("old", {UTIL: 5}, age_s=40.0),
        "sliced": Page(gpu_labels("GPU-sliced") | {"GPU_I_ID": "1"}, {UTIL: 5}),
        "renamed": page("renamed", {"DCGM_FI_DEV_GPU_UTIL_RATIO": 0.4}),
        "both": page("both", {UTIL: 30, "new_util_ratio": 0.9}),
        "shared": page("shared", {UTIL: 10}), "moved": page("moved", {UTIL: 30}),
        "cpu": Page({"Hostname": "node7"}, {METRIC: 0.375}),
        "never": page("never", {UTIL: 1}, mode="locked"),
        **{name: page(name, {UTIL: 60}) for name in BREAKING if name != "killed"},
    }
    made = Exporter(pages)
    yield made
    made.close()


@pytest.fixture(scope="module")
def mortal() -> Iterator[Exporter]:
    """An exporter that a test kills."""
    made = Exporter({name: Page(gpu_labels(f"GPU-{name}"), {UTIL: 60}) for name in ("killed", "moved")})
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(exporter: Exporter, mortal: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    targets = {name: (exporter.address, name) for name in exporter.pages} | {"again": (exporter.address, "shared")}
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets | {
            "killed": (mortal.address, "killed"), "moved_from": (mortal.address, "moved")}) as found:
        wait_for(lambda: value(found, "count(up == 1)") == len(targets) + 1)  # all but the page that is locked
        yield found


def config(port: int, gpu: Any = None, **more: Any) -> PrometheusConfig:
    """Of the Prometheus at `port`, over all that it knows."""
    return PrometheusConfig.model_validate(
        {"url": f"http://127.0.0.1:{port}", "gpu": gpu, "window_s": EVER_S, "max_age_s": 5, "timeout_s": 10, **more})


def read(given: PrometheusConfig, *fields: str, **more: Any) -> dict[str, float]:
    return live_metrics(Server(given), fields or (UTIL,), **more)


def refusal(given: PrometheusConfig, *fields: str) -> str:
    """Why there are no metrics."""
    with pytest.raises(PrometheusError) as told:
        read(given, *fields)
    return str(told.value)


# what is read --------------------------------------------------------------------------------------------------------------


def test_twelve_fields_of_one_gpu_among_others(port: int) -> None:
    assert read(config(port, "GPU-live"), *TWELVE) == pytest.approx(KNOWN)
    assert read(config(port, {"index": 0, "host": "node8"})) == {UTIL: 50.0}
    assert read(config(port, {"host": "node7"}), METRIC) == {METRIC: 0.375}  # a CPU
    assert read(config(port, job="busy")) == {UTIL: 50.0}


def test_the_mean_is_that_of_all_samples(port: int, exporter: Exporter) -> None:
    page = exporter.pages["rising"]
    wait_for(lambda: page.scrapes >= 5)
    before = page.scrapes
    found = read(config(port, "GPU-rising"))[UTIL]
    served = [7.0 * scrape % 100 for scrape in range(page.scrapes + 1)]
    possible = [sum(served[:count]) / count for count in range(before - 1, len(served) + 1)]  # a sample may be on its way
    assert any(found == pytest.approx(mean) for mean in possible)
    assert found == pytest.approx(value(port, f'avg_over_time({UTIL}{{UUID="GPU-rising"}}[1m])'), abs=10)


def test_the_mean_is_that_of_the_window(port: int, exporter: Exporter) -> None:
    page = exporter.pages["step"]
    page.values[UTIL] = 80
    changed = page.scrapes
    wait_for(lambda: page.scrapes >= changed + 8)  # 1.6 s later
    assert read(config(port, "GPU-step", window_s=1, max_age_s=1)) == {UTIL: 80.0}
    assert 20 < read(config(port, "GPU-step"))[UTIL] < 80


def test_names_and_units_of_other_exporters(port: int) -> None:
    names = {UTIL: ((UTIL, 1.0), ("DCGM_FI_DEV_GPU_UTIL_RATIO", 100.0), ("new_util_ratio", 100.0))}
    assert read(config(port, "GPU-renamed"), names=names) == {UTIL: pytest.approx(40.0)}
    assert read(config(port, "GPU-both"), names=names) == {UTIL: 30.0}  # both at once: the first
    assert set(SAME_NAMES) == set(FIELDS)


def test_two_requests_over_one_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASE_TEST_TOKEN", TOKEN)
    recorder = Recorder(port, TOKEN)
    given = config(port, "GPU-live", url=recorder.url, token_env="HASE_TEST_TOKEN")
    for _ in range(3):
        assert live_metrics(server_for(given), TWELVE) == pytest.approx(KNOWN)
    assert (recorder.connections, recorder.requests) == (1, 6)
    recorder.close()


# what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "said"), [
    ("GPU-nan", "was nan within the last 60 s; possible is 0 to 100 per cent"), ("GPU-infinite", "was inf within"),
    ("GPU-blank", r"was 4\.29497e\+09 within"),
    ("GPU-old", r"UTIL of GPU-old \(index 0, host node7\) is stale: its newest sample is 4\d\.\d s old, max_age_s is 5"),
    ("GPU-none", r"no metrics of UUID GPU-none; there are .* GPU-blank \(index 0, host node7\), job blank; .*GPU-busy.* more"),
    ("GPU-sliced", "no metrics of UUID GPU-sliced; there are"),
    ("GPU-never", "can't be scraped at present: job never"),
    ("GPU-shared", r"several exporters report GPU-shared .*: job again, instance .*; job shared, instance .*prometheus\.job"),
    (None, r"several devices match: GPU-blank \(index 0, host node7\); .*set prometheus\.gpu"),
    ({"index": 0, "host": "node7"}, r"several devices match: .*GPU-live.* more"),
])
def test_samples_that_are_no_load(port: int, gpu: Any, said: str) -> None:
    with pytest.raises(PrometheusError, match=said):
        read(config(port, gpu))


def test_missing_metrics(port: int) -> None:
    assert "no sample of DCGM_FI_DEV_CPU_UTIL_TOTAL within window_s 60, though GPU-live" in refusal(
        config(port, "GPU-live"), UTIL, METRIC)
    assert refusal(config(port), "DCGM_FI_DEV_CPU_UTIL_IRQ").startswith(
        f"prometheus.url http://127.0.0.1:{port}: HTTP 200, but it knows none of the metrics DCGM_FI_DEV_CPU_UTIL_IRQ")


@pytest.mark.parametrize("how", BREAKING)
def test_an_exporter_that_was_well(port: int, exporter: Exporter, mortal: Exporter, how: Any) -> None:
    """It no longer answers, or with what can't be used: the window still has its samples, and an average of them."""
    given = config(port, f"GPU-{how}")
    wait_for(lambda: value(port, f'count_over_time({UTIL}{{UUID="GPU-{how}"}}[1m])') is not None)
    assert read(given) == {UTIL: 60.0}
    if how == "killed":
        mortal.close()
    else:
        exporter.pages[how].mode = how
    wait_for(lambda: value(port, f'up{{job="{how}"}}') == 0.0)
    assert value(port, f'avg_over_time({UTIL}{{UUID="GPU-{how}"}}[1m])') == 60.0
    assert f"the exporter of GPU-{how} (index 0, host node7) can't be scraped (up is 0): job {how}" in refusal(given)
    short = given.model_copy(update={"window_s": 0.3, "max_age_s": 0.3})
    wait_for(lambda: value(port, f'count_over_time({UTIL}{{UUID="GPU-{how}"}}[300ms])') is None)
    text = refusal(short)
    assert f"no sample of GPU-{how} (index 0, host node7) within window_s 0.3, though there were some within 1h" in text
    assert f"can't be scraped at present: job {how}" in text or f"; job {how}, instance" in text


def test_an_exporter_that_was_replaced(port: int, mortal: Exporter) -> None:
    """Of two that reported a GPU within the window, the one that is up counts."""
    mortal.close()
    wait_for(lambda: value(port, 'up{job="moved_from"}') == 0.0)
    assert value(port, f'count(count_over_time({UTIL}{{UUID="GPU-moved"}}[1m]))') == 2.0
    assert read(config(port, "GPU-moved")) == {UTIL: 30.0}


def test_servers_that_are_no_prometheus(port: int) -> None:
    recorder = Recorder(port, TOKEN)
    given = config(port, "GPU-live", url=recorder.url)
    for answer, said in (((200, "<html>{seen}</html>"), "no JSON came back"), ((200, "[1]"), "no Prometheus answer"),
                         ((200, '{"status": "success", "data": {"resultType": "streams", "result": []}}'), "with a streams"),
                         ((404, "not found"), "HTTP 404: no JSON"), ((302, ""), "HTTP 302: it sends elsewhere"),
                         ((503, "Service Unavailable"), "HTTP 503: it is not ready"),
                         ((200, '{"data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "x"]]}]}}'),
                          "a series came back that is none"),
                         ((200, '{"data": {"resultType": "matrix", "result": [{"metric": {"__name__": "a"}, "values": []}]}}'),
                          "a series came back that is none"),
                         ((200, '{"data": {"resultType": "matrix", "result": ["a"]}}'), "a series came back that is none"),
                         ((422, '{"status": "error", "errorType": "execution", "error": "too many samples"}'),
                          "too many samples")):
        recorder.answer = answer
        assert said in refusal(given)
    recorder.close()


def test_servers_that_do_not_answer(port: int, exporter: Exporter, tmp_path: Path) -> None:
    with prometheus(tmp_path, {"live": (exporter.address, "live")}) as mortal_port:
        kept = Server(config(mortal_port, "GPU-live"))
        wait_for(lambda: value(mortal_port, UTIL) is not None)
        live_metrics(kept, [UTIL])
    with pytest.raises(PrometheusError, match="can't be reached: "):  # over the connection that it had
        live_metrics(kept, [UTIL])
    assert "can't be reached: Connection refused; is it running" in refusal(config(mortal_port, "GPU-live"))
    assert "can't be reached: " in refusal(config(port, url="http://no-such-host.invalid"))
    with socket.socket() as stalled:
        stalled.bind(("127.0.0.1", 0))
        stalled.listen()
        assert "no answer within timeout_s 0.2" in refusal(config(stalled.getsockname()[1], timeout_s=0.2))


# who asks ------------------------------------------------------------------------------------------------------------------


def test_users_and_certificates(tmp_path: Path) -> None:
    """A Prometheus with TLS that wants a client's certificate and a password."""
    prometheus_or_skip()
    certificates(tmp_path)
    page = Page(gpu_labels("GPU-live"), dict(KNOWN))
    exporter = Exporter({"live": page})
    web = {"tls_server_config": {"cert_file": str(tmp_path / "server.pem"), "key_file": str(tmp_path / "server.key"),
                                 "client_ca_file": str(tmp_path / "ca.pem"), "client_auth_type": "RequireAndVerifyClientCert"},
           "basic_auth_users": {USER: PASSWORD_BCRYPT}}
    (tmp_path / "password").write_text(PASSWORD + "\n")
    (tmp_path / "wrong").write_text("wr0ng-secret")
    with prometheus(tmp_path / "prometheus", {"live": (exporter.address, "live")}, web) as locked:
        whole = {"url": f"https://127.0.0.1:{locked}", "user": USER, "password_file": tmp_path / "password",
                 "ca_file": tmp_path / "ca.pem", "client_cert_file": tmp_path / "client.pem",
                 "client_key_file": tmp_path / "client.key"}

        def given(**other: Any) -> PrometheusConfig:
            return config(locked, "GPU-live", **(whole | other))

        wait_for(lambda: page.scrapes >= 3)
        assert read(given(), *TWELVE) == pytest.approx(KNOWN)
        wrong = refusal(given(password_file=tmp_path / "wrong"))
        assert "HTTP 401: it refuses user and password" in wrong
        assert "wr0ng" not in wrong
        assert "HTTP 401: it refuses that nobody is named" in refusal(given(user=None, password_file=None))
        assert "TLS fails: unable to get local issuer certificate" in refusal(given(ca_file=None))
        assert "TLS fails: " in refusal(given(ca_file=tmp_path / "stranger.pem"))
        nobody = refusal(given(client_cert_file=None, client_key_file=None))
        assert "TLS fails: " in nobody
        assert "client_cert_file and client_key_file if it wants one" in nobody
        assert "TLS fails: Hostname mismatch" in refusal(given(url=f"https://localhost:{locked}"))
        assert "it speaks TLS; write https://" in refusal(given(url=f"http://127.0.0.1:{locked}"))
        for key, path, said in (("ca_file", "none.pem", r"ca_file .*none\.pem: no such file"),
                                ("client_key_file", "stranger.key", "client_key_file"), ("ca_file", "password", "ca_file")):
            with pytest.raises(UserError, match=said):
                read(given(**{key: tmp_path / path}))
    assert "TLS fails: " in refusal(config(locked, url=f"https://{exporter.address}"))  # a server without TLS
    exporter.close()


def test_tokens_stay_secret(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(port, TOKEN)
    token = tmp_path / "token"
    given = config(port, "GPU-live", url=recorder.url, token_file=token)
    server = Server(given)
    with pytest.raises(UserError, match=r"token_file .*token: no such file"):
        live_metrics(server, [UTIL])
    token.write_text("wr0ng-secret")
    with pytest.raises(PrometheusError, match="HTTP 403: it refuses the token") as told:
        live_metrics(server, [UTIL])
    told_all = [str(told.value)]
    token.write_text(TOKEN + "\n")  # renewed: it is read each time
    assert live_metrics(server, [UTIL]) == {UTIL: pytest.approx(KNOWN.get(UTIL, 0.0))}
    for bad in ("two wr0ng-secrets", "wr0ng-secret\r\nX-Other: 1", "wr0ng-secret-ü"):
        token.write_text(bad)
        with pytest.raises(UserError, match="the token holds blanks") as told_user:
            live_metrics(server, [UTIL])
        told_all.append(str(told_user.value))
    token.write_text("")
    with pytest.raises(UserError, match="it is empty"):
        live_metrics(server, [UTIL])
    token.write_text("wr0ng-secret")
    for status in (200, 400, 403, 404, 500):  # a server that says what it was shown
        recorder.answer = (status, "<html>{seen}</html>")
        told_all.append(refusal(given))
    assert not [text for text in told_all if "wr0ng" in text]
    monkeypatch.delenv("HASE_TEST_TOKEN", raising=False)
    with pytest.raises(UserError, match="token_env: no environment variable"):
        read(config(port, url=recorder.url, token_env="HASE_TEST_TOKEN"))
    recorder.close()


# the config ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "said"), [
    ("url: localhost:9090", r"prometheus\.url: no address"),
    ("url: http://u:s3cret@host", r"prometheus\.url: an address without"),
    ("url: http://host:99999", r"prometheus\.url: no address"), ("url: http://host/?token=s3cret", "an address without"),
    ("password: s3cret", "password: unknown key"), ("user: me", "user goes with"), ("password_env: P", "user goes with"),
    ("token_env: T\n  token_file: f", "only one of"), ("client_key_file: k", "goes with client_cert_file"),
    ("window_s: 10\n  max_age_s: 20", "max_age_s 20 is longer than window_s 10"), ("timeout_s: 0", r"prometheus\.timeout_s"),
    ("on_failure: ignore", r"on_failure.*'error' or 'idle'"), ("gpu: 0", r"prometheus\.gpu: a UUID, or"),
    ("gpu: {indx: 0}", "did you mean index"),
])
def test_configs_that_do_not_fit(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(f"prometheus:\n  {lines}\n")
    with pytest.raises(UserError, match=said) as told:
        load_config(tmp_path / "config.yaml", InferenceConfig)
    assert "s3cret" not in str(told.value)


def test_the_shipped_config_says_what_the_classes_do() -> None:
    shipped = load_config(ROOT / "inference" / "config.yaml", InferenceConfig)
    assert shipped == InferenceConfig()
    assert shipped.prometheus.model_fields_set == set(PrometheusConfig.model_fields)


# what it makes of a prediction ---------------------------------------------------------------------------------------------


def test_a_failure_is_an_error_or_idle_with_a_warning(port: int) -> None:
    given = InferenceConfig(prometheus=config(port, "GPU-nan"))
    with pytest.raises(PrometheusError, match="was nan"):
        current_load(given, fields=[UTIL])
    idle = current_load(InferenceConfig(prometheus=config(port, "GPU-nan", on_failure="idle")), fields=[UTIL])
    assert idle.metrics == {}
    assert "predicted for an idle device, as prometheus.on_failure says, since the load is not known" in idle.notices[0]
    assert "was nan" in idle.notices[0]
    with pytest.raises(UserError, match="token_env"):  # the config is wrong, not the server
        current_load(InferenceConfig(prometheus=config(port, on_failure="idle", token_env="HASE_NOT_SET")), fields=[UTIL])
    assert current_load(InferenceConfig(prometheus=config(port, "GPU-busy")), fields=[UTIL]) == Load({UTIL: 50.0})
    assert "trained without metrics" in current_load(given).notices[0]


def test_the_predictor_asks(port: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    workspace = trained(tmp_path_factory.getbasetemp() / "trained")

    def shell(gpu: str, on_failure: str = "error") -> subprocess.CompletedProcess[str]:
        (tmp_path / "config.yaml").write_text(json.dumps({"prometheus": {
            "url": f"http://127.0.0.1:{port}", "gpu": {"host": gpu}, "on_failure": on_failure}}))
        return subprocess.run(
            [sys.executable, "inference/predict_model_latency.py", "--workspace", workspace.root, "--model", "anet_c16.onnx",
             "--config", tmp_path / "config.yaml", "--json"], cwd=ROOT, capture_output=True, text=True)

    done = shell("node7")
    assert json.loads(done.stdout)["load"] == {METRIC: 0.375}
    failed = shell("node1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: prometheus: no metrics of Hostname node1; there are those of host node7, job cpu")
    idle = shell("node1", "idle")
    found = json.loads(idle.stdout)
    assert found["load"] == "idle"
    assert found["warnings"][0].startswith("predicted for an idle device, as prometheus.on_failure says")
    assert "warning: predicted for an idle device" in idle.stderr
