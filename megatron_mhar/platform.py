"""The only file that knows whether there is a GPU.

Where there is one, :func:`setup` binds the rank to its device and changes nothing else. Where there is none,
megatron-core's calls to ``torch.cuda`` are led to the CPU for the rest of the process, so that all other code has one
path. Each redirection names what megatron-core 0.19 needs it for.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_mhar.errors import UserError

HAS_GPU = torch.cuda.is_available()
# Collectives: NCCL between GPUs, gloo between CPU processes.
BACKEND = "nccl" if HAS_GPU else "gloo"

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip
_installed = False


def setup(local_rank: int) -> torch.device:
    """Prepare this process for megatron-core and return its device. May be called more than once.

    Raises:
        UserError: this process was given GPUs, and torch sees none; ``MHAR_ALLOW_CPU=1`` lets it compute on a CPU.
    """
    if HAS_GPU:
        # TP with overlap needs one hardware queue, or a collective can wait behind the compute that waits for it. It is
        # read when the device is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # Slurm says NoDevFiles where a job has none, and people -1.
    if given not in ("", "-1", "NoDevFiles") and os.environ.get("MHAR_ALLOW_CPU") != "1":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise UserError(
            f"CUDA_VISIBLE_DEVICES: {given} given, but torch sees no GPU on {socket.gethostname()}: torch "
            f"{torch.__version__} {built}; look at the driver, and in a container at whether it is let through. "
            "MHAR_ALLOW_CPU=1 trains on the processor"
        )
    _redirect_to_cpu()
    return torch.device("cpu")


def device_name() -> str:
    """Name of the device that this process computes on."""
    return torch.cuda.get_device_name() if HAS_GPU else f"CPU ({torch.get_num_threads()} threads)"


def synchronize() -> None:
    """Wait for the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: allocated on the GPU, or resident on a CPU."""
    if HAS_GPU:
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def use_deterministic_algorithms() -> None:
    """Bit-identical repeats on a GPU; a CPU run is one already."""
    if HAS_GPU:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True, warn_only=False)


def _on_cpu(device: Any) -> Any:
    is_cuda = (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", None) == "cuda"
    return torch.device("cpu") if is_cuda else device


def _factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # rotary embeddings under context parallelism; it needs a driver
        return function(*args, **kwargs)

    return on_cpu


class _Stream:
    """A stream or event where everything runs in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


def _redirect_to_cpu() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")

    # Parameters and buffers are made on `torch.cuda.current_device()` or "cuda".
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda *a, **k: None
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *a, **k: self
    module.cuda = lambda self, *a, **k: self

    # Optimizer and DDP recognise parameter types by the names of CUDA tensors.
    tensor_type = tensor.type
    tensor.type = lambda self, *a, **k: (
        tensor_type(self, *a, **k) if a or k else tensor_type(self).replace("torch.", "torch.cuda.")
    )

    # The RNG tracker keeps one state a parallel group; here it is the CPU generator's.
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # torch.manual_seed would call back.
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    # It warns when the CPU generator moves while it draws from "the GPU's".
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

    # All-to-all takes the numbers of tokens for each rank's experts as an array, which they become on leaving a GPU.
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )

    # Functions under its "jit fuser" take longer to compile for a CPU than a small run takes.
    torch.compiler.set_stance("force_eager")

    # Schedules, DDP and timers order work on streams.
    cuda.synchronize = lambda *a, **k: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *a, **k: _Stream()
    cuda.stream = lambda stream: _Stream()
    cuda.empty_cache = lambda: None
