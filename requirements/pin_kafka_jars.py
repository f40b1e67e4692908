"""Write eventlog/broker/kafka_jars.txt: what `KAFKA_VERSION` and its log binding resolve to on Maven Central.

    uv run --no-project --with jgo==3.2.0 python requirements/pin_kafka_jars.py 4.1.0 1.7.36

The second version is that of slf4j-simple: the one of the slf4j-api that this Kafka resolves to. Every jar is compared
with the SHA-1 that Maven Central tells of it (not all have a SHA-256 there). Then look through the difference.
"""

import hashlib
import sys
import tempfile
import urllib.request
from pathlib import Path

from jgo.env import EnvironmentBuilder  # pyright: ignore[reportMissingImports]
from jgo.maven import MavenContext  # pyright: ignore[reportMissingImports]

MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
TARGET = Path(__file__).resolve().parents[1] / "eventlog" / "kafka_jars.txt"


def main(kafka: str, slf4j: str) -> None:
    endpoint = f"org.apache.kafka:kafka_2.13:{kafka}+org.slf4j:slf4j-simple:{slf4j}"
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "maven"
        context = MavenContext(repo_cache=repository, remote_repos={"central": MAVEN_CENTRAL}, timeout=60)
        EnvironmentBuilder(context=context, cache_dir=Path(folder)).from_endpoint(endpoint=endpoint, update=True)
        lines = [_line(jar, repository) for jar in sorted(repository.rglob("*.jar"))]
    TARGET.write_text("".join(lines), encoding="ascii")


def _line(jar: Path, repository: Path) -> str:
    path, content = jar.relative_to(repository).as_posix(), jar.read_bytes()
    with urllib.request.urlopen(f"{MAVEN_CENTRAL}/{path}.sha1", timeout=60) as answer:
        published = answer.read().decode().split()[0]
    if hashlib.sha1(content).hexdigest() != published:
        raise SystemExit(f"{path}: its SHA-1 differs from that of Maven Central")
    return f"{hashlib.sha256(content).hexdigest()}  {path}\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
