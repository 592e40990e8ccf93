"""The package's links, and the README as a package index shows it, made from the project's address.

A package index resolves no relative link. With an address, links lead to the files of the release there, and a badge
shows the tests. Without one, links become plain text, and pictures are left out. `address` in pyproject.toml is the
only place that names the address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:)([^)\s]+)\)")


class PackageMetadata(MetadataHookInterface):
    """The metadata hook that hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = self.config["address"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, address, metadata["version"])}
        metadata["urls"] = urls(address, metadata["version"])


def urls(address: str, version: str) -> dict[str, str]:
    """Return the project's links by their labels, none without an address."""
    if not address:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/v{version}/docs/README.md",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
        "Report a vulnerability": f"{address}/security/advisories/new",
    }


def readme(text: str, address: str, version: str) -> str:
    """Return the README with absolute links and a badge below its title, or without relative links and pictures."""
    if not address:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    release = f"{address}/blob/v{version}/"
    text = _PICTURE.sub(rf"![\1]({address}/raw/v{version}/\2)", text)
    text = _LINK.sub(lambda found: f"[{found[1]}]({'' if found[2][0] == '#' else release}{found[2]})", text)
    tests = f"{address}/actions/workflows/tests.yml"
    title, _, rest = text.partition("\n")
    return f"{title}\n\n[![tests]({tests}/badge.svg)]({tests})\n{rest}"
