"""Steps that go wrong: gradients or losses of one rank, the last, are spoilt on their way to the optimizer."""

import math
import zlib
from contextlib import contextmanager

import torch

POISONS = {
    "nan": lambda gradient: gradient.fill_(math.nan),
    "spike": lambda gradient: gradient.mul_(100),
}


def state(trainer):
    """Checksum of all that a step may change on this rank."""
    # With overlap, other ranks' weights of the step before arrive during a step.
    chunks = [chunk for chunk in trainer.chunks if not chunk.ddp_config.overlap_param_gather]
    tensors = [p.detach() for chunk in chunks for p in chunk.parameters()]
    for part in trainer.optimizer.parts:
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [x for entry in part.optimizer.state.values() for x in entry.values() if torch.is_tensor(x)]
        tensors += list((part.averages or {}).values())
    sums = [zlib.crc32(x.detach().float().cpu().numpy().tobytes()) for x in tensors]
    return sums, trainer.optimizer.scheduler.num_steps


@contextmanager
def poisoned(steps):
    """Within the context the ``steps`` of every run are spoilt.

    Args:
        steps: {step: "nan" or "spike" (of gradients), "loss" (infinite) or "rise" (of the loss)}.

    Yields:
        Steps that have left this rank's state as it was.
    """
    from megatron_mhar.train import loop

    trainer_class = loop.Trainer
    train_step, mean_loss, finalize = trainer_class.train_step, trainer_class._mean_loss, loop.finalize_model_grads
    unmoved, now = [], [0]

    def poison():
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return steps.get(now[0]) if last else None

    def stepping(self, batches):
        now[0], before = self.steps_done + 1, state(self)
        result = train_step(self, batches)
        if state(self) == before:
            unmoved.append(now[0])
        now[0] = 0
        return result

    def finalizing(chunks, *args, **kwargs):
        finalize(chunks, *args, **kwargs)
        if poison() in POISONS:
            for chunk in chunks:
                for parameter in chunk.parameters():
                    POISONS[poison()](parameter.main_grad)

    def spoiling(self, batches, **others):
        loss = mean_loss(self, batches, **others)
        return loss if loss is None else loss + {"loss": math.inf, "rise": 5.0}.get(poison(), 0.0)

    trainer_class.train_step, trainer_class._mean_loss, loop.finalize_model_grads = stepping, spoiling, finalizing
    try:
        yield unmoved
    finally:
        trainer_class.train_step, trainer_class._mean_loss, loop.finalize_model_grads = train_step, mean_loss, finalize
