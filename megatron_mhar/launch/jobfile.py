"""A Slurm job file as it would run: its options, and the commands it would give, found by running it in dry form.

``slurm/common.sh`` prints the srun commands of a job file instead of running them where MHAR_RENDER is set: what is
checked before submission is what the file does, not what we think it says.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from megatron_mhar.errors import UserError
from megatron_mhar.launch.health import level_of

_SHORT = {"-A": "account", "-a": "array", "-d": "dependency", "-N": "nodes", "-o": "output", "-p": "partition",
          "-t": "time"}  # fmt: skip
_SOURCES_COMMON = re.compile(r"^\s*(?:source|\.)\s.*slurm/common\.sh\b", re.MULTILINE)
_ERROR = "mhar: error: "  # of common.sh
_SITE_VARIABLE = re.compile(r'^: "\$\{(MHAR_\w+):=', re.MULTILINE)
_INTERNAL = frozenset({"MHAR_LOGS"})  # exported by a job to its ranks
# Slurm reads these before a file's own directives.
_VARIABLES = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "time": "SBATCH_TIMELIMIT",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "array": "SBATCH_ARRAY_INX",
    "output": "SBATCH_OUTPUT",
    "export": "SBATCH_EXPORT",
}


@dataclass(frozen=True)
class TrainCommand:
    """One start of ``launch/node``: the config and overrides that its ranks get, and on how many nodes.

    Attributes:
        mounts: of the container that they run in, (outside, inside) each; None without one.
    """

    config: Path
    overrides: tuple[str, ...]
    nodes: int
    mounts: tuple[tuple[Path, Path], ...] | None = None

    def outside(self, path: Path) -> Path | None:
        """Where the node has what the ranks call ``path``; None where no mount of their container holds it."""
        if self.mounts is None:
            return path
        held = [mount for mount in self.mounts if path.is_relative_to(mount[1])]
        if not held:
            return None
        outside, inside = max(held, key=lambda mount: len(mount[1].parts))
        return outside / path.relative_to(inside)


@dataclass(frozen=True)
class EvaluateCommand:
    """A start of ``launch/node evaluate``: the run's folder, what replaces keys of its config, on how many nodes."""

    run_dir: Path
    overrides: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class JobFile:
    """A job file with the options that it would be submitted with.

    Args:
        path: the file.
        arguments: behind the file on sbatch's command line.
        options: sbatch's long options without ``--``; they win over variables, and those over the file.
        environment: that sbatch would be called in.
    """

    path: Path
    arguments: tuple[str, ...]
    options: Mapping[str, str]
    environment: Mapping[str, str]

    def option(self, name: str) -> str | None:
        """Value of an option of sbatch, None where it is not given."""
        if name in self.options:
            return self.options[name]
        if self.environment.get(_VARIABLES.get(name, "")):
            return self.environment[_VARIABLES[name]]
        return self._directives().get(name)

    def number(self, name: str, default: int) -> int:
        """Value of an option that is a number; of ``h100:8`` the 8.

        Raises:
            UserError: it is none.
        """
        text = self.option(name)
        if text is None:
            return default
        number = text.rpartition(":")[2]
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"{self.path}: --{name}: {text!r} given, but it must be a whole number of 1 or more")
        return int(number)

    @property
    def root(self) -> Path:
        """The checkout that the job runs in."""
        return Path(self.environment.get("MHAR_ROOT") or Path.cwd()).absolute()

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.number("nodes", 1)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that launch/node will start."""
        given, gpus = self.environment.get("MHAR_RANKS_PER_NODE"), self._gpus_per_node()
        if given:
            if not given.isdecimal() or int(given) < 1:
                raise UserError(f"MHAR_RANKS_PER_NODE: {given!r} given, but it must be a whole number of 1 or more")
            if gpus is not None and int(given) > gpus:
                raise UserError(f"MHAR_RANKS_PER_NODE: {given} given, but the job has {gpus} GPUs a node, one a rank")
            return int(given)
        return gpus or 1

    def _gpus_per_node(self) -> int | None:
        if self.option("gpus-per-node") is not None:
            return self.number("gpus-per-node", 1)
        match = re.search(r"\bgpu(?::[^:,]+)?:(\d+)", self.option("gres") or "")
        return int(match[1]) if match else None

    @property
    def tasks(self) -> list[int | None]:
        """Indices of the job array; [None] for a file that is none."""
        text = self.option("array")
        if text is None:
            return [None]
        tasks: list[int | None] = []
        for part in text.partition("%")[0].split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
            if match is None or match[3] == "0":
                raise UserError(f"{self.path}: --array: {text!r} given; allowed: numbers and ranges, like 0-4 or 1,3")
            tasks += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        return tasks

    def text(self) -> str:
        """Contents of the file.

        Raises:
            UserError: it cannot be read.
        """
        try:
            text = self.path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise UserError(f"{self.path}: cannot be read as a job file: {reason}") from None
        if "\r\n" in text:
            raise UserError(f"{self.path}: has the line ends of DOS, which sbatch and bash refuse; dos2unix mends it")
        return text

    def _directives(self) -> dict[str, str]:
        """Options on the file's #SBATCH lines by their long names; those without a value have an empty one."""
        found: dict[str, str] = {}
        for number, line in enumerate(self.text().splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                break  # as sbatch does
            if not line.startswith("#SBATCH"):
                continue
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                raise UserError(f"{self.path}:{number}: {line.strip()}: {error}") from None
            name = ""
            for word in words:
                if word.startswith("--"):
                    name, _, found[name] = word.removeprefix("--").partition("=")
                elif word.startswith("-") and word[:2] in _SHORT:
                    name = _SHORT[word[:2]]
                    found[name] = word[2:]
                elif word.startswith("-"):
                    name = ""  # a short option that is not looked at
                elif name:
                    found[name] = word
        return found

    def render(self, task: int | None) -> list[list[str]]:
        """The srun commands of the job, or of one task of its array, in order.

        Raises:
            UserError: the file ends with an error: what it says; or it is not one that can be run in dry form.
        """
        if not _SOURCES_COMMON.search(self.text()):
            raise UserError(
                f"{self.path}: has no line that sources slurm/common.sh, and so it cannot be looked at without running "
                "it; sbatch submits it unchecked"
            )
        environment = dict(self.environment) | {
            "MHAR_RENDER": "1",
            "SLURM_SUBMIT_DIR": str(Path.cwd()),
            "SLURM_JOB_NUM_NODES": str(self.nodes),
        }
        if task is not None:
            environment["SLURM_ARRAY_TASK_ID"] = str(task)
        try:
            done = subprocess.run(
                ["bash", str(self.path), *self.arguments],
                env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(f"{self.path}: bash, which runs it, is not on the path here") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.path}: did not end in 60 s, although it had nothing to start") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"ends with code {done.returncode}"]
            if said[-1].startswith(_ERROR):
                raise UserError(said[-1].removeprefix(_ERROR))
            where = "" if task is None else f", task {task}"
            raise UserError(f"{self.path}{where}: {said[-1]}")
        return [shlex.split(line) for line in done.stdout.splitlines()]

    def trainings(self, commands: Sequence[Sequence[str]]) -> list[TrainCommand]:
        """Those of the commands that train."""
        found = []
        for command in commands:
            for place, word in enumerate(command):
                if word.endswith("launch/node") and command[place + 1 : place + 2] not in ([], ["evaluate"]):
                    config, *overrides = command[place + 1 :]
                    options = command[:place]
                    found.append(
                        TrainCommand(Path(config), tuple(overrides), self._nodes_of(options), _mounts_of(options))
                    )
                    break
        return found

    def evaluations(self, commands: Sequence[Sequence[str]]) -> list[EvaluateCommand]:
        """Those of the commands that evaluate."""
        found = []
        for command in commands:
            for place, word in enumerate(command):
                if word.endswith("launch/node") and command[place + 1 : place + 2] == ["evaluate"]:
                    run_dir, *rest = command[place + 2 :]
                    overrides = tuple(word for word in rest if "=" in word and not word.startswith("-"))
                    found.append(EvaluateCommand(self.root / run_dir, overrides, self._nodes_of(command[:place])))
                    break
        return found

    def _nodes_of(self, options: Sequence[str]) -> int:
        """Of an srun command, by its options: all of the job unless it says so."""
        return next((int(word.partition("=")[2]) for word in options if word.startswith("--nodes=")), self.nodes)

    @staticmethod
    def mhar_arguments(commands: Sequence[Sequence[str]]) -> list[list[str]]:
        """What those of the commands that do not train tell mhar."""
        found = []
        for command in commands:
            for place, word in enumerate(command):
                after = list(command[place + 1 :])
                if word == "mhar" or (word.endswith("launch/node") and after[:1] == ["evaluate"]):
                    found.append(after)
                    break
        return found

    def variable_problems(self) -> list[str]:
        """What is wrong with the site's variables, a line each."""
        common = self.root / "slurm" / "common.sh"
        try:
            known = set(_SITE_VARIABLE.findall(common.read_text(encoding="utf-8")))
        except OSError as error:
            return [f"{common}: cannot be read ({error.strerror}); submit from the checkout, or set MHAR_ROOT to it"]
        problems = []
        if self.environment.get("MHAR_RENDER"):
            problems.append("MHAR_RENDER: set, so that the job would print its commands and start none; unset it")
        for name in sorted(self.environment):
            if name.startswith("MHAR_") and name not in known | _INTERNAL:
                near = get_close_matches(name, known, 1)
                meant = f"did you mean {near[0]}?" if near else f"{common} has the choices of a site"
                problems.append(f"{name}: no such variable; {meant}")
        exported = [part.partition("=")[0] for part in (self.option("export") or "ALL").split(",")]
        lost = [name for name in sorted(self.environment) if name in known and name not in exported]
        if lost and "ALL" not in exported:
            problems.append(
                f"export: {self.option('export')} given, so that the job would not get {', '.join(lost)}; set "
                "SBATCH_EXPORT=ALL, or change the defaults in slurm/common.sh"
            )
        if problem := self._installation_problem():
            problems.append(problem)
        for mount in filter(None, self.environment.get("MHAR_MOUNTS", "").split(",")):
            if not Path(mount.partition(":")[0]).exists():
                problems.append(f"MHAR_MOUNTS: {mount} given, but there is no {mount.partition(':')[0]} here")
        try:
            level_of(self.environment)
        except UserError as error:
            problems.append(str(error))
        return problems

    def _installation_problem(self) -> str | None:
        image = self.environment.get("MHAR_CONTAINER")
        if image:
            is_file = image.startswith(("/", "./")) or image.endswith(".sqsh")
            missing = is_file and not (self.root / image).is_file()
            return f"MHAR_CONTAINER: {image} given, but there is no such file" if missing else None
        venv = self.root / (self.environment.get("MHAR_VENV") or ".venv")
        if os.access(venv / "bin" / "mhar", os.X_OK):
            return None
        given = f"{venv} given, but it" if self.environment.get("MHAR_VENV") else f"not set, and {venv}"
        return f"MHAR_VENV: {given} has no bin/mhar; make venv makes one in the checkout, or set MHAR_CONTAINER"


def _mounts_of(options: Sequence[str]) -> tuple[tuple[Path, Path], ...] | None:
    """Of the container of an srun command, as Pyxis writes them: FROM:TO[:FLAGS],..."""
    told = next((word.partition("=")[2] for word in options if word.startswith("--container-mounts=")), None)
    if told is None:
        return None
    parts = [mount.split(":") for mount in told.split(",") if mount]
    return tuple((Path(outside), Path((inside or [outside])[0])) for outside, *inside in parts)


def parse_time(text: str) -> int | None:
    """Seconds of a time as Slurm writes it (``90``, ``1:30:00``, ``2-12``); None where there is no limit (``0`` too).

    Raises:
        ValueError: it is no time.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # d-h, d-h:m, d-h:m:s
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # m, m:s
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    if len(parts) > 3:
        raise ValueError(text)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None
