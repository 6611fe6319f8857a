"""Reading run folders, the table, and what is said about unfair comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from megatron_mhar.cli import compare as cli
from megatron_mhar.errors import UserError
from megatron_mhar.study.compare import Run, compare, differences, load_run, load_runs

STEPS = 100
MakeRun = Callable[..., Path]


def routing(heads: int = 6) -> dict[str, np.ndarray]:
    """Three sites over three sources; the last two heads differ."""
    reads = np.tri(3, dtype=bool)
    weights = np.repeat((reads / reads.sum(1, keepdims=True))[:, None], heads, axis=1).astype(np.float32)
    weights[2, -1] = [0.7, 0.2, 0.1]
    return {
        "weights": weights, "reads": reads, "site_names": np.array(["0 attention", "1 MLP", "final"]),
        "source_names": np.array(["embedding", "output 0", "output 1"]),
    }  # fmt: skip


def rendered(runs: Sequence[Run], width: int = 120) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(compare(runs))
    return capture.get().splitlines()


def test_load_run_reads_what_the_trainer_wrote(make_run: MakeRun) -> None:
    run = load_run(make_run("r", method="mhar", num_heads=6, routing=routing()))
    assert run.label == run.summary.name == "r"
    assert run.config.residual.method == "mhar"
    assert run.routing is not None
    assert run.routing.weights.shape == (3, 6, 3) and run.routing.weights.dtype == np.float32
    assert run.routing.site_names == ("0 attention", "1 MLP", "final")
    steps, losses = run.curve("valid/loss")
    assert steps.tolist() == [20, 40, 60, 80, 100]
    assert losses[-1] == pytest.approx(3 + 5 * np.exp(-5))
    assert run.curve("never/logged")[0].size == 0


def test_steps_logged_again_after_a_resume_count_once(make_run: MakeRun) -> None:
    directory = make_run("r")
    with (directory / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 80, "time_ms": 1, "metrics": {"valid/loss": 9.5}}\n')
    steps, losses = load_run(directory).curve("valid/loss")
    assert steps.tolist() == [20, 40, 60, 80, 100]
    assert losses[3] == 9.5


def test_table_sets_losses_and_speeds_against_the_first_run(make_run: MakeRun) -> None:
    runs = load_runs([
        make_run("plain", loss=3.0, tokens_per_second=4000),
        make_run("routed", method="mhar", num_heads=6, loss=2.94, tokens_per_second=3000, routing=routing(),
                 summary={"peak_memory_bytes": 5 * 2**20}),
    ])  # fmt: skip
    lines = rendered(runs)
    plain = next(line for line in lines if line.startswith("plain")).split()
    routed = next(line for line in lines if line.startswith("routed")).split()
    assert plain == ["plain", "baseline", "1,234,567", "3.0000", "4,000", "1.50", "GiB"]
    assert routed == [
        "routed", "mhar", "H=6", "1,234,567", "2.9400", "(-0.0600)", "3,000", "(0.75x)", "5", "MiB",
    ]  # fmt: skip
    assert any("mean of the last 11 evaluations" in line for line in lines)


def test_table_of_the_demo_fits_eighty_columns(make_run: MakeRun) -> None:
    runs = load_runs([
        make_run("demo-baseline"), make_run("demo-mhar", method="mhar", num_heads=6, routing=routing()),
    ])  # fmt: skip
    lines = rendered(runs, width=80)
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith("demo-mhar")]
    assert all(part in row for part in ("1,234,567", "(+0.0000)", "(1.00x)", "1.50 GiB"))
    assert any(line.startswith("demo-baseline ") and "1.50 GiB" in line for line in lines)


def test_runs_without_validation_data_and_diverged_runs_have_a_row(make_run: MakeRun) -> None:
    runs = load_runs([
        make_run("blind", summary={"valid_loss": None, "valid_loss_last": None}),
        make_run("diverged", summary={"valid_loss": float("nan")}),
    ])  # fmt: skip
    lines = rendered(runs)
    assert next(line for line in lines if line.startswith("blind")).split()[3] == "-"
    assert next(line for line in lines if line.startswith("diverged")).split()[3] == "nan"


def test_fair_runs_have_no_differences(make_run: MakeRun) -> None:
    runs = load_runs([
        make_run("a", checkpoint={"keep": 1}, tracking={"enabled": False}),
        make_run("b", method="mhar", num_heads=6, training={"log_interval": 1}, data={"num_workers": 0}),
    ])  # fmt: skip
    assert differences(runs) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"training": {"steps": 50}}, "training.steps: 100 (a), 50 (b)"),
        ({"training": {"seed": 7}}, "training.seed: 42 (a), 7 (b)"),
        ({"data": {"train": ["data/other/train"]}}, "data.train: ['data/demo/train'] (a), ['data/other/train'] (b)"),
        ({"optimizer": {"lr": 0.002}}, "optimizer.lr: 0.001 (a), 0.002 (b)"),
        ({"layers": 6}, "model.num_layers: 4 (a), 6 (b)"),
        ({"summary": {"device": "H200"}}, "device: cpu (a), H200 (b); tokens/s and memory do not compare"),
        ({"summary": {"steps": 60}}, "b ended at step 60 of 100"),
    ],
)
def test_each_difference_is_told(make_run: MakeRun, changes: dict[str, object], line: str) -> None:
    assert differences(load_runs([make_run("a"), make_run("b", **changes)])) == [line]


def test_runs_of_one_name_are_told_apart_by_folder(make_run: MakeRun) -> None:
    first, second = make_run("a", name="same"), make_run("b", name="same")
    assert [run.label for run in load_runs([first, second])] == [str(first), str(second)]
    with pytest.raises(UserError, match="given twice"):
        load_runs([first, first / ".." / "a"])


def test_an_unfinished_run_is_refused_with_how_to_continue(make_run: MakeRun) -> None:
    message = r"has not ended \(no summary.json; last logged step 100 of 100\); mhar train .*config\.yaml"
    with pytest.raises(UserError, match=message):
        load_run(make_run("a", without=["summary.json"]))
    with pytest.raises(UserError, match="last logged step 0 of 100"):
        load_run(make_run("b", without=["summary.json", "metrics.jsonl"]))


def test_other_folders_and_missing_files_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: no such folder"):
        load_run(tmp_path / "gone")
    with pytest.raises(UserError, match="not the folder of a run"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl: missing"):
        load_run(make_run("a", without=["metrics.jsonl"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "summary.json: content: Invalid JSON"),
        ("[]", "summary.json: content"),
        ('{"name": "a"}', "json: method: Field required"),
    ],
)
def test_damaged_summary(make_run: MakeRun, text: str, message: str) -> None:
    directory = make_run("a")
    (directory / "summary.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(directory)


def test_damaged_routing(make_run: MakeRun) -> None:
    directory = make_run("a", method="mhar", num_heads=6, routing={**routing(), "reads": np.ones((2, 3), bool)})
    with pytest.raises(UserError, match=r"routing\.npz: shapes do not fit: weights \(3, 6, 3\), reads \(2, 3\)"):
        load_run(directory)
    for damage in (b"", b"PK\x03\x04 cut off"):
        (directory / "routing.npz").write_bytes(damage)
        with pytest.raises(UserError, match=r"routing\.npz: not the routing of a run"):
            load_run(directory)
    np.savez(directory / "routing.npz", weights=np.zeros((1, 1, 1)))
    with pytest.raises(UserError, match="not the routing of a run: .*reads"):
        load_run(directory)


def test_command_prints_table_pictures_and_where_to_look_next(make_run: MakeRun, tmp_path: Path) -> None:
    baseline = make_run("plain", tracking={"uri": "sqlite:///elsewhere.db"})
    routed = make_run("routed", method="mhar", num_heads=6, routing=routing())
    result = CliRunner().invoke(cli.compare, [str(baseline), str(routed), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "loss.png", "routing-routed.png", "routing-deviation-routed.png",
    }  # fmt: skip
    for path in (tmp_path / "out").iterdir():
        assert str(path) in result.output
    assert "These runs differ" not in result.output
    assert f"ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in result.output
    assert str(routed / "config.yaml") in result.output


def test_command_warns_above_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.compare,
        [str(make_run("a")), str(make_run("b", training={"seed": 1}, tracking={"uri": "http://host:5000"}))],
    )
    assert result.exit_code == 0, result.output
    assert result.output.index("training.seed: 42 (a), 1 (b)") < result.output.index("peak")
    assert (tmp_path / "compare" / "loss.png").is_file()
    assert "http://host:5000" in result.output


def test_command_without_runs_is_refused() -> None:
    assert CliRunner().invoke(cli.compare, []).exit_code == 2


def test_command_shows_a_diverged_run_without_a_picture_of_its_routing(make_run: MakeRun, tmp_path: Path) -> None:
    arrays = routing()
    arrays["weights"][1, 0, 0] = np.nan
    diverged = make_run("diverged", method="mhar", num_heads=6, routing=arrays, summary={"valid_loss": float("nan")})
    result = CliRunner().invoke(cli.compare, [str(diverged), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "diverged: no picture of its routing" in result.output and "nan" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["loss.png"]
