"""The README for a package index, on which relative links lead nowhere; all else is in pyproject.toml."""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<path>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")


def with_addresses(text: str, files: str) -> str:
    """Return Markdown whose relative links begin with the address of the repository's files; pictures ask for the file itself."""

    def absolute(link: re.Match[str]) -> str:
        ending = "?raw=true" if link["picture"] else link["anchor"] or ""
        return f"{link['picture']}{link['text']}({files.rstrip('/')}/{link['path']}{ending})"

    return LINK.sub(absolute, text) if files else text


settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
setup(
    long_description=with_addresses(
        (ROOT / "README.md").read_text(encoding="utf-8"), settings["tool"]["site"]["files"]
    ),
    long_description_content_type="text/markdown",
)
