"""Losses and gradients of logits that lie on two tensor-parallel ranks, with those of float64.

python -m torch.distributed.run --nproc-per-node 2 loss_worker.py OUT
"""

import sys

import torch

from megatron_mhar import platform

VOCABULARY = 40
Z_LOSS = 0.3


def cases():
    """Logits and labels of all ranks, by name."""
    generator = torch.Generator().manual_seed(0)

    def random():
        return 5 * torch.randn(3, 5, VOCABULARY, generator=generator)

    labels = torch.randint(0, VOCABULARY, (3, 5), generator=generator)
    half = VOCABULARY // 2
    part, whole, huge = random(), random(), random()
    part[..., half + 1 :] = -torch.inf
    whole[..., half:] = -torch.inf
    huge[..., half] = 300
    return {
        "anywhere": (random(), labels),
        "on the first rank": (random(), labels % half),
        "on the second rank": (random(), labels % half + half),
        "first of a rank": (random(), torch.full_like(labels, half)),
        "last of a rank": (random(), torch.full_like(labels, half - 1)),
        "a rank's part masked but for one": (part, labels % half),
        "a rank's part masked": (whole, labels % half),
        "one huge logit": (huge, labels),
    }


def main() -> None:
    platform.setup(0)
    torch.distributed.init_process_group("nccl" if platform.HAS_GPU else "gloo")
    from megatron.core import parallel_state

    from megatron_mhar.model.language_model import cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, found = torch.distributed.get_rank(), {}
    for name, (logits, labels) in cases().items():
        truth = logits.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(truth.flatten(0, 1), labels.flatten(), reduction="none").view(3, 5)
        squared = truth.logsumexp(-1).square()
        (loss + Z_LOSS * squared).sum().backward()
        own = logits.chunk(2, -1)[rank].cuda().requires_grad_()
        mine = cross_entropy(own * 1, labels.cuda())
        (mine[0] + Z_LOSS * mine[1]).sum().backward()
        expected = loss, squared, truth.grad.chunk(2, -1)[rank]
        pairs = zip((*mine, own.grad), expected, strict=True)
        found[name] = [float((a.double().cpu() - b).abs().max() / b.abs().max()) for a, b in pairs]
    everyone: list[object] = [None, None]
    torch.distributed.all_gather_object(everyone, found)
    if rank == 0:
        torch.save(dict(enumerate(everyone)), sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
