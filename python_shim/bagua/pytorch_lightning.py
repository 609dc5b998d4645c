# SPDX-License-Identifier: Apache-2.0
"""`bagua.lightning` for the package `pytorch_lightning`, 2.0 or later."""

import pytorch_lightning
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from bagua._lightning import check_version
from bagua._lightning.stats import StatsParts
from bagua._lightning.strategy import StrategyParts

check_version("pytorch_lightning", pytorch_lightning.__version__)

__all__ = ["BaguaStatsCallback", "BaguaStrategy"]


# mypy takes the parts for classes of the other package.
class BaguaStrategy(StrategyParts, DDPStrategy):  # type: ignore[misc]
    __doc__ = StrategyParts.__doc__
    _Misconfiguration = MisconfigurationException


class BaguaStatsCallback(StatsParts, Callback):  # type: ignore[misc]
    __doc__ = StatsParts.__doc__
    _Misconfiguration = MisconfigurationException


BaguaStrategy.register_strategies(StrategyRegistry)
