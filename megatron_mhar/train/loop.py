"""The training loop, on megatron-core's datasets, schedules, DDP, optimizer and checkpoints."""

from __future__ import annotations

import logging
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import islice, repeat
from types import FrameType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_mhar import platform
from megatron_mhar.config.load import flatten
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.data.dataset import build_datasets, check_data, count_valid_samples, micro_batches
from megatron_mhar.errors import UserError
from megatron_mhar.model.build import build_models, check_layers, resolve_layers
from megatron_mhar.model.fp8 import forget_scales, lacks_scales
from megatron_mhar.model.fusions import accumulate_in_layers, served_by
from megatron_mhar.model.observe import record_routing
from megatron_mhar.pipeline.communicator import connect_stages
from megatron_mhar.routing import resolve_backend
from megatron_mhar.run_files import GOES_ON, RoutingMap, RunSummary
from megatron_mhar.tracking.journal import load_metrics
from megatron_mhar.tracking.tracker import Tracker
from megatron_mhar.train.balancing import take_balancing_loss
from megatron_mhar.train.checkpoint import Checkpoints
from megatron_mhar.train.cuda_graph import CapturedSchedule, on_capture_stream
from megatron_mhar.train.distributed import (
    any_rank,
    check_layout,
    initialize,
    local_rank,
    mean_of_last_stage,
    on_every_rank,
    on_first_rank,
    rank,
    shut_down,
    world_size,
)
from megatron_mhar.train.optimizer import Optimizer
from megatron_mhar.train.profile import StepProfiler
from megatron_mhar.train.progress import ProgressLog
from megatron_mhar.train.run_folder import RunFolder
from megatron_mhar.train.skip import Skips
from megatron_mhar.train.throughput import model_flops, peak_flops, routing_flops
from megatron_mhar.train.watch import Watch

logger = logging.getLogger("megatron_mhar")

# Micro-batches of one run of a schedule: tensors by name, none on ranks that need none.
Batches = list[dict[str, Tensor]]

# Until each gradient in FP8 is seen as it is: those of sublayers' outputs come first, then those within sublayers, and
# last what these add to the outputs before.
_SCALING_PASSES = 3


def train(config: RunConfig) -> RunSummary | None:
    """Train, or go on training, the run of ``config``; called by every rank.

    Returns:
        The run's summary on rank 0 once its last step is done; None on other ranks, or if it stopped before.

    Raises:
        UserError: config, data, layout and folder do not fit, and nothing has been written then; or a data file or
            the disk fails on the way.
    """
    check_layout(config, world_size())
    check_layers(config)
    alone = not torch.distributed.is_initialized()
    device = initialize(config)
    try:
        folder = RunFolder(config)
        with ExitStack() as stack:
            watch = stack.enter_context(Watch(folder.files, config.parallel))
            # Every machine must have the files; one process of each reads them.
            found = on_every_rank(lambda: check_data(config) if local_rank() == 0 else {})
            digests = on_first_rank(lambda: found)
            first = rank() == 0
            on_first_rank(lambda: stack.enter_context(folder.locked()))
            finished = on_first_rank(folder.finished)
            start = on_first_rank(lambda: folder.prepare(digests))
            stack.enter_context(
                progress := ProgressLog(folder.files.log if first else None, total=config.training.steps, start=start)
            )
            if finished is not None:
                logger.info("%s: finished at step %d already", folder.path, finished.steps)
                return finished if first else None
            tracker = stack.enter_context(_tracker(config, folder)) if first else None
            # An error is told to the other ranks before tracker and log are closed, which takes its time.
            stack.push(watch)
            trainer = Trainer(config, folder, device, progress, tracker, digests, patience=watch.patience)
            stack.callback(trainer.release)
            watch.steps_done, watch.passes = lambda: trainer.steps_done, lambda: trainer.passes
            summary = trainer.run(start)
            return summary if first else None
    finally:
        if alone:
            shut_down()


def _tracker(config: RunConfig, folder: RunFolder) -> Tracker:
    return Tracker(
        folder.path,
        name=config.name,
        params=flatten(config),
        config=config.tracking,
        default_store=config.output_dir,
    )


class Trainer:
    """Model, optimizer and data of one run on one rank.

    Args:
        config: the run.
        folder: its folder, prepared.
        device: this rank's device.
        progress: bar and log.
        tracker: where metrics go; rank 0 alone has one.
        digests: of the data files, as check_data gives them.
        trains: whether it will train, or only evaluate: then training data need not be there.
        patience: what is put around a call that other threads may have to wait for, as numpy's shuffle of indices.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        device: torch.device,
        progress: ProgressLog,
        tracker: Tracker | None,
        digests: Mapping[str, str] | None = None,
        *,
        trains: bool = True,
        patience: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.patience = patience
        self.config, self.folder, self.device, self.progress, self.tracker = config, folder, device, progress, tracker
        self.digests = digests or {}
        self.models = build_models(config)
        self.pipeline = connect_stages(self.models, cached=config.parallel.history_cache)
        self.chunks = wrap(config, self.models)
        self.optimizer = Optimizer(config, self.chunks)
        connect(self.chunks, self.optimizer)
        self.checkpoints = Checkpoints(config, folder.files.checkpoints, self.chunks, self.optimizer)
        # An evaluation beside a training that is under way has indices of its own.
        index = folder.files.index if trains else folder.files.evaluation / "index"
        with patience():
            self.train_set, self.valid_set = build_datasets(config, index, digests, train=trains)
        self.data_parallel = parallel_state.get_data_parallel_world_size()
        # Of this rank, in a global batch.
        self.micro_batches = config.training.global_batch_size // config.training.micro_batch_size // self.data_parallel
        self.forward_backward = get_forward_backward_func()
        # Evaluations are not captured: they may be recorded, and come seldom.
        self.train_schedule = self.forward_backward
        if config.training.cuda_graph != "none":
            warmup = self.models[0].config.cuda_graph_warmup_steps
            self.train_schedule = CapturedSchedule(self.forward_backward, warmup_steps=warmup)
        self._may_lack_scales = config.training.precision == "fp8" and config.training.fp8.recipe == "delayed"
        self.skips = Skips(config.training.skip)
        self.speeds: list[float] = []
        self.lr = self.optimizer.lr  # of the last step
        self.stop_signal: int | None = None
        self.steps_done = 0
        self.passes = 0  # runs of the schedule and forwards of micro-batches begun, to train and to evaluate
        self.routing: RoutingMap | None = None
        precision = "fp8" if self.models[0].config.fp8 else config.training.precision
        tflops = config.training.peak_tflops
        # FLOP/s of one rank's device; None where it is not known.
        self.peak = peak_flops(platform.device_name(), precision) if tflops is None else tflops * 1e12
        # Operations a token, of the model and of routing.
        self.flops, self.routing_flops = model_flops(config), routing_flops(config)

    def run(self, start: int) -> RunSummary | None:
        """Train from step ``start`` on; the summary if the last step was reached."""
        training, step = self.config.training, start
        self.steps_done = start
        if "skips" in (progress := self.checkpoints.resume(start)):
            self.skips.load_state(progress["skips"])
        self._announce()
        last = min(training.steps, training.stop_after or training.steps)
        batches = self._batches(self.train_set, start * training.global_batch_size,
                                training.steps * training.global_batch_size)  # fmt: skip
        saved = start
        profiler = StepProfiler(self.config.profile, self.models, self.folder.files.profile, rank(), self.patience)
        with self._signals(), self.checkpoints, profiler:
            pending: list[tuple[Tensor | None, float]] = []
            mark = time.perf_counter()
            while step < last:
                profiler.begin_step(step + 1)
                loss, norm = self.train_step(batches)
                pending.append((loss, norm))
                step += 1
                self.steps_done = step
                self.checkpoints.poll()
                if self.skips.in_row:
                    skipped = self._report_skipped(step, loss, norm)
                    if self.skips.exhausted:
                        self._report(step, pending, time.perf_counter() - mark)
                        self.checkpoints.wait()
                        raise UserError(
                            f"{skipped}. So many in a row stop the run (training.skip.max_in_row): see samples "
                            f"{self._samples(step, self.skips.in_row)}. The newest checkpoint is of step {saved}"
                        )
                self.progress.step(step)
                stopping = any_rank(self.stop_signal is not None)
                evaluates = step % self.config.evaluation.interval == 0 or step == training.steps
                # Weights do not change in a row of skipped steps, and may be lost already: what is there stays.
                due = step % self.config.checkpoint.interval == 0 and not self.skips.in_row
                saves = due or step == last or stopping
                if step % training.log_interval == 0 or evaluates or saves:
                    self._report(step, pending, time.perf_counter() - mark)
                    pending = []
                if evaluates and self.valid_set is not None:
                    self._evaluate(step)
                    stopping = any_rank(self.stop_signal is not None)  # it may have come in the meantime
                if saves or stopping:
                    samples = step * training.global_batch_size
                    progress = {"step": step, "samples": samples, "skips": self.skips.state()}
                    self.checkpoints.save(step, progress, prune=not self.skips.in_row)
                    saved = step
                    stopping = any_rank(self.stop_signal is not None)
                if not pending:
                    mark = time.perf_counter()
                if stopping:
                    break
            self.checkpoints.wait()
        if step < training.steps:
            name = signal.Signals(self.stop_signal).name if self.stop_signal else None
            reason = name or ("stop_after" if step >= last else "a rank")
            asked = "with a later training.stop_after, or none, " if reason == "stop_after" else ""
            logger.info("stopped by %s after step %d, saved at step %d; %s%s", reason, step, saved, asked, GOES_ON)
            if self.tracker is not None:
                self.tracker.close("KILLED")
            return None
        if start == step and self.valid_set is not None:
            self._evaluate(step)  # the run was ended between its last checkpoint and its summary
        return self._finish(step)

    def release(self) -> None:
        """Let go of what must not outlive the process groups, and of the memory, which may be the next model's.

        Circles through autograd's nodes are cut, since Python's collector cannot see them: a data-parallel wrapper
        holds nodes whose hooks hold it, and by its config the optimizer, whose views of parameters hold the nodes too.
        """
        if isinstance(self.train_schedule, CapturedSchedule):
            self.train_schedule.release()
        if self.config.training.precision == "fp8":
            forget_scales()
        for chunk in self.chunks:
            chunk.grad_accs.clear()
            if chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)
            chunk.config.grad_scale_func = chunk.config.finalize_model_grads_func = chunk.config.no_sync_func = None

    def train_step(self, batches: Iterator[Batches]) -> tuple[Tensor | None, float]:
        """One optimizer step over a global batch.

        Returns:
            On the last pipeline stage the mean loss of this rank's tokens (a tensor on the device, without the z-loss),
            and the gradient norm, which is NaN also where the loss of a rank is not finite. What ``self.skips`` does
            not accept leaves the weights as they were.
        """
        batch = next(batches)
        if self._may_lack_scales:
            self._find_scales(batch)
        loss = self._gradients(batch)
        self.lr = self.optimizer.lr
        accepts = self.skips.accepts
        if self.config.training.skip.loss_rise is not None:
            mean = mean_of_last_stage(None if loss is None else loss.detach().reshape(1).clone(), 1)
            accepts = partial(accepts, loss=float(mean))
        _, norm = self.optimizer.step(loss, accepts)
        return loss, norm

    def _find_scales(self, batch: Batches) -> None:
        """Give delayed FP8 scales a history before the first step, where no checkpoint has brought one.

        They start as 1, and a mean over a batch's tokens has gradients too small for that: they would all be zero in
        the first backwards, Adam's second moments would lack them, and steps would be of another size than in bf16.
        """
        self._may_lack_scales = False
        if not any_rank(any(lacks_scales(model) for model in self.models)):
            return
        for _ in range(_SCALING_PASSES):
            self._gradients(batch)
        if self.config.model.num_experts and self.config.model.moe_aux_loss_coeff:
            take_balancing_loss(1, 1)  # it counts steps

    def _gradients(self, batch: Batches) -> Tensor | None:
        """Gradients of a global batch, and the mean loss as :meth:`train_step` returns it."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        return self._mean_loss(batch, z_loss=self.config.optimizer.z_loss, forward_only=False)

    def _samples(self, step: int, steps: int = 1) -> str:
        """Numbers in the data order of the samples of ``steps`` steps, of which ``step`` is the last."""
        size = self.config.training.global_batch_size
        return f"{(step - steps) * size} to {step * size - 1}"

    def _report_skipped(self, step: int, loss: Tensor | None, norm: float) -> str:
        """Log that ``step`` was skipped, and say it."""
        mean = float(mean_of_last_stage(None if loss is None else loss.reshape(1).clone(), 1))
        text = (
            f"step {step}: skipped, {self.skips.why}: loss {mean:.4f}, gradient norm {norm:.3f}, samples "
            f"{self._samples(step)}; {self.skips.in_row} in a row, {self.skips.total} of the run"
        )
        if rank() == 0:
            logger.warning("%s", text)
        return text

    def _mean_loss(self, batches: Batches, *, z_loss: float, forward_only: bool) -> Tensor | None:
        """Run megatron-core's schedule over micro-batches; on the last stage the mean loss of this rank's tokens."""
        training = self.config.training
        schedule = self.forward_backward if forward_only else self.train_schedule
        self.passes += 1

        def step(batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel) -> tuple[Tensor, Any]:
            self.passes += 1
            return forward_step(batches, model, z_loss=z_loss)

        losses = schedule(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=training.sequence_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
            **self.pipeline.schedule_arguments(len(batches)),
        )
        return torch.stack([entry["loss"] for entry in losses]).mean() if losses else None

    @torch.no_grad()
    def evaluate(self, *, average: bool = True, recorded: int = 0) -> float:
        """Mean validation loss over the same samples each time.

        Args:
            average: of the weights' average, if one is kept, instead of the weights.
            recorded: global batches, the first ones, whose routing is recorded into ``self.routing``.
        """
        count = self.config.evaluation.batches
        assert self.valid_set is not None
        batches = self._batches(self.valid_set, 0, count * self.config.training.global_batch_size)
        for chunk in self.chunks:
            chunk.eval()
        with ExitStack() as stack:
            if average:
                stack.enter_context(self.optimizer.averaged_weights())
            recorder = None
            if recorded and self._has_sites:
                recorder = stack.enter_context(record_routing(self.models, recorded * self.micro_batches))
            losses = [self._mean_loss(each, z_loss=0.0, forward_only=True) for each in batches]
            own = [loss for loss in losses if loss is not None]
            self.routing = recorder.result() if recorder else None
        return float(mean_of_last_stage(torch.stack(own).mean() if own else None, 1))

    @property
    def _has_sites(self) -> bool:
        return self.pipeline.plan.table.num_sites > 0

    def _batches(self, dataset: Any, start: int, stop: int) -> Iterator[Batches]:
        """Micro-batches of this rank, those of a global batch at a time.

        A UserError of one rank ends all of them before the schedule is run. Ranks without embedding and loss read
        nothing, and get as many empty batches.
        """
        if any(model.pre_process or model.post_process for model in self.models):
            batches = micro_batches(
                dataset,
                start=start,
                stop=stop,
                micro_batch_size=self.config.training.micro_batch_size,
                rank=parallel_state.get_data_parallel_rank(),
                ranks=self.data_parallel,
                device=self.device,
                num_workers=self.config.data.num_workers,
                vocab_size=self.config.model.vocab_size,
                context_group=parallel_state.get_context_parallel_group(),
            )
        else:
            batches = repeat({})
        for _ in range(start, stop, self.config.training.global_batch_size):
            yield on_every_rank(lambda: list(islice(batches, self.micro_batches)))

    def _announce(self) -> None:
        residual = self.config.residual
        backend = resolve_backend(residual.backend, self.device)
        sites = backend if any(model.decoder.computes_norms for model in self.models) else None
        if backend == "triton" and self._has_sites:
            from megatron_mhar.routing.schedule import describe  # Triton is not everywhere

            plan, width = self.pipeline.plan.table.read_plan, self.config.model.hidden_size
            norms = "; with the sublayers' norms" if sites else ""
            backend += f" ({describe(plan, width)}{norms})"
        layers = resolve_layers(self.config.model.layers)
        logger.info(
            "%s: %s, %s parameters on this rank, %s on %d ranks of %s; layers %s, routing backend %s",
            self.config.name, residual.method + f" with H = {residual.num_heads}" * self._has_sites,
            f"{self.num_parameters:,}", self.config.training.precision,
            torch.distributed.get_world_size(), platform.device_name(), layers, backend,
        )  # fmt: skip
        logger.info("served by: %s", ", ".join(f"{what} {who}" for what, who in served_by(layers, sites).items()))
        asked, size = self.config.evaluation.batches, self.config.training.global_batch_size
        if rank() == 0 and self.valid_set is not None:
            if asked * size > (samples := count_valid_samples(self.config)):
                logger.warning(
                    "evaluation.batches: %d given, but data.valid has %d whole global batches: samples are taken more "
                    "than once, which makes the mean another one", asked, samples // size,
                )  # fmt: skip
        if self.flops is not None:
            if self.peak is not None:
                peak = f"MFU is of {self.peak / 1e12:,g} TFLOP/s a device"
            else:
                peak = f"no MFU: the peak of {platform.device_name()} is not known (training.peak_tflops gives one)"
            logger.info("%.3g GFLOP a token, and %.3g of routing; %s", self.flops / 1e9, self.routing_flops / 1e9,
                        peak)  # fmt: skip

    @property
    def num_parameters(self) -> int:
        """Parameters on this rank."""
        return sum(p.numel() for chunk in self.chunks for p in chunk.parameters())

    def _own_parameters(self) -> int:
        """Parameters that are counted on this rank, so that the sum over ranks counts each once."""
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        expert_replica = parallel_state.get_expert_data_parallel_rank()
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return sum(
            p.numel()
            for chunk in self.chunks
            for p in chunk.parameters()
            # megatron-core marks parameters of shared-out experts, and the copy of a tied embedding on the last stage.
            if (replica if getattr(p, "allreduce", True) else expert_replica) == 0
            and (first or getattr(p, "tensor_model_parallel", False))
            and not getattr(p, "shared", False)
        )

    def _report(self, step: int, pending: list[tuple[Tensor | None, float]], seconds: float) -> None:
        """Log the steps since the last report; ``step`` is the last of them."""
        own = [loss for loss, _ in pending if loss is not None]
        losses = mean_of_last_stage(torch.stack(own) if own else None, len(pending)).tolist()
        model, training = self.config.model, self.config.training
        balance: dict[str, float] = {}
        if model.num_experts and model.moe_aux_loss_coeff:
            micro_batches = len(pending) * self.micro_batches
            balance["train/load_balancing_loss"] = take_balancing_loss(model.layer_pattern.count("E"), micro_batches)
        platform.synchronize()
        tokens = len(pending) * training.global_batch_size * training.sequence_length
        speed, peak = tokens / seconds, self._peak_memory()
        self.speeds.append(speed)
        for number, (loss, (_, norm)) in enumerate(zip(losses, pending, strict=True), step - len(pending) + 1):
            metrics = {"train/loss": loss, "train/grad_norm": norm}
            if number == step:
                metrics |= {
                    "train/tokens_per_second": speed,
                    "train/lr": self.lr,
                    "train/tokens": number * training.global_batch_size * training.sequence_length,
                    "train/peak_memory_bytes": peak,
                    "train/skipped_steps": self.skips.total,
                }
                metrics |= self._utilisation(speed) | balance
            if self.tracker is not None:
                self.tracker.log(number, metrics)
        self.progress.report(loss=losses[-1], tokens_per_second=speed)
        logger.info("step %d/%d  loss %.4f  gradient norm %.3f  %s tokens/s", step, training.steps, losses[-1],
                    pending[-1][1], f"{speed:,.0f}")  # fmt: skip

    def _peak_memory(self) -> int:
        """Bytes of the fullest rank so far; every rank must call it."""
        peak = torch.tensor([platform.peak_memory_bytes()], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
        return int(peak.item())

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Shares of all devices' peak: the model's arithmetic (MFU) and, apart, that of routing; where known."""
        if self.flops is None or self.peak is None:
            return {}
        share = tokens_per_second / (self.peak * torch.distributed.get_world_size())
        return {"train/mfu": self.flops * share, "train/mfu_of_routing": self.routing_flops * share}

    def _evaluate(self, step: int) -> None:
        # Looking at routing takes longer than routing: at all of it once only, for what the run leaves behind.
        loss = self.evaluate(recorded=self.config.evaluation.batches if step == self.config.training.steps else 1)
        logger.info("step %d/%d  validation loss %.4f", step, self.config.training.steps, loss)
        if self.tracker is not None:
            self.tracker.log(step, {"valid/loss": loss} | (self.routing.metrics() if self.routing else {}))

    def _finish(self, step: int) -> RunSummary | None:
        peak = self._peak_memory()
        parameters = torch.tensor([self._own_parameters()], device=self.device)
        torch.distributed.all_reduce(parameters)
        if rank() != 0:
            return None
        history = load_metrics(self.folder.files.journal)
        evaluations = [value for _, value in history.get("valid/loss", [])]
        speeds = [value for _, value in history.get("train/tokens_per_second", [])] or self.speeds
        tail = evaluations[-self.config.evaluation.tail :]
        summary = RunSummary(
            name=self.config.name,
            method=self.config.residual.method,
            num_heads=self.config.residual.num_heads,
            parameters=int(parameters.item()),
            steps=step,
            valid_loss=statistics.fmean(tail) if tail else None,
            valid_loss_last=evaluations[-1] if evaluations else None,
            tokens_per_second=statistics.median(speeds),
            peak_memory_bytes=peak,
            device=platform.device_name(),
            routing_backend=resolve_backend(self.config.residual.backend, self.device),
            data_digests=dict(self.digests),
            skipped_steps=self.skips.total,
        )
        try:
            if self.routing is not None:
                self.routing.write(self.folder.files.routing)
            summary.write(self.folder.files.summary)
        except OSError as error:
            raise UserError(
                f"{self.folder.files.summary}: cannot be written ({error.strerror or error}); the last checkpoint is "
                "whole. Once this is mended, the same command writes it"
            ) from error
        logger.info("finished: %s", self.folder.files.summary)
        return summary

    def _signals(self) -> ExitStack:
        """Within the context, SIGUSR1, SIGTERM and SIGINT end the run after the step under way, with a checkpoint.

        An evaluation under way is finished first, a save is the one that counts: from the signal to the end it takes at
        most a step, an evaluation and a save. A second SIGTERM or SIGINT ends the run at once; SIGUSR1 is a notice, and
        may come several times and beside them.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGUSR1 and self.stop_signal not in (None, signal.SIGUSR1):
                raise KeyboardInterrupt
            if number != signal.SIGUSR1 or self.stop_signal is None:
                self.stop_signal = number

        stack = ExitStack()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, stop))
        return stack


def wrap(config: RunConfig, models: Sequence[HybridModel]) -> list[DistributedDataParallel]:
    """Model chunks in megatron-core's data-parallel wrapper, gradients in fp32."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        check_for_nan_in_grad=False,  # the optimizer looks at the norm of all of them, see train.skip
    )
    chunks = []
    for number, model in enumerate(models):
        # Gradients of later virtual stages are reduced while earlier ones still compute: no need of buckets.
        with on_capture_stream(config.training.cuda_graph != "none"):
            chunk = DistributedDataParallel(model.config, settings, model, disable_bucketing=number > 0)
        accumulate_in_layers(chunk)
        chunk.broadcast_params()
        chunks.append(chunk)
    return chunks


def connect(chunks: Sequence[DistributedDataParallel], optimizer: Optimizer) -> None:
    """Tell the schedule how gradients are finished and synchronised."""
    transformer = chunks[0].config
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.megatron.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]


def forward_step(
    batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel, *, z_loss: float
) -> tuple[Tensor, Any]:
    """Forward of the next micro-batch, as megatron-core's schedules call it.

    Returns:
        Losses and squared log-partitions of the tokens, and what makes a loss of them; on all but the last pipeline
        stage what the next one receives.
    """
    batch = next(batches)
    context = parallel_state.get_context_parallel_world_size()
    output = model(
        batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"), tell_partition=True
    )

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, squared_partition = output
        mean = per_token.mean()
        total = mean + z_loss * squared_partition.mean() if z_loss else mean
        # The schedule changes what it gets in place. It multiplies by the number of context ranks, over which gradients
        # are then averaged, for losses that are a part of a sum; this one is a mean over the rank's own tokens.
        return total / context, {"loss": mean.detach().clone()}

    return output, loss
