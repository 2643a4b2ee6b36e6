# SPDX-License-Identifier: Apache-2.0
"""One module a fix, and the harness that runs its ranks over unpacked releases.

The only room, besides guards, that imports megatron, and only in processes that the harness starts. Nothing
outside imports this room: the command line starts it as ``python -m megatron_fixes.proofs``.
"""
