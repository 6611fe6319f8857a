"""Steps as CUDA graphs. Without a GPU, megatron-core's capture runs on a stand-in for a graph that runs again what it
was told to keep; with one, on real graphs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from pydantic import ValidationError

from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")
HAS_GPU = torch.cuda.is_available()
GRAPH = {"cuda_graph": "full_iteration"}
EXACT = {"deterministic": HAS_GPU} | ({"sequence_length": 128} if HAS_GPU else {})
HAS_TE = HAS_GPU and importlib.util.find_spec("transformer_engine") is not None

REFUSED = {
    "stages": ({"parallel": {"pipeline": 2}}, "parallel.pipeline 2, but messages between stages are not captured"),
    "overlap": ({"parallel": {"overlap_grad_reduce": True}}, "parallel.overlap_grad_reduce true, but overlapped"),
    "experts": ({"model": {"pattern": "*E*-*-*-", "num_experts": 4}}, "model.num_experts 4, but the host reads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_built(tmp_path, case):
    sections, message = REFUSED[case]
    with pytest.raises(ValidationError) as error:
        tiny_run("unused", tmp_path, training=GRAPH, **sections)
    assert f"full_iteration given with {message}" in str(error.value)


@pytest.mark.skipif(HAS_GPU, reason="of a machine without a GPU")
def test_refused_without_a_gpu(tmp_path, corpus):
    from megatron_mhar.train.loop import train

    with pytest.raises(UserError, match="training.cuda_graph: full_iteration given, but this machine has no GPU"):
        train(tiny_run(corpus, tmp_path, training=GRAPH))
    assert not (tmp_path / "run").exists()


def test_sequences_whose_attention_cannot_be_captured(tmp_path, monkeypatch):
    from megatron_mhar import platform
    from megatron_mhar.model import build

    monkeypatch.setattr(platform, "HAS_GPU", True)
    monkeypatch.setattr(build, "HAVE_TE", True)

    def check(length, context=1, layers="auto", precision="bf16", **training):
        training = GRAPH | {"sequence_length": length, "precision": precision} | training
        return build.check_layers(
            tiny_run("unused", tmp_path, training=training, parallel={"context": context}, model={"layers": layers})
        )

    short = {"length": 32}
    fitting = [{}, {"length": 512, "context": 2}]
    fitting += [short | {"layers": "local"}, short | {"precision": "fp32"}, short | {"cuda_graph": "none"}]
    for fits in fitting:
        assert check(**{"length": 128} | fits) == fits.get("layers", "transformer_engine")
    with pytest.raises(UserError, match=r"training.sequence_length: 96 given with .* multiples of 128 alone"):
        check(96)
    with pytest.raises(UserError, match=r"256 in 4 pieces \(parallel.context 2\) given"):
        check(256, context=2)


class Recorder:
    """A schedule that a stand-in graph can run again: as on a device, a capture computes nothing."""

    def __init__(self, schedule):
        self.schedule, self.graph = schedule, None

    def __call__(self, *, data_iterator, **arguments):
        (batches,) = ([list(each)] for each in data_iterator)
        if (graph := StandIn.capturing) is None:
            return self.schedule(data_iterator=[iter(batches[0])], **arguments)
        graph.result = [{"loss": torch.full((), float("nan"))} for _ in batches[0]]
        graph.again = lambda: self.schedule(data_iterator=[iter(batches[0])], **arguments)
        return graph.result


class StandIn:
    capturing = None
    made = 0
    alive = 0

    def __init__(self):
        StandIn.made += 1
        StandIn.alive += 1

    def __del__(self):
        StandIn.alive -= 1

    def register_generator_state(self, state):
        pass

    def replay(self):
        for kept, new in zip(self.result, self.again(), strict=True):
            kept["loss"].copy_(new["loss"])

    class Capture:
        def __init__(self, graph, **settings):
            assert settings["capture_error_mode"] == "thread_local"
            self.graph = graph

        def __enter__(self):
            StandIn.capturing = self.graph

        def __exit__(self, *error):
            StandIn.capturing = None


@pytest.fixture
def graphs(monkeypatch):
    """Graphs: the device's, or where there is none the stand-in. Counted in both cases."""
    from megatron_mhar.train import cuda_graph, loop

    StandIn.made = StandIn.alive = 0
    if HAS_GPU:

        class Counted(torch.cuda.CUDAGraph):
            def __new__(cls, *arguments):
                StandIn.made += 1
                return super().__new__(cls, *arguments)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
    else:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
        monkeypatch.setattr(torch.cuda, "graph", StandIn.Capture)
        monkeypatch.setattr(cuda_graph, "get_shared_capture_stream", torch.cuda.Stream)
        monkeypatch.setattr(loop, "check_layers", lambda config: "local")
        schedule = loop.get_forward_backward_func
        monkeypatch.setattr(loop, "get_forward_backward_func", lambda: Recorder(schedule()))
        # The generators of a graph are the device's.
        seed = loop.initialize.__globals__["model_parallel_cuda_manual_seed"]
        monkeypatch.setitem(loop.initialize.__globals__, "model_parallel_cuda_manual_seed",
                            lambda value, **settings: seed(value, force_reset_rng=True))  # fmt: skip
    return StandIn


def losses(config):
    from megatron_mhar.train.loop import train

    train(config)
    found = load_metrics(RunFiles(config.run_dir).journal)
    return {key: found[key] for key in ("train/loss", "train/grad_norm", "valid/loss")}


CASES = {"mhar": {}, "delta_block": {}, "mhar, recomputed": {"recompute": "full", "recompute_sublayers": 3}}
CASES |= {
    f"mhar, fp8 {recipe}": {"precision": "fp8", "fp8": {"recipe": recipe}} for recipe in ("tensorwise", "delayed")
}
CASES = {
    name: pytest.param(
        name.partition(",")[0], training,
        marks=pytest.mark.skipif("fp8" in name and not HAS_TE, reason="needs a GPU and Transformer Engine"), id=name,
    )
    for name, training in CASES.items()
}  # fmt: skip


@pytest.mark.parametrize(("method", "training"), CASES.values())
def test_a_captured_run_is_the_run(tmp_path, corpus, graphs, method, training):
    """To the bit: losses and norms of steps before, at and after the capture, with evaluations between them."""
    training = EXACT | {"precision": "bf16"} | training
    plain, captured = (
        losses(tiny_run(corpus, tmp_path, name=name, residual=METHODS[method], training=training | graph,
                        evaluation={"interval": 3, "batches": 1}, optimizer={"ema_decay": 0.9}))
        for name, graph in (("plain", {}), ("captured", GRAPH))
    )  # fmt: skip
    assert captured == plain and len(plain["train/loss"]) == 8 and len(plain["valid/loss"]) == 3
    assert graphs.made == 1
    if not HAS_GPU:
        assert graphs.alive == 0  # gone before the process groups


def test_resumed_runs_capture_again(tmp_path, corpus, graphs):
    whole = losses(tiny_run(corpus, tmp_path, name="whole", training=EXACT))
    for stop in (5, None):
        found = losses(tiny_run(corpus, tmp_path, name="parts", training=EXACT | GRAPH | {"stop_after": stop}))
    assert found == whole and graphs.made == 1  # the first part has a graph, the second is over before it would


def test_trainers_take_turns(tmp_path, corpus, graphs):
    """Two in one process, step by step: each has its graph and its input buffers."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    from megatron_mhar.train.distributed import initialize
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    def steps(*sizes, turns=6):
        """Losses of trainers with these sequence lengths."""
        trainers, found = [], [[] for _ in sizes]
        for size in sizes:
            config = tiny_run(corpus, tmp_path, name=f"{len(sizes)}-{size}", residual=METHODS["mhar"],
                              training=EXACT | GRAPH | {"sequence_length": size})  # fmt: skip
            device = initialize(config)
            folder = RunFolder(config)
            folder.prepare()
            progress = ProgressLog(None, total=8, start=0)
            trainer = Trainer(config, folder, device, progress, None)
            trainers.append((trainer, trainer._batches(trainer.train_set, 0, 8 * 4)))
        for _ in range(turns):
            for (trainer, batches), own in zip(trainers, found, strict=True):
                loss, norm = trainer.train_step(batches)
                own.append((loss.item(), norm))
        assert all(trainer.train_schedule.captured for trainer, _ in trainers)
        for trainer, _ in trainers:
            trainer.release()
            assert not trainer.train_schedule.captured
        return found

    alone = [*steps(256), *steps(128)] if HAS_GPU else [*steps(32), *steps(16)]
    assert (steps(256, 128) if HAS_GPU else steps(32, 16)) == alone and graphs.made == 4
    assert FullCudaGraphWrapper.cuda_graph["training"] is None and not StaticBufferLoader.static_buffers["training"]
