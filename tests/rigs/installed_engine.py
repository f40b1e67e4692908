"""A package with a rollout engine in one file, which an entry point of the group `rollstream.engines` names."""

from pathlib import Path

PARROT = '''
"""An engine that repeats the end of its prompt."""

from typing import Literal

from rollstream.producers import Capabilities, EngineKind, Generation
from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.schemas.engine_settings import EngineSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events.rollouts import VersionSpan


class ParrotSettings(EngineSettings):
    kind: Literal["parrot"] = "parrot"
    num_tokens: int = 1
    api_key: str = ""


class Parrot:
    capabilities = Capabilities(loads_models=False)

    def __init__(self, settings):
        self.settings = settings
        self._versions = {}
        self._tokenizer = ScriptedTokenizer()

    async def start(self):
        pass

    async def close(self):
        self._versions.clear()

    async def generate(self, request):
        group, version = request.model_group, self.version(request.model_group)
        if version < 0:
            raise ModelError(f"model group {group} has no weights yet")
        said = tuple(request.prompt_ids[-1 - self.settings.num_tokens : -1])[: request.sampling.max_new_tokens]
        span = VersionSpan(model_group=group, version=version, length=len(said))
        return Generation(said, (-0.5,) * len(said), (span,), "length")

    def tokenizer(self, model_group):
        return self._tokenizer

    def version(self, model_group):
        return self._versions.get(model_group, -1)

    async def load(self, published, path):
        self._versions[published.model_group] = published.version

    async def unload(self, model_group):
        self._versions.pop(model_group, None)


PARROT = EngineKind(ParrotSettings, Parrot)
'''


def install(folder: Path, name: str, source: str, **kinds: str) -> None:
    """A package of one module; `kinds`: entry points, each a name in the module."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{kind} = {name}:{attribute}" for kind, attribute in kinds.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[rollstream.engines]", *lines, ""]))
