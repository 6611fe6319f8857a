"""Pictures are PNGs of the arrays given; unread cells are blank; failures leave what was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megatron_mhar.errors import UserError
from megatron_mhar.study import figures
from megatron_mhar.study.compare import Run, load_run, load_runs
from megatron_mhar.study.figures import loss_curves, routing_deviation, routing_map

MakeRun = Callable[..., Path]


@pytest.fixture
def drawn() -> list[Figure]:
    """Figures handed to ``_save``, drawn and written as usual."""
    return []


@pytest.fixture(autouse=True)
def _spy(drawn: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    save = figures._save

    def spy(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(figures, "_save", spy)
    monkeypatch.setattr(figures, "_DPI", 60)  # time: what is drawn stays the same


def routed(make_run: MakeRun, *, sites: int = 5, heads: int = 8) -> Run:
    rng = np.random.default_rng(0)
    reads = np.tri(sites, dtype=bool)
    weights = rng.random((sites, heads, sites)).astype(np.float32) * reads[:, None]
    weights /= weights.sum(-1, keepdims=True)
    directory = make_run(
        f"run-{sites}-{heads}", method="mhar" if heads > 1 else "attnres", num_heads=heads,
        routing={
            "weights": weights, "reads": reads, "site_names": np.array([f"site {i}" for i in range(sites)]),
            "source_names": np.array([f"source {i}" for i in range(sites)]),
        },
    )  # fmt: skip
    return load_run(directory)


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 16])
def test_routing_map_has_a_panel_a_head_on_one_scale(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure], heads: int
) -> None:
    run = routed(make_run, heads=heads)
    assert run.routing is not None
    routing_map(run, tmp_path / "map.png")
    panels = [axes for axes in drawn[0].axes if axes.get_title().startswith("head") and axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"head {head}" for head in range(heads)]
    for head, axes in enumerate(panels):
        cells = axes.images[0].get_array()
        assert isinstance(cells, np.ma.MaskedArray)
        np.testing.assert_array_equal(cells.mask, ~run.routing.reads)
        np.testing.assert_array_equal(cells.filled(0), run.routing.weights[:, head])
        assert axes.images[0].norm is panels[0].images[0].norm
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(run.routing.site_names)
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == list(run.routing.source_names)
    assert imread(tmp_path / "map.png").ndim == 3


def test_scale_is_not_taken_by_a_site_without_a_choice(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    run = routed(make_run)
    assert run.routing is not None
    routing_map(run, tmp_path / "map.png")
    assert drawn[0].axes[0].images[0].norm.vmax == pytest.approx(run.routing.weights[1:].max()) != 1


def test_deviation_is_head_minus_mean_on_a_symmetric_scale(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    run = routed(make_run, heads=4)
    assert run.routing is not None
    routing_deviation(run, tmp_path / "deviation.png")
    mean = sum(run.routing.weights[:, head] for head in range(4)) / 4
    for head, axes in enumerate(drawn[0].axes[:4]):
        image = axes.images[0]
        cells = image.get_array()
        assert isinstance(cells, np.ma.MaskedArray)
        np.testing.assert_allclose(cells.filled(0), run.routing.weights[:, head] - mean, atol=1e-6)
        np.testing.assert_array_equal(cells.mask, ~run.routing.reads)
        assert image.norm.vmin == -image.norm.vmax < 0


def test_many_names_are_thinned_out_to_one_kind(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    routing_map(routed(make_run, sites=73), tmp_path / "map.png")
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert names == [f"site {i}" for i in range(0, 73, 4)]


def test_queries_still_at_zero_can_be_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    run = routed(make_run, sites=1, heads=2)
    routing_map(run, tmp_path / "map.png")
    routing_deviation(run, tmp_path / "deviation.png")
    assert (tmp_path / "map.png").stat().st_size > 0 and (tmp_path / "deviation.png").stat().st_size > 0


def test_what_cannot_be_drawn_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    plain = load_run(make_run("plain"))
    for draw in (routing_map, routing_deviation):
        with pytest.raises(UserError, match=r"no routing\.npz: method baseline does not route"):
            draw(plain, tmp_path / "x.png")
    with pytest.raises(UserError, match="one routing head"):
        routing_deviation(routed(make_run, heads=1), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_loss_curves_show_each_run_and_the_difference(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    runs = load_runs([make_run("a", loss=3.0), make_run("b", loss=2.9)])
    loss_curves(runs, tmp_path / "loss.png")
    curves, difference = drawn[0].axes
    legend = curves.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    lines = [np.asarray(line.get_ydata(), float) for line in curves.lines]
    np.testing.assert_array_equal(lines[2], runs[1].curve("train/loss")[1])
    np.testing.assert_array_equal(lines[3], runs[1].curve("valid/loss")[1])
    np.testing.assert_allclose(np.asarray(difference.lines[1].get_ydata(), float), [-0.1] * 5, atol=1e-9)
    low, high = curves.get_ylim()
    assert low < 2.9 and lines[0][0] > high > lines[0][2]  # the steep start is cut, the rest is not
    assert imread(tmp_path / "loss.png").ndim == 3


def test_one_run_has_one_panel_and_nan_does_not_spoil_the_limits(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    directory = make_run("a")
    with (directory / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 60, "time_ms": 1, "metrics": {"train/loss": "NaN"}}\n')
    loss_curves([load_run(directory)], tmp_path / "loss.png")
    assert len(drawn[0].axes) == 1
    assert np.isfinite(drawn[0].axes[0].get_ylim()).all()


def test_run_without_a_loss_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run("a")
    (directory / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no finite loss"):
        loss_curves([load_run(directory)], tmp_path / "loss.png")


def test_failed_write_keeps_the_old_picture(make_run: MakeRun, tmp_path: Path) -> None:
    run = load_run(make_run("a"))
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "loss.png").write_bytes(b"old")
    with (
        patch.object(Figure, "savefig", side_effect=OSError(28, "No space left on device")),
        pytest.raises(UserError, match=r"loss\.png: the picture cannot be written: No space left on device"),
    ):
        loss_curves([run], folder / "loss.png")
    assert [path.name for path in folder.iterdir()] == ["loss.png"]
    assert (folder / "loss.png").read_bytes() == b"old"
    with pytest.raises(UserError, match="cannot be written: "):
        loss_curves([run], folder / "loss.png" / "below.png")
