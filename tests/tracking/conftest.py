"""A real MLflow server for the session, and a proxy in front of it that can fail in every way a server fails."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from megatron_mhar.launch.place import free_port

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
HOST = "127.0.0.1"


def wait_for(condition: Callable[[], Any], timeout_s: float = 60, what: str = "") -> Any:
    """The condition's first true value; fails the test where there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.05)
    return value


class Proxy:
    """Passes requests on to ``upstream``, or fails as ``fault`` says; switched at any time.

    down: nothing listens. hang: accepts, never answers. 429, 500: answers so. lost: passes the next create_run on and
    drops its answer. None: works.
    """

    def __init__(self, upstream: str, fault: str | None) -> None:
        self.fault = fault
        self.refused = 0  # requests that got no proper answer
        self.creations = 0  # create_run requests that reached the server
        self._upstream = upstream.removeprefix("http://")
        self._port = free_port()
        self._over = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        if fault != "down":
            self._listen()

    @property
    def uri(self) -> str:
        return f"http://{HOST}:{self._port}"

    def heal(self) -> None:
        self.fault = None
        self._over.set()
        if self._server is None:
            self._listen()

    def close(self) -> None:
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _listen(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault
                if fault in ("hang", "429", "500"):
                    proxy.refused += 1
                    if fault == "hang":
                        proxy._over.wait()
                    else:
                        self.send_response(int(fault))
                        self.send_header("Retry-After", "3600")
                        self.end_headers()
                    self.close_connection = True
                    return
                connection = http.client.HTTPConnection(proxy._upstream, timeout=30)
                connection.request(self.command, self.path, body, {**self.headers, "Connection": "close"})
                response = connection.getresponse()
                content = response.read()
                connection.close()
                if self.path.endswith("/runs/create"):
                    proxy.creations += 1
                    if fault == "lost":
                        proxy.fault = None
                        self.close_connection = True
                        return
                self.send_response(response.status)
                self.send_header("Content-Type", response.getheader("Content-Type", "application/json"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, self._port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()


class Store:
    """What a store or server holds, asked through MLflow itself."""

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def runs(self, run_key: str) -> list[Any]:
        """All runs of a job, deleted ones too."""
        from mlflow.entities import ViewType

        experiments = [e.experiment_id for e in self.client.search_experiments()]
        wanted = f"tags.`mhar.run_key` = '{run_key}'"
        return list(self.client.search_runs(experiments, wanted, run_view_type=ViewType.ALL))

    def points(self, run_id: str, name: str) -> list[tuple[int, float]]:
        """All (step, value) points of a metric, doubles too."""
        return sorted((m.step, m.value) for m in self.client.get_metric_history(run_id, name))


class Server:
    """``mlflow server`` on a loopback port, still starting until ``uri`` is asked for."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._log = folder / "server.log"
        store = f"sqlite:///{folder / 'server.db'}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", HOST),
                    *("--port", str(self._port), "--workers", "1"),
                ],
                cwd=folder,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def uri(self) -> str:
        uri = f"http://{HOST}:{self._port}"

        def healthy() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urlopen(f"{uri}/health", timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_for(healthy, 120, f"mlflow server, see {self._log}")
        return uri

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """:func:`wait_for`"""
    return wait_for


@pytest.fixture(scope="session")
def make_proxy() -> type[Proxy]:
    """:class:`Proxy`"""
    return Proxy


@pytest.fixture(scope="session")
def make_store() -> type[Store]:
    """:class:`Store`"""
    return Store


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what tracking sets for mlflow in its own process, where a test runs it in this one."""
    for name in ("REQUEST_TIMEOUT", "REQUEST_MAX_RETRIES", "RESPECT_RETRY_AFTER_HEADER"):
        monkeypatch.setenv(f"MLFLOW_HTTP_{name}", "")
        monkeypatch.delenv(f"MLFLOW_HTTP_{name}")


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow_server"))
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _early_server(request: pytest.FixtureRequest) -> None:
    """Start the server before the first test where one will need it: it comes up beside the others."""
    if any("mlflow_server" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("_server")


@pytest.fixture(scope="session")
def mlflow_server(_server: Server) -> str:
    """URI of a real MLflow server."""
    return _server.uri


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty_store")
    Store(f"sqlite:///{folder / 'mlflow.db'}").client.search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def store_dir(tmp_path: Path, _empty_store: Path) -> Path:
    """A folder with an empty sqlite store, mlflow.db, as an earlier run would have left it."""
    shutil.copy(_empty_store, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def local_store(store_dir: Path) -> Store:
    """The store in ``store_dir``."""
    return Store(f"sqlite:///{store_dir / 'mlflow.db'}")
