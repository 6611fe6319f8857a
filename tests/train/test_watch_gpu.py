"""What the watch takes for granted of CUDA."""

import threading
import time

import pytest
import torch

from megatron_mhar.train import watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_thread_whose_device_takes_no_more_work_spins():
    """So it is told from one that sleeps, though its line says nothing of waiting."""
    small = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # clock cycles, some three seconds
    began, before = time.monotonic(), watch._processor_s(threading.get_ident())
    for _ in range(3000):  # more than the device's queue holds
        small.add_(1)
    waited, used = time.monotonic() - began, watch._processor_s(threading.get_ident()) - before
    torch.cuda.synchronize()
    assert waited > 1 and used > 5 * watch._STILL_S * waited  # in a second between two looks, on a busy machine
