# SPDX-License-Identifier: Apache-2.0
"""Process groups and collectives of the original's module `bagua.torch_api.communication`, over torch.distributed.

All operations block: when they return, the result is there, for the host too. `comm` is a communicator, by default that
of all ranks of the default group, and roots and peers are ranks inside it. With `CommMember.NON_COMM_MEMBER` an
operation does nothing. Every rank of the communicator calls, with the same shapes and dtypes.

A wrong argument is a ValueError, or a TypeError where it is of a wrong type, before anything is communicated. It names
operation, rank, what was expected and what came. A call before `init_process_group` is a RuntimeError, and so is an
`op` that the dtype or the backend does not have.

Definition: `bagua.torch_api.communication` of Bagua 0.6, whose `allreduce` and `reduce` work in place, with the
additions of Bagua 0.7 to 0.9.
"""

from bagua.torch_api._collectives import (
    ReduceOp,
    allreduce,
    allreduce_inplace,
    barrier,
    broadcast,
    reduce,
    reduce_inplace,
)
from bagua.torch_api._groups import (
    BaguaProcessGroup,
    CommMember,
    Communicator,
    from_torch_group,
    init_process_group,
    is_initialized,
    new_group,
)
from bagua.torch_api.exceptions import RepeatedInitializationError

__all__ = [
    "BaguaProcessGroup",
    "CommMember",
    "Communicator",
    "ReduceOp",
    "RepeatedInitializationError",
    "allreduce",
    "allreduce_inplace",
    "barrier",
    "broadcast",
    "from_torch_group",
    "init_process_group",
    "is_initialized",
    "new_group",
    "reduce",
    "reduce_inplace",
]
