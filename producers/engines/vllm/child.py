"""`vllm serve` as a child process: on a free port of 127.0.0.1, ended with its parent, started again after it ends."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.broker import guard
from rollstream.eventlog.broker.credentials import HOST
from rollstream.eventlog.broker.ports import free_ports
from rollstream.eventlog.broker.restarts import Restarts
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ConfigError, ModelError
from rollstream.schemas.variables import one_line

OPTIONAL = "--enable-scale-out"
"""Offers exact tokens and version spans; not known to every vLLM."""
REPLICAS = ("--data-parallel", "--api-server-count")
SHORT_REPLICAS = ("-dp", "-asc")
ADDRESS = ("--host", "--port", "--uds", "--api-key", "--config", "--headless", "--served-model-name", "--model")
OURS = {
    "--dtype": "engine.dtype",
    "--max-loras": "engine.max_loras",
    "--max-lora-rank": "engine.max_lora_rank",
    "--enable-lora": "the adapters that the learner publishes",
    "--no-enable-lora": "the adapters that the learner publishes",
    "--logprobs-mode": "what the learner needs",
    "--max-logprobs": "what the learner needs",
    "--generation-config": "the run's sampling",
    "--override-generation-config": "the run's sampling",
}
"""Arguments that an engine sets itself, and the settings that decide them. vLLM would take the last one it is given."""
PASSED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
        *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TOKENIZERS_PARALLELISM"),
    }
)
"""Variables of this process that a server gets."""
PASSED_PREFIXES = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "ROCR_", "HIP_", "HSA_", "ROCM_", "ONEAPI_", "ZE_"),
    *("VLLM_", "HF_", "TRANSFORMERS_", "SAFETENSORS_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
)
"""Beginnings of the names of others that it gets."""
WITHHELD = frozenset({"VLLM_API_KEY"})
"""A server with a key would refuse us: it is reached from this machine alone."""
LAST_BYTES = 16_384
LAST_LINES = 3


def check_settings(settings: VllmSettings) -> None:
    """Raises ConfigError for arguments that cannot be, or if the program is not there."""
    for argument in settings.arguments:
        if fault := _fault_of(argument):
            raise ConfigError(f"engine.arguments: {fault}")
    if not settings.base_urls and shutil.which(settings.executable) is None:
        raise ConfigError(
            f"engine.executable: {settings.executable!r} is not found; give the command vllm of the environment that "
            "vLLM is installed in, such as /opt/vllm/bin/vllm"
        )


def _fault_of(argument: str) -> str | None:
    """The reason why an argument must not be passed to vLLM, which takes `_` for `-`, and the beginning of a name for
    the name; None if it may.
    """
    name = argument.partition("=")[0].replace("_", "-").partition(".")[0]
    if not name.startswith("--"):
        is_replicas = name.startswith(SHORT_REPLICAS)
    else:
        is_replicas = any(_means(name, one) for one in REPLICAS) or name.startswith(REPLICAS)
        if decided := next((by for one, by in OURS.items() if _means(name, one)), None):
            return f"{argument} is given to vLLM already, from {decided}; leave it out"
    if is_replicas or any(_means(name, one) for one in ADDRESS):
        return (
            f"{argument} is not for a server that is started here; run servers of your own, with one API server and no "
            "data-parallel replicas, and name them as base_urls"
        )
    return None


def _means(name: str, full: str) -> bool:
    return len(name) > 3 and full.startswith(name)


class Child:
    """A server that we start."""

    def __init__(self, settings: VllmSettings, base_model: str, *, is_lora: bool, log: Path) -> None:
        self._settings = settings
        self._base_model = base_model
        self._is_lora = is_lora
        self._log = log
        self._guard: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts()
        self._start_at = 0.0
        self._has_option = True
        self._started_at = 0.0
        """Monotonic seconds."""
        self._has_served = False
        """Whether it was of use since it was started."""
        self.port = 0
        self._pid = 0

    @property
    def pid(self) -> int | None:
        """Process id of the server itself."""
        return self._pid if self._guard is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def must_answer(self) -> bool:
        """Whether it lives and no longer has the excuse that it starts: it has served, or had `start_timeout_s` to."""
        is_late = time.monotonic() - self._started_at > self._settings.start_timeout_s
        return self.is_running and (self._has_served or is_late)

    def start_if_due(self) -> bool:
        """Start it if it does not run and it is time to; returns whether it was started.

        Raises ModelError if it ended too often without serving.
        """
        if self.is_running:
            return False
        if self._guard is not None:
            self._take_end()
        if time.monotonic() < self._start_at:
            return False
        self._start()
        return True

    def served(self) -> None:
        """It is of use: what it ended of before no longer counts."""
        self._restarts.reset()
        self._has_served = True

    async def stop(self) -> None:
        """End it, whether it runs or not."""
        running, self._guard = self._guard, None
        if running is not None:
            assert running.stdin is not None
            running.stdin.close()
            await in_own_thread(running.wait)

    def last_words(self) -> str:
        """Last lines of its log."""
        try:
            text = self._log.read_bytes()[-LAST_BYTES:].decode(errors="replace")
        except OSError:
            return "(no log output)"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "rror:" in line] or lines
        return " | ".join(one_line(line) for line in errors[-LAST_LINES:]) or "(no log output)"

    def _take_end(self) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        code, self._guard = self._guard.returncode, None
        if self._has_option and OPTIONAL in self.last_words():
            self._has_option = False
            return
        self._start_at = time.monotonic() + self._restarts.add()
        if self._restarts.are_too_many:
            raise ModelError(
                f"{self._settings.executable} serve {self._base_model} ended {self._restarts.count} times, the last "
                f"with status {code}: {self.last_words()}; see {self._log}"
            )

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(self._log), *self.command()]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(os.environ, is_lora=self._is_lora)
        )
        assert self._guard.stdout is not None
        with self._guard.stdout as output:
            self._pid = int(output.readline() or 0)
        self._started_at, self._has_served = time.monotonic(), False

    def command(self) -> list[str]:
        """The command that starts it on `port`."""
        settings = self._settings
        lora = ["--enable-lora", f"--max-loras={settings.max_loras}", f"--max-lora-rank={settings.max_lora_rank}"]
        return [
            settings.executable,
            "serve",
            self._base_model,
            f"--host={HOST}",
            f"--port={self.port}",
            f"--dtype={settings.dtype}",
            "--logprobs-mode=processed_logprobs",
            "--max-logprobs=-1",
            "--generation-config=vllm",
            *(lora if self._is_lora else ()),
            *((OPTIONAL,) if self._has_option else ()),
            *settings.arguments,
        ]


def environment(env: Mapping[str, str], *, is_lora: bool) -> dict[str, str]:
    """Environment variables of the server: those of this process that it needs to find its libraries, devices, models
    and the network.
    """
    kept = {
        name: value
        for name, value in env.items()
        if (name in PASSED or name.startswith(PASSED_PREFIXES)) and name not in WITHHELD
    }
    lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if is_lora else {}
    return {**kept, **lora, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
