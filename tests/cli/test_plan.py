"""``mhar plan``: what it prints, as tables and as JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_mhar.cli import main as cli

CONFIGS = Path(__file__).parents[2] / "configs"
MIDDLE = [str(CONFIGS / "8b/delta_block.yaml"), "parallel.pipeline=2"]
INTERLEAVED = [
    str(CONFIGS / "1b/mhar.yaml"), "parallel.pipeline=4", "parallel.virtual_stages=2", "training.global_batch_size=512",
]  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *arguments])
    return caught.value.code, *capsys.readouterr()


def cells(text: str, start: str) -> list[str]:
    """Cells of the one line that starts so; they lie two spaces or more apart."""
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [start])
    return re.split(r"\s{2,}", line.strip())


def test_one_layout_shows_links_and_ranks(capsys):
    code, out, err = plan(capsys, *MIDDLE, "--gpus", "512")
    assert (code, err) == (0, "")
    assert out.startswith("8b-delta_block: delta_block H=8, 8,031,047,744 parameters; tensor 4 x pipeline 2; 256 seq")
    assert cells(out, "512")[:6] == ["512", "64", "4", "18.0%", "2.4%", "6.00x"]
    assert "0 -> 1  nodes, 50 GB/s" in out
    # Four messages of six tensors [1024, 1, 4096] in bf16; the baseline's of one.
    assert "6.00x         4  201.3 MB   33.6 MB" in out
    for table in ("Step", "Links of a pipeline", "Depth history on a GPU", "Memory of a GPU"):
        assert f"\n{table}" in out
    assert "uncached" not in out  # nothing is cached with one stage a rank
    assert "Taken: 400 model TFLOP/s a GPU, 450 GB/s inside a node of 8 GPUs, 50 GB/s between nodes." in out
    assert "…" not in out


def test_virtual_stages_show_what_the_cache_saves(capsys):
    code, out, _ = plan(capsys, *INTERLEAVED, "--gpus", "64")
    assert code == 0
    assert "2 stages a rank" in out
    assert {"overlapped", "uncached"} <= set(out.split())
    links = [line.split() for line in out.splitlines() if " -> " in line]
    assert [line[:3] for line in links] == [["0", "->", "1"], ["1", "->", "2"], ["2", "->", "3"], ["3", "->", "0"]]
    # Stages of 10, 10, 10, 10, 8, 8, 8 and 8 sublayers: rank 0 sends e and 10 outputs, then those of stages 2 to 4, 28;
    # without the cache 11 and 49, the baseline 1 and 1. Likewise 21 + 26 of 21 + 57, 31 + 24 of 31 + 65, and 30 of 41.
    ratios = [(39 / 2, 39 / 60), (47 / 2, 47 / 78), (55 / 2, 55 / 96), (30 / 1, 30 / 41)]
    assert [tuple(line[6:8]) for line in links] == [(f"{base:.2f}x", f"{cache:.2f}x") for base, cache in ratios]
    assert "with blocking messages, as parallel.overlap_p2p says." in out
    assert "…" not in out


def test_several_numbers_of_gpus_give_a_row_each(capsys):
    config = [*MIDDLE, "training.global_batch_size=2048"]
    code, out, _ = plan(capsys, *config, "--gpus", "8,64", "--gpus", "4096,4100")
    assert code == 0
    rows = [cells(out, start) for start in ("8", "64", "4,096")]
    assert [row[1:3] for row in rows] == [["1", "2,048"], ["8", "256"], ["512", "4"]]
    bubbles = [float(row[3].removesuffix("%")) for row in rows]
    assert bubbles == sorted(bubbles)
    speeds = [int(row[-3].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds)
    assert "\n4100 GPUs: parallel.tensor x pipeline: 4 x 2 = 8 given, but it must divide" in out
    assert "Links" not in out


def test_the_example_of_the_readme(capsys, monkeypatch):
    readme = (CONFIGS.parent / "README.md").read_text()
    command, shown = re.search(r"```bash\nmhar plan (.*?)```\n\n```\n(.*?)```", readme, re.DOTALL).groups()
    monkeypatch.chdir(CONFIGS.parent)
    code, out, _ = plan(capsys, *command.replace("\\\n", "").split())
    assert code == 0
    assert shown.strip() in "\n".join(line.rstrip() for line in out.splitlines())


def test_too_little_memory_is_said(capsys):
    _, out, _ = plan(capsys, str(CONFIGS / "8b/delta_block.yaml"), "--gpus", "4", "--memory", "40")
    assert cells(out, "4")[-1].endswith("too much")
    _, out, _ = plan(capsys, str(CONFIGS / "8b/delta_block.yaml"), "--gpus", "4", "--memory", "80")
    assert "too much" not in out


def test_json_has_bytes_seconds_and_errors(capsys):
    options = ["--gpus", "64,3", "--gpus-per-node", "4", "--link-gbps", "300", "25", "--tflops", "500", "--json"]
    code, out, err = plan(capsys, *INTERLEAVED, "parallel.overlap_p2p=true", *options)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["name"] == "1b-mhar"
    assert answer["cluster"] == {"gpus_per_node": 4, "intra_gbps": 300.0, "inter_gbps": 25.0, "tflops": 500.0}
    layout, refused = answer["layouts"]
    assert refused["num_gpus"] == 3
    assert refused["error"].startswith("parallel.pipeline: 4 given")
    assert layout["layout"]["data"] == 16
    assert layout["layout"]["tensor_bytes"] == 1024 * 2 * 1280 * 2
    link = layout["links"][0]
    # Into stage 1: e and ten outputs. Into stage 5: what stages 2, 3 and 4 made, 10 + 10 + 8, of 49 tensors.
    assert link["sent_bytes"] == 16 * (11 + 28) * layout["layout"]["tensor_bytes"]
    assert link["uncached_bytes"] == 16 * (11 + 49) * layout["layout"]["tensor_bytes"]
    assert link["baseline_bytes"] == 16 * 2 * layout["layout"]["tensor_bytes"]
    sent, uncached = (sum(link[key] for link in layout["links"]) for key in ("sent_bytes", "uncached_bytes"))
    assert layout["over_uncached"] == pytest.approx(sent / uncached)
    rank = layout["memory"][0]
    assert rank["history"]["in_flight"] == 3 * 2 + 4 + 1
    assert rank["total"] == rank["weights"] + rank["gradients"] + rank["optimizer"] + rank["history"]["total"]
    assert layout["fits"] is True
    time = layout["time"]
    assert time["configured"] == time["overlapped"]
    assert time["overlapped_share"] == pytest.approx(1 - time["pipeline"] / time["overlapped"])
    assert layout["tokens_per_second"] == pytest.approx(512 * 1024 / time["configured"])


def test_a_layout_that_does_not_fit_is_one_error(capsys):
    code, out, err = plan(capsys, *MIDDLE, "--gpus", "12")
    assert (code, out) == (2, "")
    assert err == (
        "mhar: error: parallel.tensor x pipeline: 4 x 2 = 8 given, but it must divide the number of ranks, 12 "
        "(torchrun --nproc-per-node, or nodes x GPUs of a job)\n"
    )
    code, out, err = plan(capsys, *MIDDLE, "--gpus", "4096", "--json")
    assert (code, out) == (2, "")
    assert "training.global_batch_size: 256 given, but on 4096 ranks it must be a multiple of 512" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*MIDDLE], "Missing option '--gpus'"),
        ([*MIDDLE, "--gpus", "8,x"], "'8,x' given; allowed: positive whole numbers"),
        ([*MIDDLE, "--gpus", "0"], "'0' given; allowed: positive whole numbers"),
        ([*MIDDLE, "--gpus", "8", "--link-gbps", "450", "0"], "--link-gbps"),
        ([*MIDDLE, "--gpus", "8", "--tflops", "-1"], "--tflops"),
        ([*MIDDLE, "parallel.pipelin=2", "--gpus", "8"], "parallel.pipelin"),
        (["no/such.yaml", "--gpus", "8"], "no/such.yaml"),
    ],
)
def test_wrong_input_is_one_error(capsys, arguments, message):
    code, out, err = plan(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
