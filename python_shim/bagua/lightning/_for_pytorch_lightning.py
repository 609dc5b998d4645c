# SPDX-License-Identifier: Apache-2.0
"""The classes of bagua.lightning for `pytorch_lightning`."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from bagua.lightning._stats import StatsParts
from bagua.lightning._strategy import StrategyParts


# mypy takes the parts for classes of the other package.
class BaguaStrategy(StrategyParts, DDPStrategy):  # type: ignore[misc]
    __doc__ = StrategyParts.__doc__
    _Misconfiguration = MisconfigurationException


class BaguaStatsCallback(StatsParts, Callback):  # type: ignore[misc]
    __doc__ = StatsParts.__doc__
    _Misconfiguration = MisconfigurationException


BaguaStrategy.register_strategies(StrategyRegistry)
