"""What pip installs into the image, and at which versions, on top of what the base image has.

Writes two files into the working directory: ``requirements.txt``, the project's dependencies and those of the extras
asked for; and ``pins.txt``, pip's constraints. The base's GPU stack is pinned to the very version that is there, so
that pip can neither replace nor shadow it. What the base lacks, or has at a version that this project refuses, is
pinned to the tested set. Anything else of the base has no pin: pip keeps it unless another package refuses it.

Runs under the Python that will import the packages, before anything is installed; needs pip beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement  # a base need not have packaging itself

# Built against the driver, CUDA and each other by whoever made the base: names as pip normalises them.
STACK = ("torch*", "*triton", "transformer-engine*", "apex", "nvidia-*", "cuda-*", "flash-attn*", "tensorrt*")


def normalised(name: str) -> str:
    """A distribution's name as pip compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(path: list[str] | None = None) -> dict[str, str]:
    """Versions by normalised name of the distributions on ``path`` (``sys.path`` by default)."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions(path=sys.path if path is None else path):
        name = distribution.metadata.get("Name")
        if name:  # what is left of a removed package has none
            found.setdefault(normalised(name), distribution.version)  # the first is the one that is imported
    return found


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Requirement lines of a pyproject's table ``project``; exits where an extra is unknown."""
    optional: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    lines = list(project["dependencies"])
    for extra in extras:
        if extra not in optional:
            sys.exit(f"EXTRAS: {extra!r} given; allowed: {', '.join(optional)}, joined by commas")
        lines += optional[extra]
    return lines


def is_kept(name: str) -> bool:
    """Whether a distribution of the base, by its normalised name, is of the stack that stays."""
    return any(fnmatch(name, pattern) for pattern in STACK)


def pins(tested: str, base: Mapping[str, str], wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """Constraints of two kinds: what stays of the base at its version, and what is added at the tested one.

    Exits where the base's stack itself is refused by the project: such a base cannot be used.

    Args:
        tested: text of constraints.txt, lines of ``name==version``.
        base: versions in the base image by normalised name.
        wanted: requirement lines of the project.
    """
    fitting = dict(base)
    for requirement in map(Requirement, wanted):
        name = normalised(requirement.name)
        # NVIDIA's builds have the version of the release to come, "2.14.0a0+...".
        if name not in base or requirement.specifier.contains(base[name], prereleases=True):
            continue
        if is_kept(name):
            sys.exit(
                f"BASE_IMAGE: its {name} is {base[name]}, but this project needs {requirement}; take another release"
            )
        del fitting[name]
    kept = [f"{name}=={version}" for name, version in sorted(base.items()) if is_kept(name)]
    lines = (line.partition("#")[0].strip() for line in tested.splitlines())
    added = [line for line in lines if line and normalised(line.partition("==")[0]) not in fitting]
    return kept, added


def main() -> None:
    """Write ``requirements.txt`` and ``pins.txt``, and say what stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("constraints", type=Path)
    parser.add_argument("--extras", default="", help="extras of the project, joined by commas")
    arguments = parser.parse_args()

    project = tomllib.loads(arguments.pyproject.read_text())["project"]
    extras = [extra for extra in re.split(r"[,\s]+", arguments.extras) if extra]
    wanted = requirements(project, extras)
    kept, added = pins(arguments.constraints.read_text(), installed(), wanted)
    Path("requirements.txt").write_text("".join(f"{line}\n" for line in wanted))
    Path("pins.txt").write_text("".join(f"{line}\n" for line in [*kept, *added]))
    print(f"Kept from the base image: {', '.join(kept) or 'nothing, it has no GPU stack'}")


if __name__ == "__main__":
    main()
