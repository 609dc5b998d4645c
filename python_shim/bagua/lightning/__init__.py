# SPDX-License-Identifier: Apache-2.0
"""Lightning: a strategy that trains with any of our algorithms, and a callback that logs what they do::

    import bagua.lightning
    from lightning import Trainer

    trainer = Trainer(strategy="bagua_bytegrad", devices=2)

For `lightning` and for `pytorch_lightning`, 2.0 or later: the one that has been imported, and where both are installed
and neither has been imported, the one that comes later in the script.
"""

from typing import TYPE_CHECKING

from bagua.lightning import _packages

if TYPE_CHECKING:
    from bagua.lightning._for_lightning import BaguaStatsCallback, BaguaStrategy
else:
    _classes = _packages.load()
    BaguaStrategy = _classes.BaguaStrategy
    BaguaStatsCallback = _classes.BaguaStatsCallback

__all__ = ["BaguaStatsCallback", "BaguaStrategy"]
