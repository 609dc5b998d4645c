# SPDX-License-Identifier: Apache-2.0
"""Lightning: a strategy that trains with any of our algorithms, and a callback that logs what they do::

    import bagua.lightning
    from lightning import Trainer

    trainer = Trainer(strategy="bagua_bytegrad", devices=2)

For the package `lightning`, 2.0 or later. `bagua.pytorch_lightning` is the same for `pytorch_lightning`, whose classes
are others.
"""

import lightning.pytorch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from bagua._lightning import check_version
from bagua._lightning.stats import StatsParts
from bagua._lightning.strategy import StrategyParts

check_version("lightning", lightning.pytorch.__version__)

__all__ = ["BaguaStatsCallback", "BaguaStrategy"]


class BaguaStrategy(StrategyParts, DDPStrategy):
    __doc__ = StrategyParts.__doc__
    _Misconfiguration = MisconfigurationException


class BaguaStatsCallback(StatsParts, Callback):
    __doc__ = StatsParts.__doc__
    _Misconfiguration = MisconfigurationException


BaguaStrategy.register_strategies(StrategyRegistry)
