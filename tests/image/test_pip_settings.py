"""docker/pip_settings.py: what leads to a package index here leads to it from inside a build, and nothing else does."""

from __future__ import annotations

import configparser
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/pip_settings.py"


@pytest.fixture(scope="module")
def pip_settings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pip_settings", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# As pip config list prints it, in its order.
LISTING = r"""
:env:.find-links=''
:env:.trusted-host='mine.invalid'
download.proxy='http://another.invalid:1'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='file:///srv/pypi/simple\nhttps://more.invalid/simple'
global.find-links='/srv/wheels'
global.index-url='https://machine.invalid/simple'
global.no-cache-dir='true'
global.trusted-host='machine.invalid'
install.index-url='https://install.invalid/simple'
"""


def test_what_pip_install_would_take_without_folders(pip_settings: ModuleType) -> None:
    kept, left_out = pip_settings.for_a_build(pip_settings.effective(LISTING))
    assert kept == {
        "index-url": "https://install.invalid/simple",
        "extra-index-url": "https://more.invalid/simple",
        "trusted-host": "mine.invalid",
    }
    assert left_out == ["file:///srv/pypi/simple", "/srv/wheels"]  # an empty variable counts as none, as pip has it


def test_certificates_are_those_that_pip_trusts_here(pip_settings: ModuleType, tmp_path: Path) -> None:
    own, other = (tmp_path / name for name in ("own.pem", "other.pem"))
    own.touch()
    other.touch()
    assert pip_settings.certificates({"cert": str(own)}, {"SSL_CERT_FILE": str(other)}) == str(own)
    assert pip_settings.certificates({}, {"SSL_CERT_FILE": str(other)}) == str(other)
    missing = pip_settings.certificates({"cert": str(tmp_path / "gone")}, {})
    assert missing in ("", pip_settings.CERTIFICATES)


def test_the_file_holds_what_pip_says_of_this_machine(tmp_path: Path) -> None:
    own = tmp_path / "own.pem"
    own.touch()
    index, links = "https://me:secret%40@mine.invalid/simple", "/srv/wheels https://a.invalid/ https://b.invalid/"
    variables = {"PIP_INDEX_URL": index, "PIP_FIND_LINKS": links, "PIP_CERT": str(own)}
    target = tmp_path / "pip.conf"
    done = subprocess.run(
        [sys.executable, SCRIPT, target], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(own)
    assert "/srv/wheels" in done.stderr
    assert target.stat().st_mode & 0o777 == 0o600  # an address may hold a password
    assert "secret" not in done.stdout + done.stderr
    file = configparser.RawConfigParser()
    file.read(target)
    assert file["global"]["index-url"] == index
    assert file["global"]["find-links"].split() == ["https://a.invalid/", "https://b.invalid/"]
    assert file["global"]["cert"] == "/etc/ssl/certs/ca-certificates.crt"  # where the build mounts them
