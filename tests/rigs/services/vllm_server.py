"""A real vLLM server on the CPU with a tiny model, for tests marked `vllm`; `make test-vllm` says where vLLM is."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollstream.eventlog.broker import guard
from rollstream.eventlog.broker.credentials import HOST
from rollstream.eventlog.broker.ports import free_ports
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.vllm.child import Child
from rollstream.producers.engines.vllm.vllm_server import UNLABELLED
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.variables import expand
from tests.producers.engines.engine_rig import published

EXECUTABLE = "ROLLSTREAM_VLLM"
MAX_LORAS = 4
MAX_LENGTH = 512
START_S = 300.0
ARGUMENTS = ("--enforce-eager", "--max-num-seqs=64")
WHOLE_PROMPTS = (*ARGUMENTS, "--no-enable-chunked-prefill")
"""Arguments of a server with so many concurrent requests that prompts would be prefilled in parts (docs/engines.md)."""
RANK = 4
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def executable() -> str:
    """The command of the environment that `make test-vllm` builds."""
    found = os.environ.get(EXECUTABLE, "")
    assert found, f"{EXECUTABLE} does not name vLLM's command; run `make test-vllm`"
    return found


def started_settings(**changes: Any) -> VllmSettings:
    """Settings of an engine that starts a server of its own."""
    given: dict[str, Any] = {
        "executable": executable(),
        "arguments": ARGUMENTS,
        "dtype": "float32",
        "max_loras": MAX_LORAS,
        "max_lora_rank": 8,
    }
    return VllmSettings(**(given | changes))


def tiny_base(folder: Path, *, is_tied: bool = False, max_length: int = MAX_LENGTH) -> Path:
    """A model that vLLM's attention on the CPU can be computed with: its heads have 32 dimensions.

    Its head is one of its own: of tied ones vLLM 0.32 keeps the first on the CPU, whatever is loaded.
    """
    base = make_tiny_model(folder / "model", seed=0, num_layers=1, hidden_size=128, max_length=max_length)
    if not is_tied:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        weights = load_file(base / "model.safetensors")
        head = weights["model.embed_tokens.weight"].clone()
        save_file({**weights, "lm_head.weight": head}, base / "model.safetensors", {"format": "pt"})
    return base


def lora_version(base: Path, folder: Path, version: int) -> tuple[WeightsPublished, Path]:
    """An adapter of which every version answers differently."""
    path, generator = folder / f"lora-{version}.safetensors", torch.Generator().manual_seed(version)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(base / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in sorted(weights.keys())}
    for name, shape in shapes.items():
        if name.endswith("q_proj.weight"):
            stem, (width_out, width_in) = name.removesuffix(".weight"), shape
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.randn(RANK, width_in, generator=generator)
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.randn(width_out, RANK, generator=generator)
    save_file(tensors, path)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    sha256 = f"{version:08d}" + "0" * 56
    return published(base, version, weights_format="lora", lora=config, weights_sha256=sha256), path


def full_version(base: Path, folder: Path, version: int) -> tuple[WeightsPublished, Path]:
    """All weights, of which every version answers differently."""
    path, generator = folder / f"full-{version}.safetensors", torch.Generator().manual_seed(version)
    state = load_file(base / "model.safetensors")
    save_file({name: one + 0.1 * torch.randn(one.shape, generator=generator) for name, one in state.items()}, path)
    return published(base, version, weights_sha256=f"{version:08d}" + "0" * 56), path


def scaled_version(base: Path, folder: Path, version: int) -> tuple[WeightsPublished, Path]:
    """All weights of a large model, whose last norm alone differs by version."""
    path = folder / f"scaled-{version}.safetensors"
    state = load_file(base / "model.safetensors")
    norm = state["model.norm.weight"]
    save_file({**state, "model.norm.weight": norm * (1 + torch.arange(len(norm)) % (version + 2) / 4).to(norm)}, path)
    return published(base, version, weights_sha256=f"{version:08d}" + "0" * 56), path


@dataclass
class VllmServer:
    """A server that answers."""

    base: Path
    child: Child

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.child.port}"

    def ask(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """Its answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        made = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.urlopen(made, timeout=60) as answered:
            text = answered.read()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def restore(self) -> None:
        """Give it its base weights again, if it has others."""
        if self.ask("/weight_info", method="GET")["weight_version"] == UNLABELLED:
            return
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.base)}})
        self.ask("/reset_prefix_cache?reset_running_requests=true")
        self.ask("/update_weight_version", {"new_version": UNLABELLED})

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            self.child.start_if_due()
            try:
                self.ask("/health", method="GET")
            except OSError:
                assert time.monotonic() < deadline, self.child.last_words()
                time.sleep(0.1)
            else:
                return


class ComposedServer:
    """A service `vllm-N` of docker-compose.yml as a local process: its own command, environment and health check."""

    def __init__(self, service: Mapping[str, Any], base: Path, folder: Path) -> None:
        self._service = service
        (self._port,) = free_ports(1)
        self._env = {**ENVIRONMENT, "ROLLSTREAM_VLLM_MODEL": str(base), "ROLLSTREAM_VLLM_KVCACHE_GB": "1"}
        self._log = folder / f"server-{self._port}.log"
        self.url = f"http://{HOST}:{self._port}"
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def start(self) -> None:
        """Start at the address that it always has."""
        program, *entry = self._service["entrypoint"]
        assert program == "vllm"
        written = [*entry, *(str(expand(one, self._env)) for one in self._service["command"])]
        assert {"--host=0.0.0.0", "--port=8000"} < set(written)
        replaced = {"--host=0.0.0.0": f"--host={HOST}", "--port=8000": f"--port={self._port}"}
        command = [executable(), *(replaced.get(one, one) for one in written)]
        environment = {name: str(expand(one, self._env)) for name, one in self._service["environment"].items()}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(self._log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._env, **environment},
        )
        assert self._guard.stdout is not None
        self._pid = int(self._guard.stdout.readline())

    def is_healthy(self) -> bool:
        """Result of the service's own health check."""
        kind, _, *arguments = self._service["healthcheck"]["test"]
        assert kind == "CMD"
        local = [one.replace("http://127.0.0.1:8000", self.url) for one in arguments]
        assert local != arguments
        return subprocess.run([sys.executable, *local], capture_output=True, timeout=60).returncode == 0

    def kill(self) -> None:
        """SIGKILL for the server and its workers, at once."""
        server = psutil.Process(self._pid)
        for process in (server, *server.children(recursive=True)):
            process.kill()
        self.stop()

    def stop(self) -> None:
        """Until it has ended."""
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def last_words(self) -> str:
        """End of its log."""
        return self._log.read_text(errors="replace")[-3000:]


@contextmanager
def serving(folder: Path, *, is_lora: bool = True, base: Path | None = None, **changes: Any) -> Iterator[VllmServer]:
    """A server that has begun to answer, and ends with the block. `base`: its model, else a tiny one of its own."""
    os.environ.update(ENVIRONMENT)
    base = base or tiny_base(folder)
    child = Child(started_settings(**changes), str(base), is_lora=is_lora, log=folder / "server.log")
    try:
        server = VllmServer(base, child)
        server.wait()
        yield server
    finally:
        asyncio.run(child.stop())
