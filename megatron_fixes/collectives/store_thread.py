# SPDX-License-Identifier: Apache-2.0
"""Asks the store within a bound: in a thread, since a client blocks for as long as the store's host is stopped.

A store's own timeout bounds how long it waits for a key, not how long it is silent: the host of a TCPStore that is
stopped, or can't be reached, answers nothing and closes nothing, and set, get and check wait for it without an end
(torch 2.13). So does the group that uses it; what is late there is told all the same.

At the exit of the interpreter (``threads``) there is no such bound in functions of ``atexit`` since Python 3.12, and
in destructors the store is not asked at all, on any Python.

Not handled: a question that was given up may still reach a store that goes on, and be answered to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from megatron_fixes.collectives import threads

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

# For an answer that needs no waiting for others.
ANSWER_S = 2.0


class StoreSilentError(RuntimeError):
    """The store gave no answer in time; an error of the store is a RuntimeError too."""


def ask(question: Callable[[], Answer], within_s: float = ANSWER_S) -> Answer:
    """Put a question to the store.

    Args:
        question: Talks to the store.
        within_s: How long to wait for it. The thread is a daemon, so that the interpreter's exit does not wait for it.

    Raises:
        StoreSilentError: There was no answer in time, or the interpreter is being torn down.
        RuntimeError: What the question raised.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def put() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked
            errors.append(error)

    if threads.interpreter_ends():
        raise StoreSilentError("the store can't be asked any more, the interpreter ends")
    thread = threads.start(put, "megatron-fixes-store")
    if thread is None:
        return question()
    thread.join(within_s)
    if answers:
        return answers[0]
    if errors:
        raise errors[0]
    raise StoreSilentError(f"no answer within {within_s:g} s")
