"""Fused kernels: which library serves which operation, with stand-ins for apex on the path of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run

ROOT = Path(__file__).parents[2]

# What apex's modules are asked for, in plain torch; each notes that it was used.
APEX = {
    "calls.py": "from collections import Counter\ncounts = Counter()",
    "amp_C.py": """
        import calls
        def multi_tensor_l2norm(overflow, lists, per_tensor):
            import torch
            calls.counts["l2norm"] += 1
            return torch.stack([t.norm() for t in lists[0]]).norm().reshape(1), None
        def multi_tensor_scale(overflow, lists, scale):
            calls.counts["scale"] += 1
            for source, target in zip(*lists):
                target.copy_(source * scale)
    """,
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": """
        class MultiTensorApply:
            def __call__(self, operation, overflow, lists, *arguments):
                return operation(overflow, lists, *arguments)
        multi_tensor_applier = MultiTensorApply()
    """,
    "apex/optimizers/__init__.py": """
        import calls, torch
        class FusedAdam(torch.optim.AdamW):
            def __init__(self, params, adam_w_mode, capturable, **settings):
                assert adam_w_mode
                super().__init__(params, **settings)
            def step(self, closure=None):
                calls.counts["adam"] += 1
                return super().step(closure)
        FusedSGD = torch.optim.SGD
    """,
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
        import calls, torch
        class FusedLayerNormAffineFunction: ...
        def fused_rms_norm_affine(x, weight, shape, eps=1e-6, memory_efficient=False):
            calls.counts["norm"] += 1
            return torch.nn.functional.rms_norm(x, shape, weight, eps)
    """,
    "fused_layer_norm_cuda.py": "",
    "fused_weight_gradient_mlp_cuda.py": """
        import calls
        def wgrad_gemm_accum_fp32(x, grad, main_grad):
            calls.counts["accumulated"] += 1
            main_grad.addmm_(grad.t().float(), x.float())
    """,
}

# Without a GPU nothing of apex is used: this process says that it has one, once megatron-core is on the CPU.
TRAIN = """
    import json, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from megatron_mhar import platform
    platform.setup(0)
    import megatron_mhar.train.checkpoint
    platform.HAS_GPU = True
    from megatron_mhar.model import build, fusions
    assert fusions.served_by("transformer_engine", None)["gradient accumulation"].startswith("Transformer Engine (apex")
    import megatron_mhar.model.norm
    served = fusions.served_by("local", None)
    fused = fusions.apex_rms_norm()
    platform.HAS_GPU = False
    megatron_mhar.model.norm.apex_rms_norm = lambda: fused
    from megatron_mhar.train.loop import train
    from tests.conftest import METHODS, tiny_run
    config = tiny_run(sys.argv[1], Path(sys.argv[2]), residual=METHODS["mhar"], training={"steps": 4})
    train(config)
    import calls
    print("RESULT" + json.dumps({"served": served, "calls": calls.counts}))
"""


def process(folder: Path, script: str, *arguments: object) -> dict:
    """Run a script with the modules in ``folder`` first on its path; what it printed after RESULT."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.partition("RESULT")[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins in plain torch, for a CPU")
def test_apex_serves_where_it_is_installed(tmp_path, corpus, one_rank):
    """A run with apex's interfaces is the run without them; all of them were used."""
    from megatron_mhar.train.loop import train

    for name, text in APEX.items():
        path = tmp_path / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    found = process(tmp_path / "modules", TRAIN, corpus, tmp_path / "apex")
    assert found["served"] == {
        "gradient accumulation": "apex", "norm": "apex", "optimizer": "apex FusedAdam",
        "gradient norm and clipping": "apex",
    }  # fmt: skip
    calls = found["calls"]
    # Two micro-batches a step; four linear layers in each of four layers, and the output layer.
    assert calls["accumulated"] == 4 * 2 * (4 * 4 + 1)
    assert calls["norm"] > 0 and calls["l2norm"] == 4 and calls["scale"] > 0
    # Of the five, one allocates the state before the first step.
    assert calls["adam"] == 5

    plain = tiny_run(corpus, tmp_path / "plain", residual=METHODS["mhar"], training={"steps": 4})
    train(plain)
    losses = [
        [v for _, v in load_metrics(RunFiles(tmp_path / folder / "run").journal)["train/loss"]]
        for folder in ("apex", "plain")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 4
    log = RunFiles(tmp_path / "apex/run").log.read_text()
    assert "served by: gradient accumulation apex" in log and "optimizer apex FusedAdam" in log


def test_torch_serves_without_them(monkeypatch):
    from megatron_mhar import platform
    from megatron_mhar.model import fusions

    if torch.cuda.is_available():
        pytest.skip("of a machine without a GPU")
    assert fusions.served_by("local", None) == {
        "gradient accumulation": "torch", "norm": "torch", "optimizer": "torch AdamW",
        "gradient norm and clipping": "torch",
    }  # fmt: skip
    engine, at_sites = "Transformer Engine", "where a replacement form reads,"
    norms = {(layers, sites): fusions.served_by(layers, sites)["norm"]
             for layers in ("local", "transformer_engine") for sites in (None, "torch", "triton")}  # fmt: skip
    assert norms == {
        ("local", None): "torch", ("local", "torch"): "torch",
        ("local", "triton"): f"routing kernels {at_sites} torch elsewhere", ("transformer_engine", None): engine,
        ("transformer_engine", "torch"): f"torch {at_sites} {engine} elsewhere",
        ("transformer_engine", "triton"): f"routing kernels {at_sites} {engine} elsewhere",
    }  # fmt: skip
    # A GPU, and an apex without the kernel, or with a kernel that it cannot load.
    monkeypatch.setattr(platform, "HAS_GPU", True)
    assert fusions.apex_rms_norm() is None
    monkeypatch.setattr(fusions, "find_spec", lambda name: name)
    assert fusions.apex_rms_norm() is None


def test_transformer_engines_layers_accumulate():
    """Its own layers are told, and no others: those need apex for it."""
    from megatron_mhar.model.fusions import accumulate_in_layers, served_by

    engine, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    engine.fuse_wgrad_accumulation = False
    accumulate_in_layers(torch.nn.Sequential(other, torch.nn.Sequential(engine)))
    assert engine.fuse_wgrad_accumulation is True and not hasattr(other, "fuse_wgrad_accumulation")
    assert served_by("transformer_engine", None)["gradient accumulation"].startswith("Transformer Engine (")
