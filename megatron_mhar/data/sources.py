"""Real text that every machine with a Python environment already has: its documentation.

Docstrings are read from the sources of the standard library and of installed packages without importing them;
documentation files and the long descriptions in packages' metadata come beside them.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from importlib import metadata
from pathlib import Path, PurePath
from platform import python_version

MIN_CHARACTERS = 600  # shorter docstrings are mostly one-line summaries and argument lists
MAX_CHARACTERS = 100_000  # longer files are generated tables and change logs

_OWN_PACKAGE = "megatron-mhar"  # left out: the corpus must not change with every commit
_STANDARD_LIBRARY = "python"
_LANGUAGE_REFERENCE = "pydoc_data/topics.py"  # the Python manual as one dict of strings
_DOCUMENTATION = frozenset({".rst", ".md", ".txt"})
_DESCRIPTIONS = frozenset({"METADATA", "PKG-INFO"})
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_SKIPPED_FOLDERS = _PACKAGE_FOLDERS | {"test", "tests", "idle_test", "__pycache__", "licenses"}
_SKIPPED_NAMES = re.compile(r"licen[sc]e|copying|notice|authors|top_level|entry_points|sources\.txt", re.IGNORECASE)

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TRAILING_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class TextFile:
    """A file that may hold documentation.

    Attributes:
        package: distribution it belongs to, ``python`` for the standard library.
        name: path inside the package, with forward slashes; the same on every machine.
        path: where it lies here.
    """

    package: str
    name: str
    path: Path


def installed_packages() -> dict[str, str]:
    """Version of every installed distribution by its name, and of Python itself, sorted by name."""
    found = {name: distribution.version for name, distribution in _distributions().items()}
    found[_STANDARD_LIBRARY] = python_version()
    return dict(sorted(found.items()))


def installed_text_files() -> list[TextFile]:
    """Every file of the standard library and of installed packages that may hold documentation, each once."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in root.rglob("*.py"):
        inside = path.relative_to(root)
        if _may_document(inside):
            files[path] = TextFile(_STANDARD_LIBRARY, inside.as_posix(), path)
    for package, distribution in sorted(_distributions().items()):
        for name in distribution.files or ():
            if _may_document(name):
                path = Path(str(distribution.locate_file(name)))
                # Some distributions list the same file (mlflow and mlflow-skinny do).
                files.setdefault(path, TextFile(package, name.as_posix(), path))
    return list(files.values())


def read_documents(file: TextFile) -> list[str]:
    """Documents of one file: cleaned, in file order, each of ``MIN_CHARACTERS`` to ``MAX_CHARACTERS`` characters.

    A file that is gone, is not UTF-8 or does not parse holds none.
    """
    try:
        text = file.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if file.path.name in _DESCRIPTIONS:
        found = iter([_long_description(text)])
    elif file.path.suffix == ".py":
        found = _docstrings(text, reference=file.name == _LANGUAGE_REFERENCE)
    else:
        found = iter([text])
    documents = (clean(document) for document in found)
    return [document for document in documents if MIN_CHARACTERS <= len(document) <= MAX_CHARACTERS]


def clean(text: str) -> str:
    """``text`` without control characters, lone surrogates, trailing blanks and runs of blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8", "ignore").decode("utf-8")
    text = _TRAILING_BLANKS.sub("", _CONTROL.sub("", text))
    return _BLANK_LINES.sub("\n\n", text).strip()


def _distributions() -> dict[str, metadata.Distribution]:
    """Installed distributions by normalised name; of two with one name, the one that would be imported."""
    found: dict[str, metadata.Distribution] = {}
    # Not the whole search path: importing setuptools adds its private copies of packages to it.
    places = [place for place in sys.path if Path(place).name in _PACKAGE_FOLDERS]
    for distribution in metadata.distributions(path=places):
        name = distribution.metadata["Name"]
        if name:  # a half-removed package has none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    found.pop(_OWN_PACKAGE, None)
    return found


def _may_document(name: PurePath) -> bool:
    if name.is_absolute() or ".." in name.parts or not _SKIPPED_FOLDERS.isdisjoint(name.parts):
        return False
    if name.suffix == ".py" or name.name in _DESCRIPTIONS:
        return True
    return name.suffix.lower() in _DOCUMENTATION and not _SKIPPED_NAMES.search(name.name)


def _long_description(text: str) -> str:
    message = message_from_string(text)
    body = message.get_payload()
    return body if isinstance(body, str) and body.strip() else str(message.get("Description", ""))


def _docstrings(source: str, *, reference: bool) -> Iterator[str]:
    # Parsing takes nearly all the time: files without a long string are told apart by their quotes.
    longest = max((len(part) for quotes in ('"""', "'''") for part in source.split(quotes)[1:-1]), default=0)
    if longest < MIN_CHARACTERS and not reference:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield docstring
        # Statements alone: definitions are found inside "if" and "try" too, and expressions are most of the tree.
        for block in ("finalbody", "orelse", "handlers", "body"):
            pending.extend(reversed(getattr(node, block, ())))
    if reference:
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for value in node.values:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.value
