# SPDX-License-Identifier: Apache-2.0
"""The life of asynchronous collectives: one owner from issue to end, and groups that end in good order. Needs torch.

``AllReduceContext`` owns the works of one group; ``groups`` drains and destroys groups; ``StreamOrder`` puts
communication between its producer and its consumer, and ``StreamOrderChecker`` finds what is not in order. When the
guarantees stop: docs/assumptions.md.
"""

from megatron_fixes.collectives.context import AllReduceContext
from megatron_fixes.collectives.errors import (
    ClosedContextError,
    CollectiveFailedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupDestroyedError,
    StreamOrderError,
    TeardownError,
    TensorModifiedError,
)
from megatron_fixes.collectives.stream_checker import StreamOrderChecker
from megatron_fixes.collectives.streams import StreamOrder

__all__ = [
    "AllReduceContext",
    "ClosedContextError",
    "CollectiveFailedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupDestroyedError",
    "StreamOrder",
    "StreamOrderChecker",
    "StreamOrderError",
    "TeardownError",
    "TensorModifiedError",
]
