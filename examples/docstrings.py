"""Real English text that lies on every machine with this project: the docstrings of its own dependencies.

They are read from the source files, nothing is imported. `make setup` pins the packages, so two machines get the same
text. It serves twice: as the text of another kind that a byte model is fine-tuned on after the standard library's
source code, and, with the package of origin as the label, as a classification task.

Files, not docstrings, are split into training and validation: docstrings of one file are often near copies.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("lightning", "networkx", "numpy", "sympy", "torch", "torchmetrics")
_VALIDATION_SHARE = 0.2
_NAMES = re.compile(rf"(?i){'|'.join(sorted(PACKAGES, key=len, reverse=True))}|\bnp\b|\bnx\b")


class Docstring(NamedTuple):
    """One docstring, and where it is from."""

    text: str
    package: str
    validation: bool
    """Whether its file belongs to the validation part."""


def docstrings(packages: Sequence[str] = PACKAGES, per_package: int = 400, min_chars: int = 200) -> list[Docstring]:
    """Docstrings of installed packages, `per_package` of each at most, the same ones every time.

    A fifth of them is for validation, by file. A text that occurs before, in any package, is left out.

    Args:
        packages: names to import by.
        per_package: the most docstrings of one package.
        min_chars: shorter ones are left out.

    Raises:
        ModuleNotFoundError: a package that is not installed.
    """
    found: list[Docstring] = []
    seen: set[str] = set()
    for package in packages:
        # Counted apart, so that the share of validation does not depend on where the limit falls.
        room = {True: int(per_package * _VALIDATION_SHARE), False: per_package - int(per_package * _VALIDATION_SHARE)}
        for text, validation in _of_package(package, min_chars):
            if text not in seen and room[validation]:
                seen.add(text)
                room[validation] -= 1
                found.append(Docstring(text, package, validation))
            if not any(room.values()):
                break
    return found


def without_names(text: str) -> str:
    """`text` without the packages' names, and numpy's and networkx's short ones: else a name would tell the label."""
    return _NAMES.sub("package", text)


def _of_package(package: str, min_chars: int) -> Iterator[tuple[str, bool]]:
    """The package's docstrings, each with the side its file is on, in the order of the files' hashes."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package!r} is not installed: run `make setup`, or name other packages")
    root = Path(spec.submodule_search_locations[0])
    digests = {path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest() for path in root.rglob("*.py")}
    for path in sorted(digests, key=digests.__getitem__):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some files have escapes that the parser warns of
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # templates and files for another Python
                continue
        # Not the bytes that order the files, or the first files would all be on one side.
        validation = digests[path][-1] < 256 * _VALIDATION_SHARE
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= min_chars:
                    yield text, validation
