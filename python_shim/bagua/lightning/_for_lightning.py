# SPDX-License-Identifier: Apache-2.0
"""The classes of bagua.lightning for `lightning.pytorch`."""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from bagua.lightning._stats import StatsParts
from bagua.lightning._strategy import StrategyParts


class BaguaStrategy(StrategyParts, DDPStrategy):
    __doc__ = StrategyParts.__doc__
    _Misconfiguration = MisconfigurationException


class BaguaStatsCallback(StatsParts, Callback):
    __doc__ = StatsParts.__doc__
    _Misconfiguration = MisconfigurationException


BaguaStrategy.register_strategies(StrategyRegistry)
