# SPDX-License-Identifier: Apache-2.0
"""The callback's part that is the same for both of Lightning's packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua._stats import Stats, means_per_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class StatsParts(_Base):
    """Logs, of rank 0, what the algorithm of a BaguaStrategy sends, what it saves and where its time goes.

    To every logger of the Trainer, each time that it logs (`log_every_n_steps`) and at the end of training:

    - `bagua/wire_bytes_per_step`, `bagua/bytes_saved_per_step`: means over the steps since the last time. Saved is what
      an allreduce of all gradients in full precision would have sent more; it may be negative.
    - `bagua/bytes_saved`: all that was saved since training began.
    - `bagua/rounds`: how often the ranks have communicated.
    - `bagua/seconds_per_step/<stage>`: as `seconds` in `bagua.Handle.stats()`, mean over the steps since the last time.
    """

    _Misconfiguration: type[Exception]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the figures begin.

        Raises:
            MisconfigurationException: the Trainer has another strategy, or no logger.
        """
        if getattr(trainer.strategy, "handle", None) is None:
            raise self._Misconfiguration("BaguaStatsCallback needs Trainer(strategy=BaguaStrategy(...))")
        if not trainer.loggers:
            raise self._Misconfiguration("BaguaStatsCallback cannot log with Trainer(logger=False)")
        bytes_of_gradients = sum(p.nbytes for p in pl_module.parameters() if p.requires_grad)
        ranks = dist.get_world_size()
        self._bytes_of_allreduce = 2 * (ranks - 1) / ranks * bytes_of_gradients
        self._start = self._last = self._stats(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log where the Trainer does."""
        if trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps that are left."""
        self._log(trainer)

    def _stats(self, trainer: Trainer) -> Stats:
        return trainer.strategy.handle.stats()  # type: ignore[no-any-return, attr-defined]

    def _log(self, trainer: Trainer) -> None:
        now = self._stats(trainer)
        means = means_per_step(now, self._last)
        if not means:
            return
        self._last = now
        sent = means["wire_bytes_per_step"]
        figures: dict[str, float] = {
            "wire_bytes_per_step": sent,
            "bytes_saved_per_step": self._bytes_of_allreduce - sent,
            "bytes_saved": self._bytes_of_allreduce * (now["steps"] - self._start["steps"])
            - (now["wire_bytes"] - self._start["wire_bytes"]),
            "rounds": now["rounds"],
        }
        figures |= {name: mean for name, mean in means.items() if name.startswith("seconds_per_step/")}
        # At Lightning's own step, which is that of the loss beside it.
        named: dict[str, Any] = {f"bagua/{name}": figure for name, figure in figures.items()}
        trainer._logger_connector.log_metrics(named)
