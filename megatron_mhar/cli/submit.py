"""``mhar submit``: check a Slurm job file, then submit it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click

# Never arguments of a job file.
_OWN = ("--check", "--nodes", "--time", "--partition", "--after", "--memory")


@click.command(context_settings={"allow_interspersed_args": False})  # as sbatch has it: what is behind FILE is its own
@click.argument("job_file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--check", is_flag=True, help="Only check, do not submit.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, in place of the file's.")
@click.option("--time", help="Time limit, in place of the file's.")
@click.option("--partition", help="Partition, in place of SBATCH_PARTITION.")
@click.option(
    "--after",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="JOB",
    help="Wait until this job has ended well; may be given several times.",
)
@click.option(
    "--memory", type=click.FloatRange(min=0, min_open=True), default=80.0, show_default=True, metavar="GIB",
    help="Memory of a GPU.",
)  # fmt: skip
def submit(
    job_file: Path,
    arguments: tuple[str, ...],
    check: bool,
    nodes: int | None,
    time: str | None,
    partition: str | None,
    after: tuple[int, ...],
    memory: float,
) -> None:
    """Check the job file FILE as it would run with these overrides, and submit it if nothing is wrong.

    Checked are: the site's variables (slurm/common.sh has them), partition, time and nodes, the config of every task,
    GPUs against its layout and batch, memory of weights, gradients, optimizer and depth history, the data files, that a
    node sees what is written to output_dir from here, and what sbatch --test-only says. What could not be checked is
    said. Call it in the checkout, where sbatch would be called; as there, options stand before FILE, and what stands
    behind it is given to the job: KEY=VALUE to one that trains.

    \b
    Examples:
      mhar submit --check slurm/pretrain_1b.sbatch
      mhar submit --nodes 16 slurm/pretrain_1b.sbatch training.steps=40000
      MHAR_TRAIN_DATA='[/corpus/train]' SBATCH_PARTITION=h100 mhar submit slurm/midtrain_8b.sbatch
      mhar submit --after 1234 slurm/evaluate.sbatch runs/1b-mhar --batches all
    """
    from megatron_mhar.errors import UserError
    from megatron_mhar.launch.check import check_job, sbatch_command
    from megatron_mhar.launch.jobfile import JobFile

    for word in arguments:
        if word.partition("=")[0] in _OWN:
            raise UserError(f"{word}: options of mhar submit stand before FILE: mhar submit {word} ... {job_file}")
    given = {"nodes": None if nodes is None else str(nodes), "time": time, "partition": partition}
    options = {name: value for name, value in given.items() if value is not None}
    if after:  # a job that they leave in the lurch is removed, and does not wait for ever
        options |= {"dependency": "afterok:" + ":".join(map(str, after)), "kill-on-invalid-dep": "yes"}
    job = JobFile(job_file, arguments, options, os.environ)
    found = check_job(job, gpu_gib=memory)
    for line in found.unchecked:
        click.secho(f"not checked: {line}", fg="yellow", err=True)
    if found.problems:
        lines = found.problems
        if len(lines) > 1:
            lines = [f"{len(lines)} reasons not to submit:", *(f"  {line}" for line in lines)]
        raise UserError("\n".join(lines))
    for line in found.facts:
        click.echo(line)
    if check:
        return
    try:
        done = subprocess.run(sbatch_command(job), timeout=60)
    except FileNotFoundError:
        raise UserError("sbatch is not on the path here: nothing was submitted") from None
    if done.returncode:
        raise SystemExit(1)
