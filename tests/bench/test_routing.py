"""``mhar bench routing``: every algorithm is right, one that is wrong gets no speed, and what the JSON says."""

import json
import sys
import types
from dataclasses import replace

import pytest
import torch

from megatron_mhar.bench.peers import find_peers
from megatron_mhar.bench.reads import Case, SiteBySite, WrongResult, check_case, fused, plain
from megatron_mhar.bench.routing import bench_case, build_case, paper
from megatron_mhar.bench.shapes import SHAPES
from megatron_mhar.bench.timing import Timing
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.errors import UserError
from megatron_mhar.routing.reference import route_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
METHODS = ["mhar", "mhar_block", "delta", "delta_block"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", [fused, paper, plain], ids=["ours", "paper", "torch"])
def test_algorithms_are_right(algorithm, method):
    """Replacement and delta forms, whole and in blocks, null sources and gates."""
    errors = check_case(build_case("tiny", method=method, dtype="fp32"), algorithm, DEVICE)
    kinds = {"outputs", "source gradients", "query gradients", "norm gradients"}
    assert set(errors) == kinds | ({"null gradients", "gate gradients"} if method.startswith("delta") else set())
    assert max(errors.values()) < 5e-6


@pytest.mark.parametrize("algorithm", [fused, plain], ids=["ours", "torch"])
def test_the_released_form_is_right(algorithm):
    """Whose first site reads no source but its null source."""
    residual = ResidualConfig(method="delta_block", block_layers=1, block_form="released", num_heads=4)
    errors = check_case(Case(DepthTable(residual, 6), 32, 2, torch.float32), algorithm, DEVICE)
    assert "null gradients" in errors and max(errors.values()) < 5e-6


@pytest.mark.parametrize("algorithm", [paper, fused], ids=["paper", "ours"])
def test_bf16(algorithm):
    errors = check_case(build_case("tiny"), algorithm, DEVICE)
    assert 1e-4 < errors["outputs"] < 6e-3  # as bf16 is: it was not computed in fp32


def off_by(what):
    """The reference, and a mistake."""

    def call(sources, query, norm_weight, heads, eps):
        if what == "a source":
            sources = [*sources[:-1], sources[-1] * 1.01]
        out = route_reference(
            sources, query.detach() if what == "no query gradient" else query, norm_weight, heads, eps
        )
        if what == "a token":
            out = torch.cat([out[:1], out[1:] * 1.001])
        if what == "NaN":
            out = out * float("nan")
        return out

    return lambda inputs: SiteBySite(inputs, call)


@pytest.mark.parametrize("what", ["a source", "no query gradient", "a token", "NaN"])
def test_a_mistake_is_found(what):
    with pytest.raises(WrongResult, match="query" if "query" in what else "outputs"):
        check_case(build_case("tiny", dtype="fp32"), off_by(what), DEVICE)
    check_case(build_case("tiny", dtype="fp32"), off_by("nothing"), DEVICE)


def test_no_speed_of_what_is_wrong():
    algorithms = {"paper": plain, "wrong": off_by("a source"), "broken": lambda inputs: 1 / 0}
    report = bench_case("tiny", build_case("tiny", dtype="fp32"), DEVICE, rounds=2, graphs=False, algorithms=algorithms)
    right, wrong, broken = report.results
    assert right.failed is None and right.over_paper == right.over_paper_forward == 1 and right.both.samples == 2
    for result, why in ((wrong, "WrongResult: relative errors: outputs"), (broken, "ZeroDivisionError")):
        assert result.failed.startswith(why) and result.forward is result.both is result.over_paper is None


def test_peers_are_called_as_they_are_and_held_to_the_definition(monkeypatch):
    """A library that is there takes part; one that is wrong is found out; others are named."""
    good = types.ModuleType("attnres")
    good.attnres = lambda sources, query, eps: route_reference(sources, query, torch.ones_like(query), 1, eps)
    bad = types.ModuleType("liger_kernel.ops.attn_res")
    bad.LigerAttnResFunction = type("F", (), {"apply": staticmethod(lambda stacked, query, norm, eps: stacked.mean(0))})
    monkeypatch.setitem(sys.modules, "attnres", good)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.attn_res", bad)
    for name in ("fla", "fla.ops", "fla.ops.attnres"):
        monkeypatch.setitem(sys.modules, name, None)
    peers, absent = find_peers()
    assert list(peers) == ["fast-attnres", "Liger"] and list(absent) == ["flash-linear-attention"]
    case = build_case("tiny", method="attnres", dtype="fp32")
    check_case(case, peers["fast-attnres"], DEVICE)
    with pytest.raises(WrongResult):
        check_case(case, peers["Liger"], DEVICE)


def test_shapes_are_those_of_the_paper():
    """N of the models and tokens of a micro-batch, and that the 8B model's sites are those of its config."""
    found = {name: build_case(name) for name in SHAPES}
    sizes = {name: (case.width, case.table.num_sites, case.plan.num_rows, case.tokens) for name, case in found.items()}
    assert sizes == {
        "100m": (512, 25, 25, 16384), "350m": (1024, 49, 49, 4096), "1b": (1280, 73, 73, 2048),
        "1b-32k": (1280, 73, 73, 32768), "delta-8b": (4096, 9, 9, 8192), "8b": (4096, 64, 8, 8192),
        "tiny": (32, 4, 4, 2),
    }  # fmt: skip
    assert found["8b"].has_null and found["8b"].has_gate and not found["1b"].has_null
    bare = build_case("delta-8b", bare=True)
    assert not bare.has_null and not bare.has_gate
    assert sum(map(len, bare.plan.rows)) == 45


def test_what_does_not_fit_is_told():
    with pytest.raises(UserError, match="--heads 3.*must divide hidden_size 512"):
        build_case("100m", num_heads=3)
    with pytest.raises(UserError, match="attnres has one head"):
        build_case("100m", method="attnres", num_heads=8)


def test_timings_are_summed_up():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert timing == Timing(6.0, 2.0, 10.0, 11)
    assert replace(Timing.of([2.0]), samples=1) == Timing(2.0, 2.0, 2.0, 1)


def test_the_command(tmp_path, capsys, monkeypatch):
    from megatron_mhar.cli import main as cli

    monkeypatch.setenv("MHAR_COMMIT", "abc")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "routing", "--shape", "tiny", "--dtype", "fp32", "--rounds", "1", "--json",
                  str(tmp_path / "new" / "r.json")])  # fmt: skip
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "tiny: mhar H=4, 4 sites, d 32, 2 tokens, fp32; ours site by site" in out and "not compared: Liger" in out
    report = json.loads((tmp_path / "new" / "r.json").read_text())
    assert report["version"] == 2 and report["kind"] == "routing" and report["machine"]["versions"]["torch"]
    assert report["machine"]["commit"] == "abc"
    assert {result["algorithm"] for result in report["cases"][0]["results"]} == {"paper", "ours"}
    assert all(result["both"]["median_ms"] > 0 for result in report["cases"][0]["results"])


def test_the_command_fails_where_an_algorithm_does(capsys, monkeypatch):
    from megatron_mhar.bench import routing
    from megatron_mhar.cli import main as cli

    monkeypatch.setattr(routing, "fused", off_by("a token"))
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "routing", "--shape", "tiny", "--dtype", "fp32", "--rounds", "1", "--algorithms", "ours"])
    assert end.value.code == 1
    out, _ = capsys.readouterr()
    assert "FAILED" in out and "paper  " not in out


def test_an_algorithm_that_is_not_there(capsys):
    from megatron_mhar.cli import main as cli

    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "routing", "--shape", "tiny", "--algorithms", "ours,fla"])
    assert end.value.code == 2
    assert "'fla' given; allowed: paper, ours, flash-linear-attention" in capsys.readouterr().err


def test_nothing_to_measure_is_an_error():
    from click.testing import CliRunner

    from megatron_mhar.cli.bench import bench

    result = CliRunner().invoke(bench, ["routing", "--shape", "tiny", "--dtype", "fp32", "--algorithms", "Liger"])
    assert isinstance(result.exception, UserError) and "Liger given, but none" in str(result.exception)


def test_the_place_for_the_json_is_tried_first(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from megatron_mhar.bench import routing
    from megatron_mhar.cli.bench import bench

    monkeypatch.setattr(routing, "bench_case", lambda *a, **k: pytest.fail("measured for nothing"))
    (tmp_path / "file").write_text("")
    given = ["routing", "--shape", "tiny", "--dtype", "fp32", "--json", str(tmp_path / "file" / "x.json")]
    result = CliRunner().invoke(bench, given)
    assert isinstance(result.exception, UserError) and "x.json: cannot be written" in str(result.exception)
