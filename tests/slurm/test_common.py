"""The life of a training job in slurm/common.sh, with stand-ins for srun and scontrol that do what a test says."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_mhar.launch.attempts import read_attempts
from megatron_mhar.run_files import GOES_ON
from tests.launch import ROOT

JOB = """\
#!/usr/bin/env bash
source "$MHAR_ROOT/slurm/common.sh" || exit 2
train run configs/demo/mhar.yaml training.steps=3 "$@"
echo NEXT
"""


class Job:
    """A job that has been submitted: each :meth:`start` is a start by Slurm."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "out" / "run"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.file = folder / "job.sbatch"
        self.file.write_text(JOB)
        self.requeued = folder / "requeued"
        self._tool("scontrol", f'echo "$*" >>{self.requeued}')
        self._tool("squeue", "exit 1")
        self._tool("mhar", "exit 0")
        self.srun_help = "--container-image=IMAGE"
        self.restart = 0

    def _tool(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def _popen(self, srun: str, arguments: tuple[str, ...], **environment: str) -> subprocess.Popen[str]:
        knows = f'[ "$1" != --help ] || {{ echo "{self.srun_help}"; exit; }}'
        self._tool("srun", f'{knows}\nrun_dir={self.run_dir}\necho "$@" >>{self.bin}/calls\n{srun}')
        values = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MHAR_"))}
        values |= {
            "MHAR_ROOT": str(ROOT), "MHAR_OUTPUT_DIR": str(self.run_dir.parent), "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": str(self.restart),
            "MHAR_VENV": str(self.bin.parent), "PATH": f"{self.bin}:{os.environ['PATH']}", **environment,
        }  # fmt: skip
        self.restart += 1
        command = ["bash", str(self.file), *arguments]
        return subprocess.Popen(
            command, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def show(self, text: str) -> None:
        """What scontrol says of the job."""
        self._tool("scontrol", f'[ "$*" = "--oneliner show job 12" ] && echo "{text}" || echo "$*" >>{self.requeued}')

    def start(self, srun: str, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self._popen(srun, arguments, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def requeues(self) -> int:
        return len(self.requeued.read_text().splitlines()) if self.requeued.exists() else 0

    def ends(self) -> list[str]:
        return [attempt.text for attempt in read_attempts(self.run_dir) if attempt.event == "end"]


SAVE = 'mkdir -p "$run_dir/checkpoints/step_0000000{}"; mkdir -p "$run_dir/checkpoints/step_00000009.ab.partial"\n'
FAIL = 'echo "100.5 1 lost its neighbour" >"$MHAR_LOGS/node-0001.end"; echo "99.1 137 rank 3 was killed" >"$MHAR_LOGS/node-0000.end"; exit 143'  # noqa: E501
FINISH = 'echo "{}" >"$run_dir/summary.json"'


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_run_that_finishes_is_not_started_again(job: Job) -> None:
    code, output = job.start(FINISH)
    assert code == 0 and "NEXT" in output
    assert job.ends() == ["finished"] and job.requeues() == 0
    code, output = job.start("exit 1")
    assert code == 0 and "is finished already" in output
    assert len((job.bin / "calls").read_text().splitlines()) == 1


def test_whether_it_is_finished_for_other_settings_of_the_same_job_mhar_says(job: Job) -> None:
    """The job file trains in the same folder twice."""
    job.file.write_text(JOB + "train run configs/demo/mhar.yaml training.steps=3 optimizer.lr=1\n")
    refusal = 'echo "99.1 2 mhar says: another config" >"$MHAR_LOGS/node-0000.end"; exit 143'
    code, output = job.start(f"case $* in *lr=1*) {refusal} ;; esac\n{FINISH}")
    assert code == 2 and "NEXT" in output and "mhar says: another config; not requeued" in output


def test_whether_it_is_finished_for_another_job_mhar_says(job: Job) -> None:
    """Another job may have been given another config."""
    job.start(FINISH)
    code, output = job.start("exit 0", SLURM_JOB_ID="13")
    assert code == 0 and "NEXT" in output and job.ends() == ["finished", "finished"]
    refusal = 'echo "99.1 2 mhar says: another config" >"$MHAR_LOGS/node-0000.end"; exit 143'
    code, output = job.start(refusal, SLURM_JOB_ID="14")
    assert code == 2 and "mhar says: another config; not requeued" in output and "NEXT" not in output


def test_the_command_is_that_of_launch_node_with_what_the_user_gave_last(job: Job) -> None:
    job.start(FINISH, "optimizer.lr=1", MHAR_TRAIN_DATA="[/a, /b]", MHAR_CONTAINER="img", MHAR_MOUNTS="/a:/a")
    call = (job.bin / "calls").read_text()
    assert f"{ROOT}/launch/node configs/demo/mhar.yaml name=run output_dir={job.run_dir.parent} " in call
    assert call.rstrip().endswith("data.train=[/a, /b] training.steps=3 optimizer.lr=1")
    assert "--container-image=img" in call and f"--container-mounts={ROOT}:{ROOT},{job.run_dir.parent}:" in call
    assert ",/a:/a " in call


def test_a_name_given_by_the_user_is_the_folder(job: Job) -> None:
    job.start('mkdir -p "$run_dir/../other"; echo "{}" >"$run_dir/../other/summary.json"', "name=other")
    assert [attempt.text for attempt in read_attempts(job.run_dir.parent / "other")][-1] == "finished"


def test_a_failure_is_requeued_with_the_first_reason_and_goes_on_from_the_newest_checkpoint(job: Job) -> None:
    code, output = job.start(SAVE.format(3) + FAIL)
    assert code == 1 and job.requeues() == 1 and "NEXT" not in output
    assert "rank 3 was killed; requeued, goes on from step 3" in output
    code, output = job.start(FINISH)
    assert code == 0 and "start 2 of" in output and "from step 3" in output
    assert [(a.event, a.restart, a.step) for a in read_attempts(job.run_dir)] == [
        ("start", 0, 0), ("end", 0, 3), ("start", 1, 3), ("end", 1, 3),
    ]  # fmt: skip


def test_it_gives_up_without_progress_and_counts_anew_with_it(job: Job) -> None:
    for step in (1, 2):  # each brings a checkpoint, and may then fail as often again
        job.start(SAVE.format(step) + FAIL, MHAR_RETRIES="1")
    assert job.requeues() == 2
    job.start(FAIL, MHAR_RETRIES="1")
    assert job.requeues() == 3
    code, output = job.start(FAIL, MHAR_RETRIES="1")
    assert code == 1 and job.requeues() == 3
    assert "gave up: 1 requeues brought no newer checkpoint than that of step 2" in output
    # Submitted again once the cause is gone, it is another job.
    code, _ = job.start(FINISH, MHAR_RETRIES="1", SLURM_JOB_ID="13")
    assert code == 0


def test_slurms_own_requeues_are_counted_too(job: Job) -> None:
    """A lost first node takes the job's script with it: nothing is written, and Slurm starts the job again."""
    for _ in range(4):
        process = job._popen("sleep 60", ())
        calls = job.restart
        while not (job.bin / "calls").exists() or len((job.bin / "calls").read_text().splitlines()) < calls:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    code, output = job.start("sleep 60")
    assert code == 1 and "gave up: 3 requeues" in output
    assert "the start before ended without a word" in output


def test_a_run_that_another_job_trains_is_left_alone(job: Job) -> None:
    """Not even started there: whose end it is would be told wrongly."""
    process = job._popen("sleep 60", ())
    while not read_attempts(job.run_dir):
        time.sleep(0.05)
    # Of the number of an array's last task Slurm tells all tasks.
    job._tool("squeue", '[ "$2 $3" = "--jobs=12 --format=%A %i %T" ] && echo "11 12_0 RUNNING"')
    try:
        job._tool(
            "squeue",
            '[ "$2 $3" = "--jobs=12 --format=%A %i %T" ] && { echo "11 12_0 RUNNING"; echo "12 12_3 RUNNING"; }',
        )
        code, output = job.start(FINISH, SLURM_JOB_ID="13")
        assert (
            code == 2
            and f"{job.run_dir}: job 12_3 is training in this folder; wait for its end, scancel 12_3," in output
        )
        assert [(attempt.job, attempt.event) for attempt in read_attempts(job.run_dir)] == [("12", "start")]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    job._tool("squeue", "exit 1")
    code, output = job.start(FINISH, SLURM_JOB_ID="13")
    assert code == 0 and "the start before ended without a word" in output
    assert [(attempt.job, attempt.event) for attempt in read_attempts(job.run_dir)] == [
        ("12", "start"), ("12", "end"), ("13", "start"), ("13", "end"),
    ]  # fmt: skip


def test_a_job_that_still_saves_is_waited_for(job: Job) -> None:
    """It is cancelled, and has told its end, but its ranks have the folder."""
    job.start("exit 1", SLURM_JOB_ID="11")
    calls = job.bin.parent / "squeue-calls"
    ends = f'echo x >>{calls}; [ "$(wc -l <{calls})" -gt 2 ] || echo 11'
    job._tool("squeue", f'case "$*" in *"--jobs=11 --states=COMPLETING "*) {ends} ;; esac')
    code, output = job.start(FINISH)
    assert code == 0 and output.count("job 11 is ending, and may be saving: waiting for it") == 1
    assert len(calls.read_text().splitlines()) == 3


@pytest.mark.parametrize("environment,message", [
    ({"MHAR_WAIT": "0"}, "MHAR_WAIT: 0 given, which srun takes for ever; it must be 1 or more"),
    ({"MHAR_RETRIES": "often"}, "MHAR_RETRIES: 'often' given, but it must be a whole number of 0 or more"),
    ({"MHAR_VENV": "/no/venv"}, "MHAR_VENV: /no/venv has no bin/mhar on "),
    ({"MHAR_CONTAINER": "img"}, "MHAR_CONTAINER: img given, but srun of this cluster knows no --container-image"),
    ({"SLURM_JOB_ID": ""}, "this is a job file for Slurm: sbatch FILE"),
])  # fmt: skip
def test_what_cannot_work_ends_at_once(job: Job, environment: dict[str, str], message: str) -> None:
    """With its reason, before anything is started, and not to be tried again."""
    job.srun_help = "--no-container"  # as without the plugin
    code, output = job.start("", **environment)
    assert code == 2 and output.startswith(f"mhar: error: {message}"), output
    assert not job.run_dir.exists() and job.requeues() == 0


def test_choices_of_the_site_may_be_relative_and_have_spaces(job: Job) -> None:
    code, output = job.start("", MHAR_OUTPUT_DIR="no/such runs", MHAR_RETRIES="08", MHAR_RENDER="1")
    assert code == 0
    (command,) = (shlex.split(line) for line in output.splitlines() if line.startswith("srun"))
    assert f"output_dir={ROOT}/no/such runs" in command


def test_a_task_that_the_array_does_not_have() -> None:
    environment = {"PATH": os.environ["PATH"], "MHAR_ROOT": str(ROOT), "MHAR_RENDER": "1"}
    for task, message in (
        ("4", "--array: task 4 given, but there are 0 to 3: baseline "),
        ("", "this file is a job array"),
    ):
        done = subprocess.run(
            ["bash", str(ROOT / "slurm/compare_methods.sbatch")], env=environment | {"SLURM_ARRAY_TASK_ID": task},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith(f"mhar: error: {message}"), done.stderr


def test_a_task_of_an_array_is_called_by_its_own_name(job: Job) -> None:
    """The last one's number is that of the array too: scontrol would requeue, and change, all tasks."""
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    job.start('echo node2 >"$MHAR_LOGS/bad-nodes"; exit 3', **array)
    requeue, show, update = job.requeued.read_text().splitlines()
    assert (requeue, show) == ("requeue 12_3", "--oneliner show job 12_3")
    assert update == "update JobId=12_3 ExcNodeList=node2"
    assert [attempt.job for attempt in read_attempts(job.run_dir)] == ["12", "12"]


def test_what_would_end_the_same_is_not_requeued(job: Job) -> None:
    code, output = job.start('echo "99.1 2 mhar says: bad input" >"$MHAR_LOGS/node-0000.end"; exit 143')
    assert code == 2 and job.requeues() == 0
    assert job.ends() == ["mhar says: bad input; not requeued: it would end the same"]


def test_a_node_that_leaves_no_word_is_requeued(job: Job) -> None:
    job.start("exit 9")
    assert job.requeues() == 1
    assert job.ends()[0].startswith("srun ended with code 9 and no node has said why")


@pytest.mark.parametrize("said,ends", [
    ("Job is pending execution for job 12", 1),  # Slurm was first
    ("Requested operation is presently disabled", 2),
])  # fmt: skip
def test_a_requeue_that_slurm_does_not_take(job: Job, said: str, ends: int) -> None:
    job._tool("scontrol", f'echo "{said}" >&2; exit 1')
    code, output = job.start(FAIL)
    assert code == 1 and len(job.ends()) == ends
    assert ("Slurm has requeued it already" in output) == (ends == 1)
    assert (f"the requeue was refused ({said}): submit the same job file again" in output) == (ends == 2)


def test_on_a_full_disk_the_reason_comes_another_way(job: Job, tmp_path: Path) -> None:
    """No line can be written to the run folder: neither attempts.tsv nor what the nodes leave."""
    full = 'rm "$run_dir/attempts.tsv"; mkdir "$run_dir/attempts.tsv"\n'
    left = (
        'left="$TMPDIR/mhar-${MHAR_LOGS##*/}"; mkdir "$left"\n'
        'echo "98.0 1 it said nothing" >"$left/node-0001.end"; echo "99.1 2 disk full" >"$left/node-0000.end"; exit 143'
    )
    code, output = job.start(full + left, TMPDIR=str(tmp_path))
    assert code == 2 and job.requeues() == 0
    assert "disk full; not requeued: it would end the same" in output
    assert not list(tmp_path.glob("mhar-*"))
    (job.run_dir / "attempts.tsv").rmdir()
    code, output = job.start("exit 2", TMPDIR=str(tmp_path))
    assert code == 2 and "srun ended with code 2 and no node has said why: see above" in output


def bad(*nodes: str) -> str:
    named = "".join(f"{node}\\n" for node in nodes)
    return (
        f"printf '{named}' >\"$MHAR_LOGS/bad-nodes\"\n"
        f'echo "99.1 3 node {nodes[0]} is bad: ECC" >"$MHAR_LOGS/node-0000.end"; exit 3'
    )


def test_bad_nodes_are_excluded_within_bounds(job: Job) -> None:
    job.show("JobId=12 JobName=x ExcNodeList=(null) NodeList=node[1-2]")
    code, _ = job.start(bad("node2"))
    assert code == 1
    assert job.ends() == ["node node2 is bad: ECC; requeued without node2, goes on from step 0"]
    assert job.requeued.read_text().splitlines() == ["requeue 12", "update JobId=12 ExcNodeList=node2"]
    job.show("JobId=12 JobName=x ExcNodeList=node[2,9] NodeList=node[1,3]")
    job.start(bad("node1"))
    assert job.requeued.read_text().splitlines()[-1] == "update JobId=12 ExcNodeList=node[2,9],node1,node2"
    code, _ = job.start(bad("node3"))
    assert code == 1 and job.requeues() == 4
    assert job.ends()[-1] == "node node3 is bad: ECC; gave up: MHAR_EXCLUDE_NODES allows 2 to be excluded"


def test_no_node_is_excluded_where_it_is_not_allowed(job: Job) -> None:
    code, output = job.start(bad("node2"), MHAR_EXCLUDE_NODES="0")
    assert code == 1 and job.requeues() == 0
    assert "node node2 is bad: ECC; gave up: MHAR_EXCLUDE_NODES allows 0" in output


def says(words: str) -> str:
    """What a rank leaves in the run's log."""
    line = f"2026-01-02 11:59:10 stopped by {words} after step 2, saved at step 2; {GOES_ON}"
    return f'echo "{line}" >>"$run_dir/log.txt"\n'


def test_stopped_as_asked_is_an_end(job: Job) -> None:
    code, output = job.start(says("SIGINT") + says("stop_after"))
    assert code == 0 and job.requeues() == 0 and "NEXT" not in output
    assert job.ends()[0].startswith("stopped as asked")


def test_a_signal_that_only_the_ranks_get_is_no_end(job: Job) -> None:
    """As a preemption with a grace time gives it to the job's steps."""
    code, output = job.start(SAVE.format(2) + says("stop_after") + says("SIGTERM"))
    assert code == 1 and job.requeues() == 1 and "NEXT" not in output
    assert job.ends()[0].startswith("the ranks were told to stop, this script was not")
    assert job.ends()[0].endswith("; requeued, goes on from step 2")


def test_an_image_in_the_checkout_is_told_to_pyxis_as_a_file(job: Job) -> None:
    for given, told in (
        ("images/m.sqsh", f"{ROOT}/images/m.sqsh"),
        ("./m.sqsh", "./m.sqsh"),
        ("nvcr.io#x", "nvcr.io#x"),
    ):
        _, output = job.start("", MHAR_CONTAINER=given, MHAR_RENDER="1")
        (command,) = (shlex.split(line) for line in output.splitlines() if line.startswith("srun"))
        assert f"--container-image={told}" in command


LISTEN = """\
trap 'mkdir -p "$run_dir/checkpoints/step_00000007"; exit 0' USR1
echo $$ >"$run_dir/partial"; mv "$run_dir/partial" "$run_dir/ready"
while true; do sleep 0.1; done
"""


CANCELLED = "ended by Slurm (SIGTERM): cancelled, requeued by hand, preempted or out of time; the ranks save and stop"


@pytest.mark.parametrize("name,known,code,requeues,text", [
    ("USR1", None, 1, 1, "stopped ahead of the time limit (SIGUSR1); requeued, goes on from step 7"),
    ("TERM", None, 143, 0, CANCELLED),
    # A node has told it before Slurm noticed; what a rank says of Slurm's own signal is no reason.
    ("TERM", 8, 143, 0, "node b is lost; Slurm ends the job (SIGTERM)"),
    ("TERM", 0, 143, 0, CANCELLED),
])  # fmt: skip
def test_signals(job: Job, name: str, known: int | None, code: int, requeues: int, text: str) -> None:
    told = (
        ""
        if known is None
        else f'echo "$((EPOCHSECONDS - {known})).123 137 node b is lost" >"$MHAR_LOGS/node-0000.end"\n'
    )
    process = job._popen(told + LISTEN, ())
    while not (job.run_dir / "ready").exists():
        time.sleep(0.05)
    process.send_signal(getattr(signal, f"SIG{name}"))
    if name == "TERM":  # Slurm tells the ranks itself
        time.sleep(0.5)
        assert process.poll() is None, "the job must wait for its ranks"
        os.kill(int((job.run_dir / "ready").read_text()), signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert job.requeues() == requeues
    assert job.ends() == [text] and text in output
