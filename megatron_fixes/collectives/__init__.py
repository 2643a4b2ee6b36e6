# SPDX-License-Identifier: Apache-2.0
"""The life of asynchronous collectives: one owner from issue to end, and groups that end in good order. Needs torch.

``AllReduceContext`` owns the works of one group; ``groups`` drains and destroys groups. When the guarantees stop:
docs/assumptions.md.
"""

from megatron_fixes.collectives.context import AllReduceContext
from megatron_fixes.collectives.errors import (
    ClosedContextError,
    CollectiveFailedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupDestroyedError,
    TeardownError,
    TensorModifiedError,
)

__all__ = [
    "AllReduceContext",
    "ClosedContextError",
    "CollectiveFailedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupDestroyedError",
    "TeardownError",
    "TensorModifiedError",
]
