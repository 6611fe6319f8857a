"""Job files before they are submitted: what they would do, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron_mhar.cli.submit import submit
from megatron_mhar.config.load import dump_config, load_config
from megatron_mhar.errors import UserError
from megatron_mhar.launch.jobfile import JobFile, parse_time
from tests.conftest import tiny_run
from tests.launch import ROOT

JOBS = sorted((ROOT / "slurm").glob("*.sbatch"))
SNAPSHOTS = Path(__file__).parent / "snapshots"
TRAINING = [job for job in JOBS if job.stem not in ("prepare_data", "evaluate")]
ARGUMENTS = {"evaluate": ("runs/demo-mhar", "--batches", "all")}

PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 State=UP TotalNodes=16
PartitionName=short AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=01:00:00 State=UP TotalNodes=4
"""


def plain_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "MHAR_"))}


def rendered(path: Path) -> str:
    """A job file's directives and its commands, task by task."""
    job = JobFile(path, ARGUMENTS.get(path.stem, ()), {}, plain_environment() | {"MHAR_ROOT": str(ROOT)})
    lines = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
    for task in job.tasks:
        lines += ["", "once" if task is None else f"task {task}"]
        for command in job.render(task):
            lines += [command[0], *(f"    {word}" for word in command[1:])]
    return "\n".join(lines).replace(str(ROOT), "$MHAR_ROOT") + "\n"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_snapshot_of_the_rendered_job(path: Path) -> None:
    """UPDATE_SNAPSHOTS=1 writes them anew, for review."""
    snapshot = SNAPSHOTS / f"{path.stem}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(rendered(path))
    assert rendered(path) == snapshot.read_text()


def test_every_snapshot_has_a_job() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == {path.stem for path in JOBS}


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_jobs_outlive_their_time_limit(path: Path) -> None:
    job = JobFile(path, (), {}, {})
    signal, requeue, mode = (job.option(name) for name in ("signal", "requeue", "open-mode"))
    assert signal is not None and signal.startswith("B:USR1@") and requeue == "" and mode == "append"
    assert job.number("ntasks-per-node", 0) == 1


@pytest.mark.parametrize(
    "text,seconds",
    [("90", 5400), ("5:30", 330), ("1:30:00", 5400), ("2-12", 216000), ("1-1:30", 91800), ("1-0:0:5", 86405),
     ("UNLIMITED", None), ("0", None), ("0:00", None)],
)  # fmt: skip
def test_times(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "1-", "x-3"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)


def test_options_come_from_the_command_line_then_the_environment_then_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --time=10\n#SBATCH --gpus-per-node=h100:4\n#SBATCH --array=0-5:2%1\n\n: x\n"
                    "#SBATCH --nodes=9\n")  # fmt: skip
    job = JobFile(path, (), {}, {})
    assert (job.option("time"), job.ranks_per_node, job.tasks, job.nodes) == ("10", 4, [0, 2, 4], 1)
    job = JobFile(path, (), {"time": "30"}, {"SBATCH_TIMELIMIT": "20", "SBATCH_ARRAY_INX": "1,3"})
    assert (job.option("time"), job.tasks) == ("30", [1, 3])
    assert JobFile(path, (), {}, {"SBATCH_TIMELIMIT": "20"}).option("time") == "20"
    with pytest.raises(UserError, match=r"--gpus-per-node: 'all' given.*whole number"):
        _ = JobFile(path, (), {}, {"SBATCH_GPUS_PER_NODE": "all"}).ranks_per_node
    # Short options, several on a line, an older name of GPUs.
    path.write_text(
        "#!/bin/bash\n#SBATCH -N 2 -t2:00 --exclusive -J x --mem 0 # all\n#SBATCH --gres=disk:1,gpu:h100:4\n"
    )
    job = JobFile(path, (), {}, {})
    assert (job.nodes, job.option("time"), job.option("exclusive"), job.ranks_per_node) == (2, "2:00", "", 4)
    assert job.option("mem") == "0"
    with pytest.raises(UserError, match=r"no\.sbatch: cannot be read as a job file: No such file"):
        JobFile(tmp_path / "no.sbatch", (), {}, {}).option("time")


@pytest.fixture
def cluster(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site with stand-ins for Slurm's commands, data, and everything as it should be; the folder of the stand-ins."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "MHAR_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    tool(folder, "scontrol", f"cat <<'END'\n{PARTITIONS}END")
    refuse = 'echo "sbatch: error: Invalid account" >&2; echo "allocation failure: Bad account" >&2; exit 1'
    tool(folder, "sbatch", f'echo "$@" >>{folder}/submitted; [ -e {folder}/refuse ] || exit 0\n{refuse}')
    knows = '[ "$1" != --help ] || { echo " --container-image=IMAGE"; exit; }'
    tool(folder, "srun", knows + '\nwhile [ "$1" != sh ]; do shift; done; exec "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    tool(venv / "bin", "mhar", "exit 0")
    monkeypatch.setenv("MHAR_VENV", str(venv))
    monkeypatch.setenv("MHAR_ROOT", str(ROOT))
    monkeypatch.setenv("MHAR_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("MHAR_TRAIN_DATA", f"[{corpus}/train]")
    monkeypatch.setenv("MHAR_VALID_DATA", f"[{corpus}/valid]")
    monkeypatch.chdir(ROOT)
    yield folder


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def call(*arguments: str, check: bool = True) -> Result:
    return CliRunner().invoke(submit, [*(["--check"] if check else []), *arguments])


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


PRETRAIN = "slurm/pretrain_1b.sbatch"


def test_a_good_job_is_told_and_not_submitted(cluster: Path, tmp_path: Path) -> None:
    result = call(PRETRAIN, "training.steps=5000")
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"{tmp_path}/out/1b-mhar on 8 ranks: data 8; " in result.output
    assert (cluster / "submitted").read_text().split() == ["--test-only", PRETRAIN, "training.steps=5000"]
    assert not (tmp_path / "out").exists(), "a check leaves nothing"


def test_a_good_job_is_submitted(cluster: Path) -> None:
    assert call("--nodes", "16", "--time", "60", PRETRAIN, "training.steps=5000", check=False).exit_code == 0
    lines = (cluster / "submitted").read_text().splitlines()
    assert lines[-1] == f"--nodes=16 --time=60 {PRETRAIN} training.steps=5000"


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_pretraining_fits_every_number_of_nodes(cluster: Path, nodes: int) -> None:
    assert f"on {8 * nodes} ranks" in call("--nodes", str(nodes), PRETRAIN).output


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_job_file_passes(cluster: Path, path: Path) -> None:
    result = call(str(path))
    assert result.exit_code == 0, result.exception


def test_the_pair_has_one_seed_and_one_order_of_data(cluster: Path) -> None:
    from megatron_mhar.config.load import flatten, load_config

    job = JobFile(ROOT / "slurm/midtrain_8b.sbatch", (), {}, os.environ)
    plain, delta = (
        flatten(load_config(t.config, t.overrides)) for n in job.tasks for t in job.trainings(job.render(n))
    )
    different = {key for key in plain if plain[key] != delta[key]}
    assert different == {key for key in plain if key.startswith("residual.") and plain[key] != delta[key]} | {"name"}


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--time", "3-0", PRETRAIN), r"time: 3-0 given, but partition main allows 2-00:00:00"),
        (("--partition", "short", PRETRAIN), r"time: 24:00:00 given, but partition short allows 01:00:00"),
        (("--time", "0", "--partition", "short", PRETRAIN), r"time: 0 given, but partition short allows 01:00:00"),
        (("--time", "6", PRETRAIN), r"time: 6 given, but --signal has the job told 300 s before its end"),
        (("--time", "soon", PRETRAIN), r"time: 'soon' given; allowed: minutes"),
        (("--partition", "gpu", PRETRAIN), r"partition: gpu given, but there is no such .*; there are main, short"),
        (("--nodes", "17", PRETRAIN, "training.global_batch_size=136"), r"nodes: 17 given, but partition main has"),
        ((PRETRAIN, "parallel.tensor=4", "parallel.sequence=true", "parallel.pipeline=3"),
         r"parallel\.tensor x pipeline: 4 x 3 = 12 given, but it must divide the number of ranks, 8"),
        ((PRETRAIN, "training.global_batch_size=40"), r"batch_size: 40 given, but on 8 ranks it must be a multiple"),
        (("--memory", "40", "slurm/midtrain_8b.sbatch", "parallel.tensor=1", "parallel.sequence=false"),
         r"midtrain_8b\.sbatch, task 1: memory: pipeline rank 0 needs [\d.]+ GiB for weights.*a GPU has 40 GiB"),
        ((PRETRAIN, "data.train=[/no/such]"), r"/no/such"),
        ((PRETRAIN, "--nodes=4"), r"--nodes=4: options of mhar submit stand before FILE: mhar submit --nodes=4 \.\.\."),
        ((PRETRAIN, "trainin.steps=3"), r"pretrain_1b\.sbatch: command line: trainin\.steps=3: .*unknown key"),
        (("no.sbatch",), r"no\.sbatch: cannot be read as a job file"),
        (("slurm/prepare_data.sbatch", "--nonsense"), r"mhar data demo: No such option:? .?--nonsense"),
        (("slurm/prepare_data.sbatch", "training.steps=4"), r"mhar data demo: Got unexpected extra argument"),
    ],
)  # fmt: skip
def test_refused(cluster: Path, arguments: tuple[str, ...], message: str) -> None:
    assert re.search(message, refused(*arguments))
    assert not (cluster / "submitted").exists()


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("MHAR_CONTIANER", "x", "MHAR_CONTIANER: no such variable; did you mean MHAR_CONTAINER?"),
        ("MHAR_VENV", "/no/venv", "MHAR_VENV: /no/venv given, but it has no bin/mhar; make venv"),
        ("MHAR_CONTAINER", "/no/image.sqsh", "MHAR_CONTAINER: /no/image.sqsh given, but there is no such file"),
        ("MHAR_MOUNTS", "/no/data:/data", "MHAR_MOUNTS: /no/data:/data given, but there is no /no/data here"),
        ("MHAR_RETRIES", "often", "MHAR_RETRIES: 'often' given, but it must be a whole number of 0 or more"),
        ("MHAR_EXCLUDE_NODES", "all", "MHAR_EXCLUDE_NODES: 'all' given, but it must be a whole number of 0 or more"),
        ("MHAR_HEALTH_CHECK", "yes", "MHAR_HEALTH_CHECK: 'yes' given; allowed: full, quick, off"),
        ("MHAR_RANKS_PER_NODE", "0", "MHAR_RANKS_PER_NODE: '0' given, but it must be a whole number of 1 or more"),
        ("MHAR_OUTPUT_DIR", "/proc/out", "output_dir: /proc/out cannot be written from here"),
        ("MHAR_RANKS_PER_NODE", "9", "MHAR_RANKS_PER_NODE: 9 given, but the job has 8 GPUs a node, one a rank"),
        ("MHAR_ROOT", "/no/checkout", "/no/checkout/slurm/common.sh: cannot be read"),
        (
            "MHAR_INTERFACE",
            "lo,^docker,bogus0",
            "MHAR_INTERFACE: bogus0 given, but a node has none of that name; it has ",
        ),
        ("MHAR_RENDER", "1", "MHAR_RENDER: set, so that the job would print its commands and start none"),
        ("SBATCH_EXPORT", "NONE", "export: NONE given, so that the job would not get MHAR_OUTPUT_DIR, "),
        ("SBATCH_OUTPUT", "/no/logs/%j", "output: the job's log would lie in /no/logs, which does not exist"),
    ],
)
def test_wrong_choices_of_the_site(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    assert message in refused(PRETRAIN)


def test_with_a_container_paths_are_those_in_it(
    cluster: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.sqsh").touch()
    monkeypatch.setenv("MHAR_CONTAINER", str(tmp_path / "m.sqsh"))
    result = call(PRETRAIN)
    assert result.exit_code == 0 and f"no mount of the container holds {corpus}/train; unless" in result.output
    monkeypatch.setenv("MHAR_MOUNTS", f"{corpus}:/corpus/walks:ro")
    for files, problem in (("train", ""), ("no", f"{corpus}/no")):
        monkeypatch.setenv("MHAR_TRAIN_DATA", f"[/corpus/walks/{files}]")
        monkeypatch.setenv("MHAR_VALID_DATA", "[/corpus/walks/valid]")
        if problem:
            assert problem in refused(PRETRAIN)
        else:
            assert call(PRETRAIN).exit_code == 0 and "no mount" not in call(PRETRAIN).output
    said = refused(PRETRAIN, "output_dir=/other", "data.train=[/corpus/walks/train]")
    assert "output_dir: no mount of the container holds /other, so that the run would be lost" in said


def test_of_several_partitions_one_must_fit(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "short,main")
    assert call(PRETRAIN).exit_code == 0
    assert "partition: gpu given" in refused("--partition", "main,gpu", PRETRAIN)
    assert "time: 3-0 given, but partition short allows 01:00:00" in refused("--time", "3-0", PRETRAIN)


def test_what_is_in_the_run_folder(cluster: Path) -> None:
    """Another run's is refused."""
    job = JobFile(ROOT / PRETRAIN, (), {}, os.environ)
    (training,) = job.trainings(job.render(None))
    config = load_config(training.config, training.overrides)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    (config.run_dir / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert call(PRETRAIN).exit_code == 0
    assert "holds a run with another config (optimizer.lr: " in refused(PRETRAIN, "optimizer.lr=5")


def test_several_reasons_are_told_at_once(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHAR_RETRIES", "-1")
    text = refused("--time", "3-0", PRETRAIN)
    assert text.startswith("2 reasons not to submit:\n  time: ") and "\n  MHAR_RETRIES" in text


def test_a_job_that_waits_for_others(cluster: Path) -> None:
    """Data may be made by them; a job that they leave in the lurch does not wait for ever."""
    result = call("--after", "7", "--after", "9", PRETRAIN, "data.train=[/not/yet]", check=False)
    assert result.exit_code == 0, result.exception
    assert "not checked: pretrain_1b.sbatch: data: the job waits for others, which may make it" in result.output
    submitted = (cluster / "submitted").read_text().splitlines()[-1]
    assert submitted.startswith("--dependency=afterok:7:9 --kill-on-invalid-dep=yes slurm/pretrain_1b.sbatch ")


@pytest.mark.parametrize("said,message", [
    ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "Slurm knows no job 7, and would not"),
    ("echo JobId=7 JobState=FAILED Reason=NonZeroExitCode", "job 7 has ended as FAILED: what waits for it"),
    ("echo JobId=7 JobState=RUNNING Reason=None", ""),
])  # fmt: skip
def test_jobs_to_wait_for(cluster: Path, said: str, message: str) -> None:
    tool(cluster, "scontrol", f"if [ \"$3\" = job ]; then {said}; fi\ncat <<'END'\n{PARTITIONS}END")
    if message:
        assert message in refused("--after", "7", PRETRAIN)
    else:
        assert call("--after", "7", PRETRAIN).exit_code == 0


def test_an_evaluation_needs_a_run(cluster: Path, tmp_path: Path, corpus: Path) -> None:
    evaluate = "slurm/evaluate.sbatch"
    assert "the folder of a run is missing" in refused(evaluate)
    assert "out/run: holds no run of mhar train" in refused(evaluate, f"{tmp_path}/out/run")
    result = call("--after", "7", evaluate, f"{tmp_path}/out/run")
    assert result.exit_code == 0 and "out/run: the job waits for others, which may make it" in result.output
    run = tiny_run(corpus, tmp_path / "out", training={"global_batch_size": 16})
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "config.yaml").write_text(dump_config(run))
    assert call("--nodes", "3", evaluate, str(run.run_dir), "--batches", "all").exit_code == 0, "it takes one node"
    assert "mhar evaluate: Invalid value for '--batches'" in refused(evaluate, str(run.run_dir), "--batches", "some")
    assert "training.global_batch_size: 12 given, but on 8 ranks" in refused(
        evaluate, str(run.run_dir), "training.global_batch_size=12"
    )


def test_a_file_from_another_system_is_named(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.sbatch"
    path.write_bytes((ROOT / PRETRAIN).read_bytes().replace(b"\n", b"\r\n"))
    assert "job.sbatch: has the line ends of DOS" in refused(str(path))
    monkeypatch.setenv("PATH", "")
    assert "pretrain_1b.sbatch: bash, which runs it, is not on the path here" in refused(PRETRAIN)


def test_a_script_of_another_kind_is_not_run(cluster: Path, tmp_path: Path) -> None:
    """To look at a job file is to run it in dry form, which it must know."""
    path = tmp_path / "own.sbatch"
    path.write_text(f"#!/bin/bash\n# not slurm/common.sh\ntouch {tmp_path}/done\nsrun true\n")
    assert "own.sbatch: has no line that sources slurm/common.sh" in refused(str(path))
    assert not (tmp_path / "done").exists()


def test_a_folder_that_nodes_do_not_see(cluster: Path) -> None:
    tool(cluster, "srun", "echo; exit 0")
    assert "a node does not see what is written to" in refused(PRETRAIN)


def test_what_cannot_be_checked_is_said(cluster: Path) -> None:
    tool(cluster, "srun", "echo 'srun: error: Unable to allocate resources: Requested nodes are busy' >&2; exit 1")
    tool(cluster, "scontrol", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    result = call(PRETRAIN)
    assert result.exit_code == 0
    assert "not checked: output_dir: whether nodes see" in result.output and "Requested nodes are busy" in result.output
    assert "not checked: partition, time, nodes: scontrol cannot tell them" in result.output


def test_what_sbatch_refuses(cluster: Path) -> None:
    (cluster / "refuse").touch()
    assert "sbatch --test-only: error: Invalid account allocation failure: Bad account" in refused(PRETRAIN)


def test_a_job_file_that_fails_is_told_with_what_it_says(cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text('#!/bin/bash\nsource "$MHAR_ROOT/slurm/common.sh"\ntrain run "${CONFIG:?choose one}"\n')
    assert "CONFIG: choose one" in refused(str(path))
