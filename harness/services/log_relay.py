"""What services log as errors, passed on to who watches the run: each thing once, and not without end."""

import re
from pathlib import Path

MAX_RELAYED = 20
"""Errors told in one run; the logs have them all."""
MAX_BYTES = 256 * 1024
"""Read of one log at a time; of more, the newest."""
_ERROR = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) rollstream\.[\w.]+: (.*)")


class LogRelay:
    """Reads on in the logs of a folder from where they ended when it was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = {path.name: path.stat().st_size for path in folder.glob("*.log")}
        self._told: set[str] = set()

    def news(self, names: list[str]) -> list[str]:
        """Errors that the named services logged since the last call, as `service: message`; repeats are left out."""
        found: list[str] = []
        for name in names:
            for line in self._new_lines(self._folder / f"{name}.log"):
                match = _ERROR.match(line)
                text = f"{name}: {match.group(1)}" if match else ""
                if text and text not in self._told and len(self._told) < MAX_RELAYED:
                    self._told.add(text)
                    found.append(text)
        return found

    def _new_lines(self, path: Path) -> list[str]:
        """Whole lines only; the rest is read with the next call."""
        if not path.exists():
            return []
        size, begin = path.stat().st_size, self._offsets.get(path.name, 0)
        if size <= begin:
            return []
        with path.open("rb") as file:
            file.seek(max(begin, size - MAX_BYTES))
            data = file.read()
            end = file.tell()
        whole = data.rfind(b"\n") + 1
        self._offsets[path.name] = end - (len(data) - whole)
        return data[:whole].decode("utf-8", "replace").splitlines()
