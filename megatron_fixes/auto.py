# SPDX-License-Identifier: Apache-2.0
"""Importing this module turns the overlay on: ``import megatron_fixes.auto`` before anything of Megatron.

The one module of this package whose import acts. It sets ``MEGATRON_FIXES=all`` in the environment, so that child
processes are covered as well, unless the variable says something already: a list of ids is kept, and ``0``, ``none``
or ``off`` keep the overlay off, so that it can be turned off without touching the code. An empty value counts as none.
Guards are installed too where ``MEGATRON_GUARDS`` names some (docs/guards.md).
"""

from __future__ import annotations

import os

from megatron_fixes import config
from megatron_fixes.overlay import start

if not os.environ.get(config.FIXES, "").strip():
    os.environ[config.FIXES] = config.ALL
if config.asked_fixes(os.environ[config.FIXES]):
    start.install(by="auto")
if os.environ.get(config.GUARDS, "").strip().lower() not in config.OFF:
    from megatron_fixes.guards import start as guards_start

    guards_start.at_interpreter_start()
