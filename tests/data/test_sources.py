"""Which files are read, what is taken from them, and that nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_mhar.data import sources
from megatron_mhar.data.sources import MIN_CHARACTERS, TextFile, clean, installed_text_files, read_documents

LONG = "The quick brown fox jumps over the lazy dog. " * 20
assert len(LONG.strip()) > MIN_CHARACTERS


def write(path: Path, text: str) -> TextFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return TextFile("package", path.name, path)


def test_docstrings_of_modules_classes_and_functions_without_import(tmp_path: Path) -> None:
    file = write(
        tmp_path / "module.py",
        f'"""Module. {LONG}"""\n'
        "raise SystemExit('imported')\n"
        "class Outer:\n"
        f'    """Class. {LONG}"""\n'
        "    async def method(self):\n"
        f"        '''Method. {LONG}'''\n"
        "        def inner():\n"
        f'            """Inner. {LONG}"""\n'
        "try:\n"
        "    if True:\n"
        f'        def guarded(): "Guarded. {LONG}"\n'
        "except ImportError:\n"
        "    def short():\n"
        '        """Too short to keep."""\n'
        f'text = """Not a docstring. {LONG}"""\n',
    )
    assert [document.split(".")[0] for document in read_documents(file)] == [
        "Module",
        "Class",
        "Method",
        "Inner",
        "Guarded",
    ]


def test_docstring_is_dedented_and_cleaned(tmp_path: Path) -> None:
    file = write(tmp_path / "module.py", f'def f():\n    """First.  \n\n\n\n    \\x00Second. {LONG}\n    """\n')
    assert read_documents(file) == [f"First.\n\nSecond. {LONG}".strip()]


@pytest.mark.parametrize(
    "text",
    [f'def broken(:\n    """{LONG}"""', f'"""{LONG}"""\0', "(" * 100_000 + f'"""{LONG}"""'],
    ids=["syntax", "null byte", "too deep"],
)
def test_a_file_that_does_not_parse_holds_nothing(tmp_path: Path, text: str) -> None:
    assert read_documents(write(tmp_path / "module.py", text)) == []


def test_a_file_that_is_gone_or_binary_holds_nothing(tmp_path: Path) -> None:
    assert read_documents(TextFile("package", "gone.py", tmp_path / "gone.py")) == []
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 1000)
    assert read_documents(TextFile("package", "binary.txt", tmp_path / "binary.txt")) == []


def test_documentation_files_are_whole_documents_and_bounded(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path / "README.md", f"# Title\r\n\r\n{LONG}\n")) == [f"# Title\n\n{LONG}".strip()]
    assert read_documents(write(tmp_path / "short.rst", "word " * 10)) == []
    assert read_documents(write(tmp_path / "huge.txt", "word " * (sources.MAX_CHARACTERS // 5 + 1))) == []


@pytest.mark.parametrize(
    "text",
    [f"Name: x\nVersion: 1\n\n{LONG}\n", f"Name: x\nDescription: {LONG}\n\n"],
    ids=["body", "header of the old form"],
)
def test_long_description_without_headers(tmp_path: Path, text: str) -> None:
    assert read_documents(write(tmp_path / "METADATA", text)) == [LONG.strip()]


def test_language_reference_is_read_from_its_dict() -> None:
    (file,) = [file for file in installed_text_files() if file.name == "pydoc_data/topics.py"]
    documents = read_documents(file)
    assert file.package == "python"
    assert len(documents) > 20
    assert any("with" in document and "context manager" in document for document in documents)


def test_lone_surrogates_are_dropped() -> None:
    assert clean("a\ud800b") == "ab"


def test_installed_package_is_found_once_and_licences_and_tests_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for version in ("1.0", "0.9"):  # the second is shadowed on the path
        root = tmp_path / version / "site-packages"
        places.append(str(root))
        listed = ["pkg/a.py", "pkg/README.rst", "pkg/LICENSE.txt", "pkg/tests/b.py", "pkg/data.csv", "../bin/script.py"]
        info = root / "Some_Package.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: Some_Package\nVersion: {version}\n\n{LONG}")
        write(info / "RECORD", "".join(f"{name},,\n" for name in [*listed, "Some_Package.dist-info/METADATA"]))
        for name in listed:
            write(root / name, LONG)
    monkeypatch.setattr(sys, "path", [*places, *sys.path])

    found = [file for file in installed_text_files() if file.package == "some-package"]
    assert {file.name for file in found} == {"pkg/a.py", "pkg/README.rst", "Some_Package.dist-info/METADATA"}
    assert all(file.path.is_relative_to(tmp_path / "1.0") for file in found)
    assert sources.installed_packages()["some-package"] == "1.0"
    assert "megatron-mhar" not in sources.installed_packages()


def test_standard_library_without_its_tests() -> None:
    names = {file.name for file in installed_text_files() if file.package == "python"}
    assert "argparse.py" in names and "email/message.py" in names
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)
