"""Bad input to every command: one error that says what is wrong, a non-zero exit, and nothing half-written."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megatron_mhar.cli import main as cli
from megatron_mhar.config.load import dump_config
from tests.conftest import tiny_run

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("commands_worker.py")
LAST = 4  # steps of the runs here


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below ``folder`` and what is in it, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def the_error(code: object, stderr: str) -> str:
    """The one error that a command ended with; what a run logged before it is left out."""
    assert code == 2, stderr
    assert "Traceback" not in stderr
    before, _, error = stderr.partition("mhar: error: ")
    assert error and "error: " not in error, stderr
    assert all(re.match(r"\d{4}-\d\d-\d\d ", line) for line in before.splitlines()), before
    return error.rstrip("\n")


@pytest.fixture
def mhar(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Run a command in this process: exit code and stderr."""

    def run(*arguments: object) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def refused(mhar: Callable[..., tuple[object, str]], tmp_path: Path) -> Callable[..., str]:
    """The error of a command that leaves everything as it was."""

    def run(*arguments: object) -> str:
        before = contents(tmp_path)
        error = the_error(*mhar(*arguments))
        assert contents(tmp_path) == before
        return error

    return run


def write_config(folder: Path, data: Path, **sections: object) -> Path:
    """A config of a tiny run of ``LAST`` steps in folder/runs/run."""
    training = {"steps": LAST, **sections.pop("training", {})}  # type: ignore[dict-item]
    values: dict[str, object] = {
        "model": {"num_layers": 1, "hidden_size": 32},
        "residual": {"method": "mhar", "num_heads": 2},
        "checkpoint": {"interval": 2},
        **sections,
    }
    config = tiny_run(data, folder / "runs", training=training, **values)
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


# --- before torch is imported ---------------------------------------------------------------------------------------

OVERRIDES = {
    "training.stesp=3": "training.stesp=3: unknown key; did you mean training.steps?",
    "residual.method=mhra": "residual.method=mhra: \"mhra\" given, but it must be 'baseline', ",
    "training.steps": "an override is written dot.path=value",
    "training.steps=": "no value given",
    "training.steps=0": "training.steps=0: 0 given, but it must be greater than 0",
    "training.steps=many": 'training.steps=many: "many" given, but it must be a whole number',
    "model=8": "model=8: 8 given, but it must be a section of keys",
    "optimizer.lr=.nan": "NaN given, but it must be a finite number",
    "training.precision=fp16": "\"fp16\" given, but it must be 'bf16', 'fp32' or 'fp8'",
    "residual.num_heads=3": "num_heads=3: 3 given",
    "parallel.tensor=3": "3 given, but it must divide model.num_attention_heads 4",
    "parallel.sequence=true": "true given, but sequence parallelism needs tensor > 1",
    "parallel.virtual_stages=2": "2 given, but virtual stages need pipeline > 1",
    "parallel.stage_sublayers=[4, 4]": "4, 4 given, but pipeline 1 x virtual_stages 1 needs 1 numbers",
    "parallel.context=3": "3 given, but 6 must divide training.sequence_length",
    "parallel.expert=2": "2 given, but the model has no experts",
    "parallel.fsdp=true": "true given, but FSDP is not supported",
    "data.document_masks=true": "true given, but document masks are not supported",
    "data.train=[]": "but it needs at least 1",
    "training.global_batch_size=3": "3 given, but it must be a multiple of training.micro_batch_size 2",
    "optimizer.warmup_steps=4": "4 given, but the schedule ends at step 4",
    "name=../x": "'../x' given; allowed: letters, digits",
    'output_dir="a\\0b"': "'a\\x00b' given, but a path here has no control characters",
    'data.train=["a\\0b"]': "'a\\x00b' given, but a path here has no control characters",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_train_override(override: str, refused: Callable[..., str], tmp_path: Path) -> None:
    error = refused("train", write_config(tmp_path, Path("data")), override)
    assert error.startswith("command line: ") and OVERRIDES[override] in error
    assert len(error.splitlines()) == 1


CONFIGS = {
    "is missing": (None, "config.yaml: no such config file"),
    "is a folder": ("", "config.yaml: cannot read the config file: Is a directory"),
    "is binary": (b"name: \xff\xfe", "config.yaml: not YAML: no UTF-8 text (byte 6)"),
    "is cut off": (b"model: {num_layers: 1,", "config.yaml:1: not YAML: "),
    "is empty": (b"", "config.yaml: nothing given, but a config file holds sections of keys"),
    "has an unknown key": (b"name: x\n\nmodle:\n  num_layers: 2\n", "config.yaml:3: modle: unknown key; did you mean"),
    "has a missing base": (b"base: none.yaml\n", "none.yaml: no such config file (base of "),
    "is its own base": (b"base: config.yaml\n", "config.yaml:1: base: config.yaml leads back to itself"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_train_config(what: str, refused: Callable[..., str], tmp_path: Path) -> None:
    text, message = CONFIGS[what]
    path = tmp_path / "config.yaml"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.mkdir()
    assert message in refused("train", path)


def test_several_mistakes_are_one_error(refused: Callable[..., str], tmp_path: Path) -> None:
    error = refused("train", write_config(tmp_path, Path("data")), "training.steps=0", "optimizer.lrr=1")
    assert error.startswith("2 mistakes in the config:\n")
    assert "training.steps=0" in error and "did you mean optimizer.lr?" in error


def test_mistakes_in_configs_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, Path("data")))
    commands = [["train", config, override] for override in OVERRIDES] + [["train", str(tmp_path / "none.yaml")]]
    code = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from tests.cli.commands_worker import run\n"
        "codes = {run(command)[0] for command in json.loads(sys.argv[2])}\n"
        "sys.exit(f'{codes}' if codes != {2} or {'torch', 'megatron', 'mlflow'} & set(sys.modules) else 0)\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), json.dumps(commands)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


# --- data files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def data(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may damage."""
    return shutil.copytree(corpus, tmp_path / "data")


def overwrite(path: Path, offset: int, values: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(values)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SEQUENCES = 120  # of the corpus's train file; its index is a header of 34 bytes, lengths, starts and document ends
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "index missing": (lambda d: (d / "train.idx").unlink(), r"train\.idx: no such file"),
    "tokens missing": (lambda d: (d / "train.bin").unlink(), r"train\.bin: no such file"),
    "validation missing": (lambda d: (d / "valid.idx").unlink(), r"valid\.idx: no such file"),
    "index empty": (lambda d: (d / "train.idx").write_bytes(b""), r"train\.idx: 0 bytes, too short for a Megatron"),
    "index no index": (lambda d: (d / "train.idx").write_bytes(b"x" * 90), r"train\.idx: not a Megatron index"),
    "index of version 2": (
        lambda d: overwrite(d / "train.idx", 9, struct.pack("<Q", 2)),
        r"train\.idx: a Megatron index of version 2, but version 1 is read",
    ),
    "index of unknown type": (lambda d: overwrite(d / "train.idx", 17, b"\x63"), r"train: cannot be read.*99"),
    "index of floats": (lambda d: overwrite(d / "train.idx", 17, b"\x07"), r"train\.idx: says that.*float32"),
    "index cut off": (lambda d: cut(d / "train.idx"), r"train\.idx: \d+ bytes, but 120 sequences need \d+; it was cut"),
    "index with a wrong length": (
        lambda d: overwrite(d / "train.idx", 34, struct.pack("<ii", -5, 10**6)),
        r"train\.idx: damaged, its sequences do not follow one another",
    ),
    "index with wrong documents": (
        lambda d: overwrite(d / "train.idx", 34 + SEQUENCES * 12, struct.pack("<qq", 0, 10**9)),
        r"train\.idx: damaged, its documents do not follow one another",
    ),
    "tokens cut off": (lambda d: cut(d / "train.bin"), r"train\.bin: \d+ bytes, but train\.idx counts \d+ tokens of 2"),
    "tokens a folder": (
        lambda d: make_folder(d / "train.bin"),
        r"train\.bin: no such file",
    ),
    "manifest damaged": (lambda d: (d / "corpus.json").write_text("{"), r"corpus\.json: not the manifest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_train_data(damage: str, refused: Callable[..., str], data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data)
    act, message = DAMAGES[damage]
    act(data)
    key = {"manifest damaged": "", "validation missing": "data.valid: "}.get(damage, "data.train: ")
    assert re.match(f"{key}{re.escape(str(data))}/{message}", refused("train", config))


@pytest.mark.parametrize("override", ["optimizer.ema_decay=0.9", "optimizer.lr=3"])
def test_an_evaluation_has_no_optimizer_of_its_own(
    override: str, mhar: Callable[..., tuple[object, str]], refused: Callable[..., str], data: Path, tmp_path: Path
) -> None:
    assert mhar("train", write_config(tmp_path, data), "training.stop_after=1")[0] == 0
    error = refused("evaluate", tmp_path / "runs/run", override)
    assert error.startswith(f"command line: {override}: an evaluation takes the run's optimizer as it is")


def test_train_data_shorter_than_a_sample(refused: Callable[..., str], data: Path, tmp_path: Path) -> None:
    error = refused("train", write_config(tmp_path, data), "training.sequence_length=1000000")
    assert re.search(r"train\.bin: \d+ tokens, too few for one sample of sequence_length 1000000 \+ 1", error)


def test_token_outside_the_vocabulary_and_the_run_begins_anew_with_right_data(
    mhar: Callable[..., tuple[object, str]], data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data)
    tokens = np.fromfile(data / "train.bin", np.uint16)
    (tokens + 100).tofile(data / "train.bin")
    error = the_error(*mhar("train", config))
    assert re.match(r"data: token id \d+ found, but model\.vocab_size is 128 \(ids 0 to 127\)", error)
    assert not list((tmp_path / "runs/run").rglob("step_*"))
    tokens.tofile(data / "train.bin")
    assert mhar("train", config, "optimizer.lr=1e-3")[0] == 0


# --- layout ---------------------------------------------------------------------------------------------------------


def test_train_layout_on_one_rank(refused: Callable[..., str], data: Path, tmp_path: Path) -> None:
    error = refused("train", write_config(tmp_path, data), "parallel.tensor=2")
    assert error.startswith("parallel.tensor: 2 given, but it must divide the number of ranks, 1")


def test_train_fused_reads_without_a_gpu(
    refused: Callable[..., str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_mhar import platform

    if platform.HAS_GPU:
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    error = refused("train", write_config(tmp_path, data), "residual.backend=triton")
    assert error.startswith("residual.backend: routing backend 'triton' given, but it needs Triton and a GPU")


def test_train_transformer_engine_without_a_gpu(refused: Callable[..., str], data: Path, tmp_path: Path) -> None:
    from megatron_mhar import platform

    if platform.HAS_GPU:
        pytest.skip("this machine has a GPU")
    error = refused("train", write_config(tmp_path, data), "model.layers=transformer_engine")
    assert error.startswith("model.layers: transformer_engine given, but ") and "local" in error


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_two_ranks_end_together_with_the_same_error(data: Path, tmp_path: Path) -> None:
    """Also where one of them alone has met it; and no rank waits for another that has gone."""
    config = str(write_config(tmp_path, data))
    bad = shutil.copytree(data, tmp_path / "bad")
    tokens = np.fromfile(bad / "train.bin", np.uint16)
    tokens[3000] = 999  # in one sample, so on one rank
    tokens.tofile(bad / "train.bin")
    (tmp_path / "file").write_text("")
    cases = {
        "parallel.tensor=4": r"parallel\.tensor: 4 given, but it must divide the number of ranks, 2",
        "training.micro_batch_size=4": r"training\.global_batch_size: 4 given, but on 2 ranks it must be a multiple of",
        "data.valid=[none]": r"data\.valid: none\.idx: no such file",
        f"output_dir={tmp_path / 'file'}": r".*file/run: the run folder cannot be written \(Not a directory\)",
        f"data.train=[{bad / 'train'}]": r"data: token id 999 found",
    }
    extra = {"parallel.tensor=4": ["model.num_query_groups=4"], f"data.train=[{bad / 'train'}]": ["training.steps=200"]}
    commands = [["train", config, override, *extra.get(override, [])] for override in cases]
    (tmp_path / "in").write_text(json.dumps(commands))
    before = contents(tmp_path)
    result = torchrun(str(WORKER), str(tmp_path / "in"), str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    one, other = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2))
    for message, first, second in zip(cases.values(), one, other, strict=True):
        assert re.match(message, the_error(*first)), first
        assert the_error(*second) == the_error(*first)
    left = {path for path in contents(tmp_path).keys() - before.keys() if not path.startswith(("runs/run/", "out."))}
    assert left <= {"runs", "runs/run"}  # of the last case, which had begun


def test_a_launcher_shows_the_error_once(tmp_path: Path) -> None:
    result = torchrun("-m", "megatron_mhar.cli.main", "train", str(write_config(tmp_path, tmp_path / "data")))
    assert result.returncode == 1  # torchrun's own
    assert result.stderr.count("mhar: error: ") == 1
    assert "data/train.idx: no such file" in result.stderr
    ours = result.stderr.partition("Traceback")[0]  # torchrun's own report has one
    assert "mhar: error: " in ours and "cli/main.py" not in result.stderr


# --- the run's folder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the config and the run folder of a run that is done."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(write_config(folder, corpus))])
    assert end.value.code == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's folder."""
    shutil.copy(finished / "config.yaml", tmp_path)
    return shutil.copytree(finished / "runs", tmp_path / "runs") / "run"


@pytest.fixture
def stopped(run: Path) -> Path:
    """The run as it is when its summary was not written yet."""
    (run / "summary.json").unlink()
    return run


def go_on(folder: Path) -> list[object]:
    """Arguments that train in a copied folder."""
    return ["train", folder / "config.yaml", f"output_dir={folder / 'runs'}"]


def test_saving_starts_no_process_that_the_signal_of_a_job_could_end(finished: Path) -> None:
    assert len(list((finished / "runs/run/checkpoints").iterdir())) == 2
    assert multiprocessing.active_children() == []


def test_train_into_a_file(refused: Callable[..., str], data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data)
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        error = refused("train", config, f"output_dir={tmp_path / place}")
        assert error.startswith(f"{tmp_path / place}/run: the run folder cannot be written (")
        assert "choose another by output_dir=... or name=..." in error
    error = refused("train", config, f"output_dir={tmp_path}/new", f"name={'x' * 300}")
    assert "the run folder cannot be written (File name too long)" in error


def test_train_over_another_run(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    error = refused(*go_on(tmp_path), "optimizer.lr=1", "residual.num_heads=4")
    assert error.startswith(f"{run}: holds a run with another config")
    assert "optimizer.lr: 0.003 there, 1.0 given" in error and "residual.num_heads: 2 there, 4 given" in error


def test_train_on_data_that_have_changed(
    refused: Callable[..., str], corpus: Path, stopped: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "valid"):  # a corpus of the same names and vocabulary
        for ending in ("idx", "bin"):
            source = "valid" if split == "train" else "train"
            shutil.copy(corpus / f"{source}.{ending}", other / f"{split}.{ending}")
    error = refused(*go_on(tmp_path), f"data.train=[{other}/train]")
    assert error.startswith(f"{stopped}: was trained on other data")
    error = refused(*go_on(tmp_path), f"data.valid=[{other}/valid]")
    assert error.startswith(f"{stopped}: was evaluated on other data") and "mhar evaluate takes other" in error


def test_the_same_data_may_move(
    mhar: Callable[..., tuple[object, str]], data: Path, stopped: Path, tmp_path: Path
) -> None:
    code, stderr = mhar(*go_on(tmp_path), f"data.train=[{data}/train]", f"data.valid=[{data}/valid]")
    assert code == 0, stderr
    assert (stopped / "summary.json").is_file()


def empty(path: Path) -> int:
    return path.write_bytes(b"")


NEWEST = f"step_{LAST:08d}"
RUN_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "summary": (lambda r: (r / "summary.json").write_text("{"), r"summary\.json: content: Invalid JSON"),
    "summary of nothing": (lambda r: empty(r / "summary.json"), r"summary\.json: content: Invalid JSON"),
    "digests": (lambda r: (r / "data.json").write_text("[]"), r"data\.json: does not hold the digests"),
    "digests cut off": (lambda r: cut(r / "data.json"), r"data\.json: does not hold the digests"),
    "config": (lambda r: (r / "config.yaml").write_text("name: ["), r"config\.yaml:1: not YAML"),
    "config missing": (lambda r: (r / "config.yaml").unlink(), "holds a run without its config"),
}
CHECKPOINT_DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights missing": lambda c: [path.rename(c / "moved") for path in c.glob("*.distcp")],
    "weights empty": lambda c: [empty(path) for path in c.glob("*.distcp")],
    "weights of noise": lambda c: [path.write_bytes(b"?" * path.stat().st_size) for path in c.glob("*.distcp")],
    "index missing": lambda c: (c / ".metadata").unlink(),
    "index cut off": lambda c: cut(c / ".metadata"),
    "index empty": lambda c: empty(c / ".metadata"),
    "description empty": lambda c: empty(c / "metadata.json"),
    "description of nothing": lambda c: (c / "metadata.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", RUN_DAMAGES)
def test_train_in_a_damaged_run(damage: str, refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    act, message = RUN_DAMAGES[damage]
    act(run)
    assert re.match(f"{re.escape(str(run))}[/:] ?{message}", refused(*go_on(tmp_path)))


@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGES)
def test_train_from_a_damaged_checkpoint(
    damage: str, mhar: Callable[..., tuple[object, str]], stopped: Path, tmp_path: Path
) -> None:
    checkpoint = stopped / "checkpoints" / NEWEST
    CHECKPOINT_DAMAGES[damage](checkpoint)
    before = contents(stopped / "checkpoints")
    error = the_error(*mhar(*go_on(tmp_path)))
    assert error.startswith(f"{checkpoint}: the checkpoint cannot be loaded (") and len(error) < 700
    assert "Remove it, and the one before it is used" in error
    assert contents(stopped / "checkpoints") == before


def test_the_advice_about_a_damaged_checkpoint_works(
    mhar: Callable[..., tuple[object, str]], stopped: Path, tmp_path: Path
) -> None:
    shutil.rmtree(stopped / "checkpoints" / NEWEST)
    code, stderr = mhar(*go_on(tmp_path))
    assert code == 0, stderr
    assert "continued from" in stderr and f"step {LAST}/{LAST}" in stderr


def test_train_from_a_checkpoint_of_another_model(
    mhar: Callable[..., tuple[object, str]], stopped: Path, data: Path, tmp_path: Path
) -> None:
    other = write_config(tmp_path / "data", data, model={"num_layers": 2, "hidden_size": 64})
    assert mhar("train", other)[0] == 0
    shutil.rmtree(stopped / "checkpoints" / NEWEST)
    shutil.copytree(data / "runs/run/checkpoints" / NEWEST, stopped / "checkpoints" / NEWEST)
    error = the_error(*mhar(*go_on(tmp_path)))
    assert error.startswith(f"{stopped}/checkpoints/{NEWEST}: the checkpoint cannot be loaded (")
    assert "of another model" in error


# --- the disk -------------------------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the context no file grows beyond ``size`` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def test_no_room_for_a_checkpoint(mhar: Callable[..., tuple[object, str]], data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data)
    assert mhar("train", config, "training.stop_after=2")[0] == 0
    checkpoints = tmp_path / "runs/run/checkpoints"
    before = contents(checkpoints)
    with largest_file(100_000):
        error = the_error(*mhar("train", config))
    assert error.startswith(f"{checkpoints / NEWEST}: the checkpoint cannot be written (")
    assert "MB are free" in error and error.endswith("the same command goes on from step 2")
    assert contents(checkpoints) == before
    code, stderr = mhar("train", config)
    assert code == 0 and "continued from" in stderr and "step 3/4" in stderr


def test_no_room_for_sample_indices(mhar: Callable[..., tuple[object, str]], data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, training={"steps": 2000})
    with largest_file(10_000):
        error = the_error(*mhar("train", config))
    index = tmp_path / "runs/run/index"
    assert error.startswith(f"{index}: the sample indices cannot be written and read (")
    assert not index.exists()
    assert mhar("train", config, "training.stop_after=1")[0] == 0


def test_read_only_and_full_disks(corpus: Path, tmp_path: Path) -> None:
    """Real ones, in a mount namespace: a read-only one, one without room for a second checkpoint, and room again."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    for name in ("locked", "small"):
        (tmp_path / name).mkdir()
    mount = f"mount -t tmpfs -o ro none {tmp_path}/locked"
    if not shutil.which("unshare") or subprocess.run([*namespace, *mount.split()], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    config = str(write_config(tmp_path, corpus))
    small = ["train", config, f"output_dir={tmp_path}/small"]
    commands = [
        mount,
        ["train", config, f"output_dir={tmp_path}/locked"],
        f"mount -t tmpfs -o size=800k none {tmp_path}/small",
        small,
        f"mount -o remount,size=20m {tmp_path}/small; ls {tmp_path}/small/run/checkpoints > {tmp_path}/left",
        small,
    ]
    (tmp_path / "in").write_text(json.dumps(commands))
    command = [*namespace, sys.executable, str(WORKER), str(tmp_path / "in"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    _, locked, _, full, _, again = json.loads((tmp_path / "out").read_text())
    assert the_error(*locked).startswith(
        f"{tmp_path}/locked/run: the run folder cannot be written (Read-only file system)"
    )
    assert the_error(*full).startswith(f"{tmp_path}/small/run/checkpoints/{NEWEST}: the checkpoint cannot be written")
    assert (tmp_path / "left").read_text() == "step_00000002\n"
    assert again[0] == 0 and "continued from" in again[1] and "finished: " in again[1]


# --- the other commands ---------------------------------------------------------------------------------------------

COMPARE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, r": no such folder"),
    "no run": (lambda r: (r / "config.yaml").unlink(), r": no config\.yaml, so not the folder of a run"),
    "not ended": (lambda r: (r / "summary.json").unlink(), r": the run has not ended .* last logged step 4 of 4"),
    "without metrics": (lambda r: (r / "metrics.jsonl").unlink(), r"/metrics\.jsonl: missing"),
    "config damaged": (lambda r: (r / "config.yaml").write_bytes(b"\xff"), r"/config\.yaml: not YAML"),
    "summary damaged": (lambda r: empty(r / "summary.json"), r"/summary\.json: content: "),
    "routing damaged": (lambda r: cut(r / "routing.npz"), r"/routing\.npz: not the routing of a run"),
    "routing empty": (lambda r: empty(r / "routing.npz"), r"/routing\.npz: not the routing of a run"),
}


@pytest.mark.parametrize("damage", COMPARE)
def test_compare(damage: str, refused: Callable[..., str], finished: Path, run: Path) -> None:
    act, message = COMPARE[damage]
    act(run)
    assert re.match(re.escape(str(run)) + message, refused("compare", finished / "runs/run", run))


def test_compare_elsewhere(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    assert refused("compare", run, run) == f"{run}: given twice; allowed: each run once"
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        error = refused("compare", run, "--out", tmp_path / place)
        assert error.startswith(f"{tmp_path / place}/loss.png: the picture cannot be written: ")


SYNC: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, ": no such folder"),
    "no run": (lambda r: (r / "metrics.jsonl").unlink(), r"/metrics\.jsonl: no such file"),
    "without a job": (lambda r: (r / "tracking/job.json").unlink(), r"/tracking/job\.json: no such file"),
    "job damaged": (lambda r: cut(r / "tracking/job.json"), r"/tracking/job\.json: not a readable tracking job"),
    "job empty": (lambda r: empty(r / "tracking/job.json"), r"/tracking/job\.json: not a readable tracking job"),
}


@pytest.mark.parametrize("damage", SYNC)
def test_sync(damage: str, refused: Callable[..., str], run: Path) -> None:
    act, message = SYNC[damage]
    act(run)
    assert re.match(re.escape(str(run)) + message, refused("sync", run))


def test_data_demo(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file, but the corpus is a folder" in refused("data", "demo", "--out", tmp_path / "file")
    assert "no folder can be made below it" in refused("data", "demo", "--out", tmp_path / "file/demo")
    error = refused("data", "demo", "--out", tmp_path / "demo", "--min-mb", 9, "--max-mb", 8)
    assert error.startswith("min_bytes: 9000000 given with max_bytes 8000000")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'CONFIG'"),
        (["compare"], "Missing argument 'RUN_DIR...'"),
        (["sync"], "Missing argument 'RUN_DIR...'"),
        (["sync", "x", "--timeout", "0"], "'--timeout': 0.0 is not in the range x>0"),
        (["data", "demo", "--vocab-size", "10"], "'--vocab-size': 10 is not in the range x>=257"),
        (["data", "demo", "--seed", "-1"], "'--seed': -1 is not in the range"),
        (["data", "dmeo"], "No such command 'dmeo'"),
        (["doctor", "now"], "Got unexpected extra argument (now)"),
    ],
)
def test_usage(arguments: list[str], message: str, mhar: Callable[..., tuple[object, str]], tmp_path: Path) -> None:
    code, stderr = mhar(*arguments)
    assert code == 2 and message in stderr and stderr.count("Error: ") == 1
    assert list(tmp_path.iterdir()) == []
