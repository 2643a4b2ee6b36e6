# SPDX-License-Identifier: Apache-2.0
"""Whether ranks run the same fixes on the same release, from what each of them tells. Pure.

Compared are the release, our version, the fixes in force and the hashes of the patched texts, and not where a tree
lies: nodes may have it in different places.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fixes.overlay.decision import told

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.overlay.report import Status


@dataclass(frozen=True, order=True)
class Account:
    """What one rank tells of itself."""

    version: str
    on: bool
    release: str
    in_force: tuple[str, ...]
    texts: tuple[str, ...]
    in_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        release = f"megatron-core {self.release}" if self.release else "no touched module of megatron.core imported"
        if not self.on:
            return f"overlay off ({release})" if self.release else "overlay off"
        return f"{told(self.in_force, self.in_files)}, {release}, megatron-fixes {self.version}"


def account_of(status: Status) -> Account:
    """What a rank tells, from its status."""
    texts = tuple(f"{module.module} {module.sha256}" for module in status.modules if module.sha256)
    return Account(status.version, status.on, status.release, status.in_force, texts, status.in_files)


def disagreement(accounts: Sequence[Account]) -> str:
    """Name the groups of ranks that differ, the largest first; empty if all agree.

    Args:
        accounts: One a rank of the group, in order of rank.
    """
    groups: dict[Account, list[int]] = {}
    for rank, account in enumerate(accounts):
        groups.setdefault(account, []).append(rank)
    if len(groups) <= 1:
        return ""
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{_ranks(ranks)}: {account}" for account, ranks in ordered)


def _ranks(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
