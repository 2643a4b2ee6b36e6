# SPDX-License-Identifier: Apache-2.0
"""What bucket groups have under way: which handle, since when, issued where.

A handle counts from its ``start_*`` call until Megatron lets go of it, that is until the attribute of the bucket group
holds another or none. So nothing has to be called at the end, and nothing here keeps a handle or a model alive. With
several distributed-optimizer instances a gradient reduction leaves no handle: there only whether it was dispatched.

Not handled: collectives that others issue, and handles that were there before the guard was installed.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from types import FrameType

Kind = Literal["grad_reduce_handle", "param_gather_handle"]
GRADIENTS: Kind = "grad_reduce_handle"
PARAMETERS: Kind = "param_gather_handle"
KINDS: dict[Kind, str] = {GRADIENTS: "gradient reduction", PARAMETERS: "parameter gather"}


def process_group(bucket_group: Any, kind: Kind) -> Any:
    """The group that a bucket group's collective of a kind runs on; None if it has another form than we know."""
    names = ["intra_distributed_optimizer_instance_group", "data_parallel_group"]
    if kind == GRADIENTS and not bucket_group.ddp_config.use_distributed_optimizer:
        names.reverse()
    return next((group for name in names if (group := getattr(bucket_group, name, None)) is not None), None)


class Outstanding:
    """A collective of a bucket group that was issued.

    Attributes:
        kind: The attribute of the bucket group that holds its handle.
        since_s: When, on the clock of ``time.monotonic``.
        sequence: c10d's count of collectives on the group after it; None where the back end has none.
        on_device: Whether it runs on a CUDA device.
        told: That it is late was said, or it is known to be complete.
    """

    __slots__ = ("_bucket_group", "_code", "_handle", "_line", "kind", "on_device", "sequence", "since_s", "told")

    def __init__(self, bucket_group: Any, kind: Kind, handle: Any, frame: FrameType) -> None:
        self._bucket_group, self._handle = weakref.ref(bucket_group), weakref.ref(handle)
        self.kind = kind
        self.since_s = time.monotonic()
        self._code, self._line = frame.f_code, frame.f_lineno
        self.on_device = bool(bucket_group.buckets[0].grad_data.is_cuda)
        self.told = False
        try:
            group = process_group(bucket_group, kind)
            self.sequence: int | None = group._get_sequence_number_for_group()
        except (AttributeError, RuntimeError):
            self.sequence = None

    @property
    def bucket_group(self) -> Any:
        """Whose it is; None if that is gone."""
        return self._bucket_group()

    @property
    def handle(self) -> Any:
        """Its handle, or None if Megatron has let go of it."""
        bucket_group, handle = self._bucket_group(), self._handle()
        return handle if handle is not None and getattr(bucket_group, self.kind, None) is handle else None

    def hold(self, handle: Any) -> None:
        """Take another handle for it, which stands for the first in Megatron's attribute."""
        self._handle = weakref.ref(handle)

    @property
    def place(self) -> str:
        """Where it was issued, as ``path:line function``."""
        return f"{self._code.co_filename}:{self._line} {self._code.co_name}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of its buckets."""
        bucket_group = self._bucket_group()
        return () if bucket_group is None else tuple(bucket.grad_data.numel() for bucket in bucket_group.buckets)

    def __str__(self) -> str:
        elements, count = ", ".join(map(str, self.sizes)), len(self.sizes)
        buckets = f"{count} bucket{'s' * (count != 1)} ({elements} elements)"
        return f"{KINDS[self.kind]} of {buckets}, issued at {self.place}"


class Page:
    """What is known of one bucket group.

    Attributes:
        dispatched: Its gradients' reduction was, since the last ``finish_grad_sync``; None: not known.
        finished: ``finish_grad_sync`` was called since the last ``zero_grad_buffer``, or that is not known.
        said: What was said of it already.
    """

    __slots__ = ("_bucket_group", "dispatched", "finished", "outstanding", "said")

    def __init__(self, bucket_group: Any) -> None:
        self._bucket_group = weakref.ref(bucket_group)
        self.outstanding: dict[Kind, Outstanding] = {}
        self.dispatched: bool | None = None
        self.finished = True
        self.said: set[str] = set()

    def is_of(self, bucket_group: Any) -> bool:
        """Whether it is this one's, and not that of one gone whose place in memory it has."""
        return self._bucket_group() is bucket_group

    @property
    def gone(self) -> bool:
        """Whether its bucket group is."""
        return self._bucket_group() is None


class Ledger:
    """The pages of all bucket groups."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}

    def page(self, bucket_group: Any) -> Page:
        """The page of a bucket group, a new one if need be."""
        page = self._pages.get(id(bucket_group))
        if page is None or not page.is_of(bucket_group):
            page = self._pages[id(bucket_group)] = Page(bucket_group)
        return page

    def note(self, bucket_group: Any, kind: Kind, frame: FrameType) -> Outstanding | None:
        """Note the handle that a bucket group holds; None if it holds none, or one that was noted before."""
        handle = getattr(bucket_group, kind)
        if handle is None:
            return None
        page = self.page(bucket_group)
        before = page.outstanding.get(kind)
        if before is not None and before.handle is handle:
            return None
        noted = page.outstanding[kind] = Outstanding(bucket_group, kind, handle, frame)
        return noted

    def outstanding(self) -> list[Outstanding]:
        """All that Megatron still holds, oldest first. Any thread may ask."""
        held = []
        for key, page in list(self._pages.items()):
            if page.gone:
                self._pages.pop(key, None)
            held += [one for one in list(page.outstanding.values()) if one.handle is not None]
        return sorted(held, key=lambda one: one.since_s)

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()


LEDGER = Ledger()
