"""``mhar bench step``: the trainer's own steps, relative to the first config, and no speed of what is wrong."""

import json
import weakref

import pytest

from megatron_mhar.bench import step
from megatron_mhar.bench.reads import WrongResult
from megatron_mhar.cli import main as cli
from megatron_mhar.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def configs(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, num_query_groups: 2, ffn_hidden_size: 16,"
        " vocab_size: 64, layers: local}\n"
        "data: {train: [not/there], end_of_document: 0}\n"
        "optimizer: {lr: 1e-3}\n"
        "training: {steps: 8, global_batch_size: 2, micro_batch_size: 1, sequence_length: 4, precision: fp32}\n"
        f"output_dir: {tmp_path}/runs\n"
    )
    for method in ("baseline", "mhar"):
        (tmp_path / f"{method}.yaml").write_text(f"base: recipe.yaml\nname: {method}\nresidual: {{method: {method}}}\n")
    return tmp_path


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "step", *map(str, arguments)])
    return end.value.code


@pytest.fixture
def trainers(monkeypatch):
    """Weak references to the trainers of a benchmark; each must be gone when the next one is built."""
    built = []

    class Watched(step.Trainer):
        def __init__(self, *arguments):
            assert not [reference for reference in built if reference() is not None]
            super().__init__(*arguments)
            built.append(weakref.ref(self.models[0]))

    monkeypatch.setattr(step, "Trainer", Watched)
    return built


def test_methods_in_turns(configs, capsys, monkeypatch, trainers):
    monkeypatch.setattr(step, "WARM_UP", 2)
    file = configs / "step.json"
    code = run(configs / "baseline.yaml", "--methods", "baseline,mhar", "residual.eps=1e-5", "--micro-batch", "2",
               "--steps", "2", "--rounds", "2", "--json", file)  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0 and "micro-batch 2 x 4, 1 a step and rank, 1 rank, local layers" in out
    report = json.loads(file.read_text())
    assert (report["version"], report["kind"]) == (1, "step")
    baseline, mhar = report["results"]
    assert [(r["label"], r["method"], r["micro_batches"]) for r in (baseline, mhar)] == [
        ("baseline", "baseline", 1), ("mhar", "mhar", 1),
    ]  # fmt: skip
    assert baseline["over_first"] == 1 and not baseline["routing_errors"]
    assert mhar["over_first"] == pytest.approx(mhar["tokens_per_second"] / baseline["tokens_per_second"])
    assert max(mhar["routing_errors"].values()) < 1e-5
    for result in (baseline, mhar):
        assert result["step"]["samples"] == 4 and len(result["rounds_ms"]) == 2
        assert result["tokens_per_second"] == pytest.approx(1e3 * 8 / result["step"]["median_ms"])
        assert len(result["losses"]) == 2 and result["losses"][0] == pytest.approx(4.16, abs=0.3)  # ln 64
    # The same random tokens and the same weights but for the queries, which are zero: nearly the same loss.
    assert baseline["losses"][0] == pytest.approx(mhar["losses"][0], abs=0.1)
    assert "residual.eps=1e-5" in mhar["overrides"]
    assert list((configs / "runs").iterdir()) == [] and len(trainers) == 4


def test_the_config_s_own_batch_is_kept_without_a_micro_batch(configs):
    ((variant,),) = step.variants([configs / "mhar.yaml"], ["training.seed=3"], steps=5)
    assert variant.config.training.global_batch_size == 2 and variant.config.training.seed == 3
    assert variant.config.training.steps == 5 and variant.label == "mhar"
    ((wide,),) = step.variants([configs / "mhar.yaml"], ["parallel.tensor=2"], micro_batches=[2], steps=5, ranks=8)
    assert wide.config.training.global_batch_size == 8  # four data-parallel ranks
    ((first, second),) = step.variants([configs / "mhar.yaml"], [], precisions=["fp32", "bf16"], steps=5)
    assert (first.label, second.config.training.precision) == ("mhar fp32", "bf16")


def test_no_speed_where_routing_is_wrong(configs, capsys, monkeypatch):
    def wrong(case, algorithm, device):
        raise WrongResult("relative errors: outputs 1.0e+00")

    monkeypatch.setattr(step, "check_case", wrong)
    file = configs / "step.json"
    assert run(configs / "baseline.yaml", configs / "mhar.yaml", "--steps", "1", "--rounds", "1", "--json", file) == 1
    assert "FAILED" in capsys.readouterr().out
    baseline, mhar = json.loads(file.read_text())["results"]
    assert baseline["step"] is not None
    assert "WrongResult" in mhar["failed"] and mhar["step"] is mhar["over_first"] is None


def test_a_loss_that_is_not_finite_has_no_speed(configs, capsys):
    assert run(configs / "mhar.yaml", "--steps", "1", "--rounds", "1", "model.init_std=1e20") == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["a.yaml"], "a.yaml: no such config file"),
        (["a.yaml", "b.yaml", "--methods", "mhar"], "names files beside one CONFIG, but 2 configs"),
        (["training.seed=1"], "no CONFIG given"),
    ],
)
def test_what_is_missing_is_told(arguments, words, capsys):
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_other_groups_are_refused(configs):
    with pytest.raises(UserError, match="parallel"):
        step.bench_step([configs / "mhar.yaml"], ["parallel.tensor=2"], steps=1, rounds=1, tell=print)
