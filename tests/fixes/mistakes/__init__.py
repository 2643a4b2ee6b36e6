# SPDX-License-Identifier: Apache-2.0
"""One module a fix, ``mfNNNN``, with ``MISTAKES``: name to file, what is right in it, what is wrong."""
