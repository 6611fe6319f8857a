"""What can be known to go wrong before a job is submitted."""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from megatron_mhar.config.layout import check_layout
from megatron_mhar.config.load import load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.launch.health import missing_interface
from megatron_mhar.launch.jobfile import EvaluateCommand, JobFile, TrainCommand, parse_time
from megatron_mhar.pipeline.estimate import estimate_layout
from megatron_mhar.run_files import RunFiles
from megatron_mhar.train.run_folder import RunFolder

GIB = 2**30
_ENDED_BADLY = re.compile(r"\bJobState=(FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE)\b")
_QUESTIONS = """echo
echo "file=$(cat "$1" 2>/dev/null)"
echo "interfaces=$(ls /sys/class/net 2>/dev/null | tr '\\n' ' ')"
[ -x "$2/bin/mhar" ] && echo venv=yes || echo venv=no"""
_NOTICE_S = 60  # sbatch(1): a signal may come up to so much earlier
_SRUN_WAIT_S = 30  # for a free node; a busy cluster leaves the shared folder unchecked


@dataclass
class Findings:
    """What was found: reasons not to submit, what could not be checked and why, and what the job will do."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


def check_job(job: JobFile, *, gpu_gib: float) -> Findings:
    """Check a job file before its submission. Submits nothing; may run for an instant on one node.

    Args:
        job: the file and its options.
        gpu_gib: memory of a GPU, in GiB.

    Raises:
        UserError: the file cannot be read.
    """
    found = Findings()
    found.problems += job.variable_problems()
    _check_limits(job, found)
    _check_log(job, found)
    _check_dependency(job, found)
    tasks = _render_all(job, found)
    outputs: dict[Path, None] = {}
    for task, commands in tasks:
        where = job.path.name if task is None else f"{job.path.name}, task {task}"
        makes_data = any("mhar data" in " ".join(command) for command in commands)
        for arguments in job.mhar_arguments(commands):
            _check_arguments(where, arguments, found)
        for evaluation in job.evaluations(commands):
            _check_evaluation(job, where, evaluation, found)
        for training in job.trainings(commands):
            try:
                config = _load(job, training)
            except UserError as error:
                found.problems.append(f"{where}: {error}")
                continue
            world = training.nodes * job.ranks_per_node
            _check_layout(where, config, world, gpu_gib, found)
            inside = job.root / config.output_dir
            output = training.outside(inside)
            if output is None:
                found.problems.append(
                    f"{where}: output_dir: no mount of the container holds {inside}, so that the run would be lost "
                    "with it; name the folder by MHAR_OUTPUT_DIR, which is mounted, or mount it by MHAR_MOUNTS"
                )
                continue
            outputs[output] = None
            if output == inside:
                _check_run_folder(job, where, config, found)
            if makes_data:
                found.unchecked.append(f"{where}: data: the job itself makes some before it trains")
            elif job.option("dependency") is not None:
                found.unchecked.append(f"{where}: data: the job waits for others, which may make it")
            else:
                _check_data(job, where, training, config, found)
    if not found.problems:  # asks the cluster: only for a job that may run
        for folder in outputs:
            _check_shared(job, folder, found)
        _check_with_sbatch(job, found)
    for lines in (found.problems, found.unchecked, found.facts):
        lines[:] = dict.fromkeys(lines)  # tasks of an array often say the same
    return found


def _render_all(job: JobFile, found: Findings) -> list[tuple[int | None, list[list[str]]]]:
    rendered = []
    try:
        for task in job.tasks:
            rendered.append((task, job.render(task)))
    except UserError as error:
        found.problems.append(str(error))
    return rendered


def _load(job: JobFile, training: TrainCommand) -> RunConfig:
    with chdir(job.root):  # names of files in a job file are those of the checkout
        return load_config(training.config, training.overrides)


def _check_arguments(where: str, arguments: Sequence[str], found: Findings) -> None:
    """Whether mhar would take them, so far as they alone tell."""
    from megatron_mhar.cli.main import cli

    command: click.Command | None = cli
    context: click.Context | None = None
    name: str | None = "mhar"
    left = list(arguments)
    try:
        with redirect_stdout(io.StringIO()):
            while command is not None:
                context = command.make_context(name, list(left), parent=context)
                if not isinstance(command, click.Group):
                    return
                name, command, left = command.resolve_command(context, left)  # a group of ours has no options
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        found.facts.append(f"{where}: {' '.join(['mhar', *arguments])} tells help or version")
    except click.UsageError as error:
        at = error.ctx.command_path if error.ctx is not None else "mhar"
        found.problems.append(f"{where}: {at}: {error.format_message()}")


def _check_evaluation(job: JobFile, where: str, evaluation: EvaluateCommand, found: Findings) -> None:
    config = RunFiles(evaluation.run_dir).config
    if not config.is_file():
        if job.option("dependency") is not None:
            found.unchecked.append(f"{where}: {evaluation.run_dir}: the job waits for others, which may make it")
        else:
            found.problems.append(f"{where}: {evaluation.run_dir}: holds no run of mhar train (it has no config.yaml)")
        return
    try:
        with chdir(job.root):
            check_layout(load_config(config, evaluation.overrides), evaluation.nodes * job.ranks_per_node)
    except UserError as error:
        found.problems.append(f"{where}: {error}")


def _check_layout(where: str, config: RunConfig, world: int, gpu_gib: float, found: Findings) -> None:
    try:
        data = check_layout(config, world)
    except UserError as error:
        found.problems.append(f"{where}: {error}")
        return
    parallel = config.parallel
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline, "data": data}
    spread = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    fact = f"{where}: {config.run_dir} on {world} ranks: {spread}"
    try:
        fullest = estimate_layout(config, world).fullest
    except UserError as error:
        found.unchecked.append(f"{where}: memory: {error}")
        found.facts.append(fact)
        return
    need = fullest.total / GIB
    if need > gpu_gib:
        found.problems.append(
            f"{where}: memory: pipeline rank {fullest.rank} needs {need:.1f} GiB for weights, gradients, optimizer and "
            f"depth history ({fullest.history.total / GIB:.1f} GiB of it the history), before any activation; a GPU "
            f"has {gpu_gib:g} GiB. More nodes, parallel.tensor or parallel.pipeline make it less; see mhar plan"
        )
    found.facts.append(f"{fact}; {need:.1f} of {gpu_gib:g} GiB a GPU before activations")


def _check_run_folder(job: JobFile, where: str, config: RunConfig, found: Findings) -> None:
    """What the job would find in its run folder."""
    with chdir(job.root):
        folder = RunFolder(config)
        try:
            if folder.begun:
                folder.refuse_another_run()
            if folder.finished() is not None:
                found.facts.append(f"{where}: {config.run_dir} is finished already: there is nothing left to do")
        except UserError as error:
            found.problems.append(f"{where}: {error}")
        except OSError:
            return  # what can be read from here says nothing of the nodes


def _check_data(job: JobFile, where: str, training: TrainCommand, config: RunConfig, found: Findings) -> None:
    from megatron_mhar.quiet import quiet_imports

    there: dict[str, tuple[str, ...]] = {}
    for key, prefixes in (("train", config.data.train), ("valid", config.data.valid)):
        files = [training.outside(job.root / prefix) for prefix in prefixes]
        if None in files:
            found.unchecked.append(
                f"{where}: data.{key}: no mount of the container holds {prefixes[files.index(None)]}; unless the image "
                "does, set MHAR_MOUNTS"
            )
            return
        there[key] = tuple(map(str, files))
    config = config.model_copy(update={"data": config.data.model_copy(update=there)})
    with quiet_imports():
        from megatron_mhar.data.dataset import check_data

    try:
        check_data(config)
    except UserError as error:
        found.problems.append(f"{where}: {error}")


def _check_limits(job: JobFile, found: Findings) -> None:
    """Time and nodes against the partition: sbatch would take the job, and it would never start."""
    asked = job.option("time")
    try:
        seconds = parse_time(asked) if asked is not None else None
    except ValueError:
        found.problems.append(f"time: {asked!r} given; allowed: minutes, h:m:s or days-hours, like 90, 1:30:00, 2-12")
        return
    told = re.search(r"@(\d+)", job.option("signal") or "")
    if told and seconds is not None and seconds <= (least := int(told[1]) + _NOTICE_S):
        found.problems.append(
            f"time: {asked} given, but --signal has the job told {told[1]} s before its end, and Slurm may tell it up "
            f"to {_NOTICE_S} s earlier: it would save and requeue itself for ever; allowed: over {least} s "
            "(SBATCH_TIMELIMIT)"
        )
    partitions = _partitions(found)
    if partitions is None:
        return
    by_name = {each["PartitionName"]: each for each in partitions}
    asked_for = job.option("partition")
    names = asked_for.split(",") if asked_for else [n for n, each in by_name.items() if each["Default"] == "YES"]
    if not names or (unknown := [name for name in names if name not in by_name]):
        given = (
            f"{','.join(unknown)} given, but there is no such partition"
            if names
            else "not given, and none is the default"
        )
        found.problems.append(f"partition: {given}; there are {', '.join(by_name)} (SBATCH_PARTITION)")
        return
    objections = [list(_limit_problems(job, by_name[name], asked, seconds)) for name in names]
    if all(objections):  # of several, Slurm takes one that fits
        found.problems += objections[0]


def _limit_problems(job: JobFile, partition: dict[str, str], asked: str | None, seconds: int | None) -> Iterator[str]:
    title, limit = partition["PartitionName"], partition["MaxTime"]
    limit_s = parse_time(limit)
    if limit_s is not None and asked is not None and (seconds is None or seconds > limit_s):
        yield (
            f"time: {asked} given, but partition {title} allows {limit}: the job would wait for ever (SBATCH_TIMELIMIT)"
        )
    for key in ("MaxNodes", "TotalNodes"):
        most = partition.get(key, "UNLIMITED")
        if most.isdecimal() and job.nodes > int(most):
            yield f"nodes: {job.nodes} given, but partition {title} has {key} {most}"
            break


def _check_log(job: JobFile, found: Findings) -> None:
    """Slurm ends a job whose log it cannot open, without a word."""
    folder = Path(job.option("output") or "slurm-%j.out").absolute().parent
    if "%" not in str(folder) and not os.access(folder, os.W_OK):
        there = "cannot be written" if folder.is_dir() else "does not exist"
        found.problems.append(
            f"output: the job's log would lie in {folder}, which {there}; set SBATCH_OUTPUT, or submit from another "
            "folder with MHAR_ROOT set to the checkout"
        )


def _check_dependency(job: JobFile, found: Findings) -> None:
    """Jobs that must end well before: Slurm takes numbers that it does not know for done."""
    jobs = re.findall(r"\bafterok((?::\d+)+)", job.option("dependency") or "")
    for number in filter(None, ":".join(jobs).split(":")):
        command = ["scontrol", "--oneliner", "show", "job", number]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return  # said of the partition
        if "Invalid job id" in done.stderr:
            found.problems.append(
                f"--after: Slurm knows no job {number}, and would not wait for it. Some minutes after its end a job is "
                "forgotten: leave it out if it has ended well"
            )
        elif ended := _ENDED_BADLY.search(done.stdout):
            found.problems.append(f"--after: job {number} has ended as {ended[1]}: what waits for it would be removed")


def _partitions(found: Findings) -> list[dict[str, str]] | None:
    """Fields of each partition, None where Slurm cannot be asked."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "partition"], capture_output=True, text=True, timeout=60
        )  # fmt: skip
    except FileNotFoundError:
        found.unchecked.append("partition, time, nodes: scontrol is not on the path here; check on a login node")
        return None
    except subprocess.TimeoutExpired:
        found.unchecked.append("partition, time, nodes: scontrol does not answer")
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("PartitionName=")]
    if done.returncode or not lines:
        said = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        found.unchecked.append(f"partition, time, nodes: scontrol cannot tell them ({said})")
        return None
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]


def _check_shared(job: JobFile, folder: Path, found: Findings) -> None:
    """Whether what is written to ``folder`` here is seen by a node."""
    made = _missing(folder)
    mark = folder / f".mhar-submit-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(mark.name)
    except OSError as error:
        found.problems.append(f"output_dir: {folder} cannot be written from here ({error.strerror}); MHAR_OUTPUT_DIR")
        return
    try:
        seen = _ask_a_node(job, mark)
    except RuntimeError as error:
        found.unchecked.append(f"output_dir: whether nodes see {folder} ({error})")
        return
    finally:
        with suppress(OSError):
            mark.unlink()
        for each in made:
            with suppress(OSError):
                each.rmdir()
    if seen.get("file") != mark.name:
        found.problems.append(
            f"output_dir: a node does not see what is written to {folder} here: it is not on a shared file system; "
            "choose another by MHAR_OUTPUT_DIR or output_dir=..."
        )
    interfaces = seen.get("interfaces", "").split()
    if interfaces and (name := missing_interface(job.environment.get("MHAR_INTERFACE"), interfaces)):
        there = ", ".join(interfaces)
        found.problems.append(f"MHAR_INTERFACE: {name} given, but a node has none of that name; it has {there}")
    venv = job.environment.get("MHAR_VENV")
    if venv and not job.environment.get("MHAR_CONTAINER") and seen.get("venv") == "no":
        found.problems.append(f"MHAR_VENV: a node does not see {venv}/bin/mhar: it is not on a shared file system")


def _missing(folder: Path) -> list[Path]:
    """``folder`` and those above it that are not there, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _ask_a_node(job: JobFile, file: Path) -> dict[str, str]:
    """Contents of a file as a node has it, the node's network interfaces, and whether it sees the environment.

    Raises:
        RuntimeError: nothing could be run on a node: why.
    """
    if shutil.which("srun") is None:
        raise RuntimeError("srun is not on the path here")
    options = [f"--{name}={value}" for name in ("partition", "account", "qos") if (value := job.option(name))]
    command = [
        "srun", "--nodes=1", "--ntasks=1", "--time=1", f"--immediate={_SRUN_WAIT_S}", "--quiet", *options,
        "sh", "-c", _QUESTIONS, "sh", str(file.absolute()),
        str(job.root / (job.environment.get("MHAR_VENV") or ".venv")),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=3 * _SRUN_WAIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError("srun did not end") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(f"no node was free for srun: {said[-1] if said else f'code {done.returncode}'}")
    return {name: answer for line in done.stdout.splitlines() for name, _, answer in [line.partition("=")]}


def sbatch_command(job: JobFile, *flags: str) -> list[str]:
    """The command that submits the job."""
    options = [f"--{name}={value}" for name, value in job.options.items()]
    return ["sbatch", *flags, *options, str(job.path), *job.arguments]


def _check_with_sbatch(job: JobFile, found: Findings) -> None:
    try:
        done = subprocess.run(sbatch_command(job, "--test-only"), capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        found.unchecked.append("what sbatch --test-only says: sbatch is not on the path here")
        return
    except subprocess.TimeoutExpired:
        found.unchecked.append("what sbatch --test-only says: it does not answer")
        return
    if done.returncode:
        found.problems.append(f"sbatch --test-only: {' '.join(_errors(done.stderr))}")


def _errors(text: str) -> Iterator[str]:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line or "failure" in line]
    yield from (line.removeprefix("sbatch: ") for line in errors or lines or ["refused without a word"])
