# SPDX-License-Identifier: Apache-2.0
"""What bucket groups have under way: which handle, since when, issued where.

A handle is outstanding from its ``start_*`` call until Megatron lets go of it, that is until the attribute of the
bucket group holds another or none. So nothing has to be called at the end, and nothing here keeps a handle or a model
alive.

With NCCL Megatron lets go of a handle as soon as its stream was told to wait, while the collective may be stuck. So the
works of a device are under way for longer: until they are complete, or the bucket group issues the next of the kind.
Kept for that is what names no tensors but those of the bucket group: works of c10d's coalescing manager, and with
several distributed-optimizer instances, where a reduction leaves no handle, an event on the communication stream.

Not handled: collectives that others issue, handles that were there before the guard was installed, and once Megatron
has let go of them, handles of other forms.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable
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


def process_groups(bucket_group: Any, kind: Kind) -> list[Any]:
    """All of them: with several distributed-optimizer instances gradients are reduced within one, then between them."""
    several = kind == GRADIENTS and bucket_group.ddp_config.num_distributed_optimizer_instances > 1
    between = getattr(bucket_group, "inter_distributed_optimizer_instance_group", None) if several else None
    return [group for group in (process_group(bucket_group, kind), between) if group is not None]


def works_of(handle: Any) -> list[Any]:
    """The works of a handle; none if it has another form than we know, or was waited for.

    Megatron has four kinds: c10d's coalescing manager (``works``), the gather of layer-wise optimizers (``handles``),
    the reduce-scatter with FP32 sums (``all_to_all_handle``, a work with a sum to be made after it), and a plain work.
    """
    for name in ("works", "handles"):
        if hasattr(handle, name):
            return list(getattr(handle, name) or ())
    work = getattr(handle, "all_to_all_handle", handle)
    return [work] if hasattr(work, "is_completed") else []


class Outstanding:
    """A collective of a bucket group that was issued.

    Attributes:
        kind: The attribute of the bucket group that holds its handle.
        since_s: When, on the clock of ``time.monotonic``.
        sequences: c10d's count of collectives after it on each of its groups; none where the back end has none.
        on_device: Whether it runs on a CUDA device.
        told: That it is late was said.
        complete: It is known to be, or its group is gone, so that it has nothing to be asked for.
    """

    __slots__ = (
        "_bucket_group",
        "_code",
        "_handle",
        "_kept",
        "_line",
        "complete",
        "kind",
        "on_device",
        "sequences",
        "since_s",
        "told",
    )

    def __init__(self, bucket_group: Any, kind: Kind, handle: Any, frame: FrameType) -> None:
        self._bucket_group = weakref.ref(bucket_group)
        self._handle = None if handle is None else weakref.ref(handle)
        self._kept: tuple[Any, ...] = ()
        self.kind = kind
        self.since_s = time.monotonic()
        self._code, self._line = frame.f_code, frame.f_lineno
        self.on_device = bool(bucket_group.buckets[0].grad_data.is_cuda)
        self.told = self.complete = False
        try:
            groups = process_groups(bucket_group, kind)
            self.sequences: tuple[int, ...] = tuple(group._get_sequence_number_for_group() for group in groups)
        except (AttributeError, RuntimeError):
            self.sequences = ()

    @property
    def bucket_group(self) -> Any:
        """Whose it is; None if that is gone."""
        return self._bucket_group()

    @property
    def handle(self) -> Any:
        """Its handle, or None if Megatron has let go of it."""
        bucket_group, handle = self._bucket_group(), self._handle and self._handle()
        return handle if handle is not None and getattr(bucket_group, self.kind, None) is handle else None

    @property
    def works(self) -> list[Any]:
        """What may be under way of it; none once it is known to be complete, or can't be told any more."""
        return list(self._kept) or works_of(self.handle)

    def keep(self, works: Iterable[Any]) -> None:
        """Keep its works, whatever Megatron does with the handle; none: let go of them."""
        self._kept = tuple(works)

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

    def __repr__(self) -> str:
        return f"<{self}>"

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
        self.outstanding: dict[Kind, Outstanding] = {}
        held = self.outstanding
        # Works that are kept may name its buffers.
        self._bucket_group = weakref.ref(bucket_group, lambda _: held.clear())
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
        return self._put(bucket_group, kind, handle, frame)

    def note_works(self, bucket_group: Any, kind: Kind, works: Iterable[Any], frame: FrameType) -> None:
        """Note what leaves no handle."""
        self._put(bucket_group, kind, None, frame).keep(works)

    def _put(self, bucket_group: Any, kind: Kind, handle: Any, frame: FrameType) -> Outstanding:
        noted = self.page(bucket_group).outstanding[kind] = Outstanding(bucket_group, kind, handle, frame)
        return noted

    def outstanding(self) -> list[Outstanding]:
        """All that Megatron still holds, oldest first. Any thread may ask."""
        return [one for one in self._noted() if one.handle is not None]

    def under_way(self) -> list[Outstanding]:
        """All that may be under way, also where Megatron holds it no more, oldest first. Any thread may ask."""
        return [one for one in self._noted() if one.works or one.handle is not None]

    def _noted(self) -> list[Outstanding]:
        noted: list[Outstanding] = []
        for key, page in list(self._pages.items()):
            if page.gone:
                self._pages.pop(key, None)
            noted += list(page.outstanding.values())
        return sorted(noted, key=lambda one: one.since_s)

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()


LEDGER = Ledger()
